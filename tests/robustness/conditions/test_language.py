"""In another language."""

import pytest

from specdec.robustness.conditions.language import Language
from specdec.robustness.texts import LANGUAGES
from tests.robustness.made import CHAT, OWN, RAW, Pair, asked, setting


@pytest.mark.parametrize("condition", Language.usual(), ids=lambda one: one.code)
def test_the_instruction_stands_before_what_the_user_says(chat: Pair, condition: Language) -> None:
    text = LANGUAGES[condition.code]
    found = setting(chat.target, [CHAT, OWN, RAW])
    assert asked(condition, CHAT, found) == f"<s>[user]{text}\n\nwhat is two plus two?[assistant]"
    assert asked(condition, OWN, found) == f"<s>[system]S[user]{text}\n\nfine[assistant]"
    assert asked(condition, RAW, found) == f"<s>{text}\n\nthe grass is"


def test_every_language_has_a_name() -> None:
    assert [one.code for one in Language.usual()] == list(LANGUAGES)
    assert Language("ar").title == "instruction in Arabic"
    assert len({one.title for one in Language.usual()}) == len(set(LANGUAGES.values())) == len(LANGUAGES)
