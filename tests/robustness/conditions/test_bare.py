"""Without chat template and start token."""

from specdec.robustness.conditions.bare import Bare
from specdec.robustness.run import plan
from tests.robustness.made import CHAT, OWN, RAW, Pair, asked, setting


def test_the_contents_alone(chat: Pair) -> None:
    found = setting(chat.target, [CHAT, OWN])
    assert asked(Bare(), CHAT, found) == "what is two plus two?"
    assert asked(Bare(), OWN, found) == "S\n\nfine"


def test_it_is_refused_where_it_would_be_another_condition(chat: Pair, base: Pair) -> None:
    assert plan(Bare(), setting(base.target, [RAW])).skipped == "no prompt is written by a chat template"
    found = setting(chat.target, [CHAT])
    found.tokenizer.bos_token, before = None, found.tokenizer.bos_token
    try:
        assert "it is no_template" in str(plan(Bare(), found).skipped)
    finally:
        found.tokenizer.bos_token = before
