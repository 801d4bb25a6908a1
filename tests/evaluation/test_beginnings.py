"""Prompts out of packed validation rows."""

import pytest
import torch

from specdec.data import Document
from specdec.data.packing import pack_stream, pack_whole
from specdec.evaluation.beginnings import SHORTEST, beginnings


def text(start: int, length: int) -> Document:
    return Document(torch.arange(start, start + length), torch.ones(length, dtype=torch.bool))


def chat(start: int, length: int, answers: slice) -> Document:
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[answers] = True
    return Document(torch.arange(start, start + length), mask_T)


def test_a_text_is_cut_at_the_length_asked_for_or_at_its_half() -> None:
    rows = pack_stream([text(0, 100), text(200, 30), text(300, 12), text(400, 58)], 200)
    assert beginnings(rows, 8, 20, 500) == [list(range(20)), list(range(200, 215)), list(range(400, 420))]
    assert beginnings(rows, 2, 20, 500) == [list(range(20)), list(range(200, 215))]
    assert beginnings(rows, 8, 20, 10) == [list(range(n, n + 10)) for n in (0, 200, 400)]


def test_a_document_that_goes_on_in_the_next_row_counts_there_again() -> None:
    rows = pack_stream([text(0, 60)], 40)
    assert beginnings(rows, 8, 16, 500) == [list(range(16)), list(range(40, 50))]


def test_a_conversation_is_cut_where_its_first_answer_begins() -> None:
    documents = [chat(0, 40, slice(5, 9)), chat(100, 40, slice(0, 0)), chat(200, 30, slice(20, 30))]
    rows = pack_whole(documents, 64)
    assert sorted(beginnings(rows, 8, 20, 500)) == [[0, 1, 2, 3, 4], list(range(200, 220))]
    assert beginnings(rows, 8, 20, 19) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "documents",
    [
        [text(0, 2 * SHORTEST - 1)],
        [chat(0, 64, slice(50, 60))],
        [chat(0, 64, slice(0, 0))],
    ],
)
def test_no_prompt_is_one_clear_line(documents: list[Document]) -> None:
    rows = pack_stream(documents, 64)
    with pytest.raises(ValueError, match=r"begins within 49 tokens.*acceptance.prompts") as error:
        beginnings(rows, 8, 20, 49)
    assert "\n" not in str(error.value)


def test_a_target_without_room_makes_none() -> None:
    with pytest.raises(ValueError, match="within -3 tokens"):
        beginnings(pack_stream([text(0, 64)], 64), 8, 20, -3)
