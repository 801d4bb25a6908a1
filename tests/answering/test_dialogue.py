"""Which answers of a row are due, and where its conversation ends."""

from pathlib import Path
from typing import Any

import pytest

from specdec.answering.dialogue import (
    LENGTH,
    ORPHAN,
    OTHERWISE,
    SILENT,
    SPOKEN,
    UNREADABLE,
    Dialogue,
    TurnAnswer,
    pack_ids,
    same_value,
    unpack_ids,
)
from specdec.data.chat import read_conversations
from tests.data.tiny import write_jsonl

S, U, V = (
    {"role": role, "content": text}
    for role, text in (("system", "be"), ("user", "u"), ("user", "v"))
)
A, B = ({"role": "assistant", "content": text} for text in "ab")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": TOOLS}
TOOL = {"role": "tool", "content": "4"}


def read_rows(tmp_path: Path, *rows: Any) -> list[Dialogue]:
    return list(
        map(Dialogue.of, read_conversations(str(write_jsonl(tmp_path / "rows.jsonl", list(rows)))))
    )


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
def test_every_answer_is_due_to_what_was_said_before(
    messages: list[Any], said: list[Any], tmp_path: Path
) -> None:
    (row,) = read_rows(tmp_path, {"messages": messages})
    assert [turn.messages for turn in row.turns] == said and not row.calls_tools
    assert row.skipped is None


@pytest.mark.parametrize(
    ("messages", "said", "calls", "cut"),
    [
        ([U, A, V, CALL, TOOL, B], [[U], [V], [TOOL]], [0, 1, 0], None),
        ([S, U, CALL, TOOL, TOOL, B, V, A], [[S, U], [TOOL, TOOL], [V]], [1, 0, 0], None),
        ([U, CALL, TOOL], [[U], [TOOL]], [1, 0], None),  # somebody waits for what the result says
        ([U, CALL], [[U]], [1], None),
        ([U, A, CALL, CALL, TOOL], [[U], [TOOL]], [2, 0], None),  # one answer in three messages
        ([U, CALL, TOOL, CALL, TOOL, A], [[U], [TOOL], [TOOL]], [1, 1, 0], None),
        ([U, A, V, B, TOOL], [[U], [V]], [0, 0], ORPHAN),
        ([U, A, TOOL, B, V, A], [[U]], [0], ORPHAN),
        ([U, A, V, TOOL, B], [[U], [V]], [0, 0], ORPHAN),
    ],
)
def test_results_of_tools_are_answered_too(
    messages: list[Any], said: list[Any], calls: list[int], cut: str | None, tmp_path: Path
) -> None:
    (row,) = read_rows(tmp_path, {"messages": messages, "tools": TOOLS})
    assert [turn.messages for turn in row.turns] == said
    assert [len(turn.calls) for turn in row.turns] == calls
    assert (row.skipped, row.cut, row.tools) == (None, cut, TOOLS)


@pytest.mark.parametrize(
    ("messages", "skipped"),
    [
        ([A, U, B], "the assistant speaks before any user does"),
        ([S, A], "the assistant speaks before any user does"),
        ([S], "no user's turn"),
        ([A], "the assistant speaks before any user does"),
        ([TOOL, U, A], "a tool's result in the row answers no call"),
    ],
)
def test_rows_that_nobody_can_answer(messages: list[Any], skipped: str, tmp_path: Path) -> None:
    (row,) = read_rows(tmp_path, {"messages": messages})
    assert row.skipped == skipped and row.turns == []


def test_ids_are_stable_and_unique(tmp_path: Path) -> None:
    first = {"messages": [U, A]}
    second = {"messages": [V, A]}
    rows = read_rows(
        tmp_path, first, {"id": "mine", **first}, second, first, {"id": "mine", **second}
    )
    names = [row.id for row in rows]
    assert len(set(names)) == 5
    assert names[3] == f"{names[0]}#2" and (names[1], names[4]) == ("mine", "mine#2")
    assert [row.id for row in read_rows(tmp_path, second, first)] == [names[2], names[0]]


def call(arguments: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", **more, "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", *calls: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
    }


TWO = {"x": [1, {"y": None}], "z": "a"}


