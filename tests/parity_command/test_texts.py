"""The places that are compared."""

import pytest

from specdec.decoding import PlainDecoder
from specdec.parity.texts import EACH, PROMPTS, Place, Text, answered, default_prompts, places, spaced
from tests.parity_command.made import target


def test_every_place_has_its_tokens() -> None:
    """Slot t at depth k reads token t + 1 + k."""
    text = Text(list(range(40)), 20)
    found = places(text, 7)
    assert found == [
        Place("prompt", [0, 6, 11, 17]),
        Place("boundary", [18, 19, 20]),
        Place("answer", [21, 24, 28, 31]),
    ]
    assert found[-1].anchors[-1] + 1 + 7 == 39


@pytest.mark.parametrize(("prompt", "wanted"), [(1, [0, 1]), (2, [0, 1, 2]), (3, [1, 2, 3])])
def test_short_prompts(prompt: int, wanted: list[int]) -> None:
    found = {place.name: place.anchors for place in places(Text([0] * (prompt + 10), prompt), 7)}
    assert found["boundary"] == wanted and ("prompt" in found) == (prompt > 2)
    assert found["answer"] == [prompt + 1]


def test_spaced_slots_hold_both_ends() -> None:
    assert spaced(range(3, 3)) == [] and spaced(range(3, 7)) == [3, 4, 5, 6]
    assert spaced(range(100)) == [0, 33, 66, 99] and len(spaced(range(5, 1000))) == EACH


def test_the_answers_are_the_targets_own() -> None:
    (text,) = answered(target(), [[3, 4]], 12, 7)
    assert text.ids == [3, 4, *PlainDecoder(target()).generate([3, 4], 12).ids] and text.prompt == 2


@pytest.mark.parametrize(
    ("asked", "new", "depth", "message"),
    [
        ([[3]], 9, 7, "max_new_tokens is 9: drafts of depth 7 need 10 or more"),
        ([[3]], 9, -1, "depth is -1"),
        ([], 20, 7, "no prompt given"),
    ],
)
def test_wrong_arguments(asked: list[list[int]], new: int, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answered(target(), asked, new, depth)


def test_the_built_in_prompts_are_of_several_lengths() -> None:
    assert [prompt.text for prompt in default_prompts()] == list(PROMPTS)
    assert len({len(text) for text in PROMPTS}) == len(PROMPTS) == 3
    assert len(default_prompts(2)) == 2
    with pytest.raises(ValueError, match="limit is 0"):
        default_prompts(0)
