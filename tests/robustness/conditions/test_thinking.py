"""With the other thinking flag."""

from specdec.robustness.conditions.thinking import Thinking
from specdec.robustness.run import plan
from tests.evaluation.test_conversation import TEMPLATE
from tests.robustness.made import CHAT, RAW, Pair, asked, clean, pair, setting


def test_the_template_reads_it(chat: Pair) -> None:
    found = setting(chat.target, [CHAT])
    assert asked(Thinking(False), CHAT, found) == clean(CHAT, found) + "<think></think>"
    assert plan(Thinking(False), found).skipped is None
    assert "what it does without it" in str(plan(Thinking(True), found).skipped)
    without = setting(chat.target, [CHAT], thinking=False)
    assert plan(Thinking(False), without).skipped is not None
    assert asked(Thinking(True), CHAT, without) + "<think></think>" == clean(CHAT, without)


def test_where_nothing_reads_it_it_is_not_measured(base: Pair) -> None:
    deaf = setting(pair(template=TEMPLATE).target, [CHAT])
    assert all("does not read the flag" in str(plan(Thinking(on), deaf).skipped) for on in (True, False))
    raw = plan(Thinking(True), setting(base.target, [RAW]))
    assert raw.skipped == "no prompt is written by a chat template"