@pytest.mark.parametrize(
    ("recorded", "message", "reason"),
    [
        (answer("", call(TWO)), answer("", call('{"z": "a", "x": [1.0, {"y": null}]}')), None),
        # what is said beside it does not matter
        (answer("", call({})), answer("I call.", call("")), None),
        (answer("", call({})), answer("", call({}, "g")), OTHERWISE),
        (answer("", call({"x": 1})), answer("", call({"x": True})), OTHERWISE),
        (answer("", call({"x": 1})), answer("", call({"x": 1, "y": 1})), OTHERWISE),
        (answer("", call({"x": 1})), answer("", call({"x": 1}), call({"x": 1})), OTHERWISE),
        (answer("", call({}), call({}, "g")), answer("", call({}, "g"), call({})), OTHERWISE),
        (answer("", call({})), answer("four"), SILENT),
        (answer("", call({})), answer('<tool>{"name": "f", "arguments"'), UNREADABLE),
        (answer("", call({})), answer("if so"), SILENT),
        (answer("", call({})), answer("", call('"{"')), UNREADABLE),
        (answer("four"), answer("", call({})), SPOKEN),
        (answer("four"), answer("", call("[]")), UNREADABLE),
        (answer("four"), answer("f is five"), None),
    ],
)
def test_a_call_is_compared_with_the_rows(
    recorded: dict[str, Any], message: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    behind = TOOL if "tool_calls" in recorded else V
    (row,) = read_rows(
        tmp_path, {"messages": [U, recorded, behind, B], "tools": [TOOLS[0], {"name": "g"}]}
    )
    row.add(message=message)
    assert (row.departure(row.answers[0]), row.done) == (reason, bool(reason))
    assert (row.ended, row.complete) == (reason, False)
    assert row.messages()[0] == U and row.messages()[2:] == [behind] * (not reason)
    if reason != UNREADABLE:
        assert row.messages()[1] == message  # the target's own answer stays
    if not reason:
        row.add(message=A)
        assert row.done and row.complete


def test_nothing_depends_on_the_last_answers_calls(tmp_path: Path) -> None:
    (row,) = read_rows(tmp_path, {"messages": [U, CALL], "tools": TOOLS})
    row.add(message=A)
    assert row.complete and row.ended is None


def test_the_rows_ids_of_calls_are_taken_over(tmp_path: Path) -> None:
    """Results refer to them."""
    result = {"role": "tool", "content": "4", "tool_call_id": "x"}
    (row,) = read_rows(tmp_path, {"messages": [U, answer("", call({}, id="x")), result, V]})
    row.add(message=answer("", call("{}", id="chatcmpl-tool-1")))
    assert row.messages() == [U, answer("", call("{}", id="x")), result, V]
    (row,) = read_rows(tmp_path, {"messages": [U, answer("", call({})), TOOL, V]})
    row.add(message=answer("", call("{}", id="chatcmpl-tool-1")))
    assert row.messages()[1] == answer("", call("{}"))


def test_an_answer_says_what_training_needs(tmp_path: Path) -> None:
    (row,) = read_rows(tmp_path, {"messages": [U]})
    ids = {"prompt_token_ids": pack_ids([3, 70_000]), "token_ids": pack_ids([1, 2])}
    for more, wanted in (
        ({**ids}, {"prompt_token_ids": [3, 70_000], "token_ids": [1, 2]}),
        (
            {**ids, "finish": LENGTH},
            {"prompt_token_ids": [3, 70_000], "token_ids": [1, 2], "finish_reason": LENGTH},
        ),
        ({"finish": LENGTH}, {"finish_reason": LENGTH, "weight": 0}),  # an end would be made up
        ({}, {}),
    ):
        row.answers = [TurnAnswer(row.id, 0, A, **more)]  # type: ignore[arg-type]
        assert row.messages(ids=True) == [U, A | wanted]
        assert row.messages() == [U, A]


def test_values_of_json() -> None:
    for first, second in (
        (1, 1.0),
        ([], []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (None, None),
        ("ä", "\u00e4"),
    ):
        assert same_value(first, second)
    for first, second in (
        (1, True),
        (0, False),
        (0, None),
        ("1", 1),
        ([1], [1, 1]),
        ([], {}),
        ({"a": 1}, {"b": 1}),
    ):
        assert not same_value(first, second) and not same_value(second, first)
    assert unpack_ids(pack_ids([])) == []
