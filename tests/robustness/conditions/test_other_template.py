"""By another model's chat template."""

import pytest

from specdec.robustness.conditions.other_template import OtherTemplate
from specdec.robustness.run import plan
from specdec.robustness.templates import FAMILIES
from tests.robustness.made import CHAT, OWN, RAW, Pair, asked, pair, setting

EXPECTED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nfine<|im_end|>\n<|im_start|>assistant\n",
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nfine"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma": "<start_of_turn>user\nS\n\nfine<end_of_turn>\n<start_of_turn>model\n",
    "alpaca": "S\n\n### Instruction:\nfine\n\n### Response:\n",
}


def test_every_family_is_offered() -> None:
    assert [one.family for one in OtherTemplate.usual()] == list(FAMILIES) == list(EXPECTED)


@pytest.mark.parametrize("condition", OtherTemplate.usual(), ids=lambda one: one.family)
def test_a_conversation_in_its_manner(chat: Pair, condition: OtherTemplate) -> None:
    found = setting(chat.target, [OWN, CHAT], thinking=False)
    assert asked(condition, OWN, found) == "<s>" + EXPECTED[condition.family]
    conversation = condition.conversation(CHAT, found)
    conversation.next_ids()
    conversation.add_answer(found.tokenizer.encode("4", add_special_tokens=False))
    later = found.tokenizer.decode(conversation.next_ids())
    assert later.index("two plus two?") < later.index("4") < later.index("and three?")
    assert "S" not in later.replace("<s>", "").split("two plus two?")[0]


def test_a_target_of_that_family_is_not_disturbed(base: Pair) -> None:
    own = setting(pair(template=FAMILIES["chatml"]).target, [CHAT])
    assert plan(OtherTemplate("chatml"), own).skipped == "the target's own template writes every prompt so"
    assert plan(OtherTemplate("gemma"), own).skipped is None
    raw = plan(OtherTemplate("gemma"), setting(base.target, [RAW]))
    assert raw.skipped == "no prompt is written by a chat template"
