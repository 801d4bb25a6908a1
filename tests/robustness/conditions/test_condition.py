"""What all conditions have in common."""

import pytest

from specdec.decoding import Sampling
from specdec.robustness.conditions import ALL, KINDS, Condition
from specdec.robustness.parse import parse_conditions
from tests.robustness.made import CHAT, Pair, asked, clean, setting


def test_the_base_changes_nothing(chat: Pair) -> None:
    found, base = setting(chat.target, [CHAT]), Condition()
    assert asked(base, CHAT, found) == clean(CHAT, found)
    assert base.sampling(Sampling()) == Sampling() and base.drafter(chat.drafter, 0) is chat.drafter
    assert base.refusal(found) is None and base.note(found) == ""
    with pytest.raises(TypeError, match="title"):
        _ = base.title


def test_names_lead_back_to_the_conditions() -> None:
    every = [one for kind in ALL for one in kind.usual()]
    assert parse_conditions([one.name for one in every]) == every
    assert len({one.title for one in every}) == len(every) and len(KINDS) == len(ALL)
    close = ["noise_hidden:alpha=0.1234567", "noise_hidden:alpha=0.1234568"]
    assert [one.name for one in parse_conditions(close)] == close
