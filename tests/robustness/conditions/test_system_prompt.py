"""Under somebody else's system prompt."""

import pytest

from specdec.robustness.conditions.system_prompt import SystemPrompt
from specdec.robustness.run import plan
from specdec.robustness.texts import SYSTEM_PROMPTS
from tests.robustness.made import CHAT, OWN, RAW, Pair, asked, pair, setting


@pytest.fixture(scope="module")
def roomy() -> Pair:
    return pair(max_position_embeddings=4096)


@pytest.mark.parametrize("condition", SystemPrompt.usual(), ids=lambda one: one.text)
def test_it_stands_instead_of_any_other(roomy: Pair, condition: SystemPrompt) -> None:
    text = SYSTEM_PROMPTS[condition.text]
    found = setting(roomy.target, [CHAT, RAW])
    assert asked(condition, CHAT, found) == f"<s>[system]{text}[user]what is two plus two?[assistant]"
    assert asked(condition, OWN, found) == f"<s>[system]{text}[user]fine[assistant]"
    assert asked(condition, RAW, found) == f"<s>{text}\n\nthe grass is"


def test_all_texts_are_offered_and_of_the_lengths_that_their_names_say() -> None:
    assert [one.text for one in SystemPrompt.usual()] == list(SYSTEM_PROMPTS)
    assert len(SYSTEM_PROMPTS["short"].split()) < 10 < 250 < len(SYSTEM_PROMPTS["long"].split())


def test_a_template_that_takes_none_leaves_its_reason(chat: Pair) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    made = plan(SystemPrompt("short"), setting(pair(template=strict).target, [CHAT]))
    assert "no system here" in str(made.skipped)
    too_long = plan(SystemPrompt("long"), setting(chat.target, [CHAT]))
    assert "exceed the target's 512 positions" in str(too_long.skipped)
