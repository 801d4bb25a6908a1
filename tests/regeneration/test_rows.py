"""What is asked of a row, and what is not."""

from pathlib import Path
from typing import Any

import pytest

from specdec.regeneration.rows import CALLS, NOBODY, UNASKED, Row, digest, read_beginnings, read_chats
from tests.data.tiny import tiny_tokenizer, write_jsonl

S, U, V = ({"role": role, "content": text} for role, text in (("system", "be"), ("user", "u"), ("user", "v")))
A, B = ({"role": "assistant", "content": text} for text in "ab")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
TOOL = {"role": "tool", "content": "4"}


def read(tmp_path: Path, *rows: Any) -> list[Row]:
    return read_chats(str(write_jsonl(tmp_path / "rows.jsonl", list(rows))))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([U, A], [[U]]),
        ([S, U, A, V, B], [[S, U], [V]]),
        ([U, A, V], [[U], [V]]),  # the last user's turn is answered, too
        ([U], [[U]]),
        ([U, A, B, V], [[U], [V]]),  # one answer in two messages
        ([U, S, V, A], [[U, S, V]]),
        ([U, A, S], [[U]]),  # nobody waits for an answer
    ],
)
def test_every_answer_is_due_to_what_was_said_before(messages: list[Any], said: list[Any], tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": messages})
    assert row.said == said and row.answers == len(said)
    assert row.skipped is None and not row.cut


@pytest.mark.parametrize(
    ("messages", "said", "skipped"),
    [
        ([U, A, V, CALL, TOOL, B], [[U]], None),
        ([U, A, V, B, TOOL], [[U], [V]], None),
        ([S, U, CALL, TOOL, B, V, A], [], CALLS),
        ([TOOL, U, A], [], CALLS),
    ],
)
def test_a_row_is_cut_before_the_first_tool_call(
    messages: list[Any], said: list[Any], skipped: str | None, tmp_path: Path
) -> None:
    (row,) = read(tmp_path, {"messages": messages, "tools": [{"name": "f"}]})
    assert (row.said, row.skipped, row.cut) == (said, skipped, skipped is None)
    assert row.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("messages", "skipped"), [([A, U, B], UNASKED), ([S, A], UNASKED), ([S], NOBODY), ([A], UNASKED)]
)
def test_rows_that_nobody_can_answer(messages: list[Any], skipped: str, tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": messages})
    assert row.skipped == skipped and row.said == []


def test_ids_are_stable_and_unique(tmp_path: Path) -> None:
    one, two = {"messages": [U, A]}, {"messages": [V, A]}
    rows = read(tmp_path, one, {"id": "mine", **one}, two, one, {"id": "mine", **two})
    names = [row.id for row in rows]
    assert len(set(names)) == 5
    assert names[3] == f"{names[0]}#2" and (names[1], names[4]) == ("mine", "mine#2")
    assert [row.id for row in read(tmp_path, two, one)] == [names[2], names[0]]


def test_the_digest_is_of_what_is_asked(tmp_path: Path) -> None:
    whole = read(tmp_path, {"messages": [U, A]}, {"messages": [V, A]})
    assert digest(whole) == digest([row._replace(place="elsewhere") for row in whole])
    others = [whole[::-1], whole[:1], [whole[0]._replace(tools=[{}]), whole[1]], [whole[0]._replace(id="x"), whole[1]]]
    assert len({digest(rows) for rows in [whole, *others]}) == 5


def test_beginnings_are_the_first_tokens_of_texts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = "the sky is blue and the grass is gründ\n\n and two"
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": text}, {"prompt": "the", "id": 7}, {"text": ""}])
    (tmp_path / "plain.txt").write_text(text)
    rows = read_beginnings([str(path), str(tmp_path / "plain.txt")], tokenizer, 6)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert rows[0].text == tokenizer.decode(ids[:6])
    assert text.startswith(rows[0].text) and 0 < len(rows[0].text) < len(text)
    assert (rows[1].id, rows[1].text) == ("7", "the")
    assert rows[2].skipped == "an empty text"
    assert rows[3].text == rows[0].text and rows[3].id == f"{rows[0].id}#2"
    assert [row.answers for row in rows] == [1] * 4
    for count in range(1, len(ids) + 2):  # ü is two tokens, and never half of one is asked
        (row, *_) = read_beginnings(str(path), tokenizer, count)
        assert text.startswith(row.text)


def test_broken_texts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}, {"said": "b"}])
    with pytest.raises(ValueError, match=r"t.jsonl, line 2: with prompt_tokens a row needs a string"):
        read_beginnings(str(path), tiny_tokenizer(), 4)
    with pytest.raises(ValueError, match="prompt_tokens must be at least 1"):
        read_beginnings(str(path), tiny_tokenizer(), 0)
