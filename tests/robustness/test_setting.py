"""What conditions are applied to."""

import pytest

from specdec.robustness.setting import said, saying
from tests.robustness.made import CHAT, OWN, RAW, Pair, clean, setting


def test_the_first_words_are_found_and_replaced() -> None:
    assert [said(prompt) for prompt in (RAW, CHAT, OWN)] == ["the grass is", "what is two plus two?", "fine"]
    for prompt in (RAW, CHAT, OWN):
        other = saying(prompt, "else")
        assert said(other) == "else" and saying(other, said(prompt)) == prompt
    assert saying(CHAT, "else").turns == ["else", "and three?"]
    assert saying(OWN, "else").messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "else"}]


def test_the_clean_run_is_that_of_evaluate(chat: Pair) -> None:
    found = setting(chat.target, [CHAT], system="Be brief.", thinking=False)
    assert clean(CHAT, found) == "<s>[system]Be brief.[user]what is two plus two?[assistant]<think></think>"
    with pytest.raises(ValueError, match="raw text takes no system prompt"):
        found.clean(RAW)
    assert found.positions == 512


def test_filler_is_cut_between_tokens_and_letters_stay_whole(chat: Pair) -> None:
    found = setting(chat.target, [CHAT], documents=lambda: ["äöü" * 20, "other"])
    assert found.filler(5, without="x") == "äö"  # the third letter's first byte is left out
    assert found.filler(4, without="ä") == "othe"
