from pathlib import Path
from typing import Any

import pytest

from specdec.data.conversations import Conversation, conversation, read_conversations
from specdec.data.rows import Row
from tests.data.tiny import write_jsonl

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
OPENAI = {"messages": SAID}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def read(values: dict[str, Any]) -> Conversation:
    return conversation(Row("x", "line-1", values))


def test_the_layout_is_found_row_by_row(tmp_path: Path) -> None:
    mixed = {"conversations": SAID}
    path = write_jsonl(tmp_path / "a.jsonl", [OPENAI, SHAREGPT, mixed])
    found = read_conversations(str(path))
    assert [item.messages for item in found] == [SAID] * 3
    assert [item.place for item in found] == [f"{path}, line {number}" for number in (1, 2, 3)]


def test_an_id_is_the_row_s_own_or_of_what_is_said(tmp_path: Path) -> None:
    rows = [
        OPENAI | {"id": 7},
        SHAREGPT | {"prompt_id": "p"},
        OPENAI,
        SHAREGPT,
        OPENAI | {"id": "7"},
        {"id": "7#2"} | OPENAI,
    ]
    first, second, third, fourth, fifth, sixth = (
        item.id for item in read_conversations(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    )
    assert (first, second, fifth, sixth) == ("7", "p", "7#2", "7#2#2")
    assert len(third) == 16 and fourth == f"{third}#2"
    moved = write_jsonl(tmp_path / "b.jsonl", [{"score": 3} | OPENAI, OPENAI | {"tools": [{"name": "f"}]}])
    assert read_conversations(str(moved))[0].id == third != read_conversations(str(moved))[1].id


def test_a_chosen_layout_is_every_row_s(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", [OPENAI | {"conversations": []}]))
    assert read_conversations(path, "messages")[0].messages == SAID
    with pytest.raises(ValueError, match="line 1: layout alpaca needs instruction, output; the row's columns are conv"):
        read_conversations(path, "alpaca")
    with pytest.raises(ValueError, match="layout is 'openai': choose one of messages, sharegpt"):
        read_conversations(path, "openai")


def test_tools_may_stand_in_a_string() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in (tools, '[{"type": "function", "function": {"name": "f"}}]'):
        assert read(OPENAI | {"tools": value}).tools == tools
    assert read(OPENAI | {"tools": []}).tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"its columns \(text\) are of no known layout \(messages: messages; sharegpt: conversations"),
        (OPENAI | SHAREGPT, r"fit more than one layout \(messages, sharegpt\): choose one with layout"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "a message needs 'role' and 'content'"),
        ({"messages": ["hi"]}, "a message needs 'role' and 'content'"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "unknown role 'gpt'"),
        ({"conversations": [{"from": "alice", "value": "x"}]}, "unknown speaker 'alice'"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string, got int"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a string, got NoneType"),
        ({"conversations": [{"from": "gpt", "value": ["x"]}]}, "must be a string, got list"),
        ({"conversations": [{"from": ["x"], "value": "y"}]}, r"unknown speaker \['x'\]"),
        ({"conversations": [{"from": {"x": 1}, "value": "y"}]}, "unknown speaker"),
        ({"messages": [{"role": ["user"], "content": "y"}]}, r"unknown role \['user'\]"),
        ({"messages": {"role": 1}}, "must be a list of at least one message"),
        ({"messages": {"role": "user", "content": "hello you"}}, "must be a list of at least one message"),
        ({"messages": {"role": "user", "content": "four"}}, "must be a list of at least one message"),
        ({"messages": {"role": ["user"], "content": "y"}}, "must be a list of at least one message"),
        (OPENAI | {"tools": "f"}, "'tools' must be JSON"),
        (OPENAI | {"tools": {"f": 1}}, "'tools' must be a list"),
        (OPENAI | {"id": 1.5}, "the id must be a string or an integer, not float"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path: Path, row: dict, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [OPENAI, row])
    with pytest.raises(ValueError, match=message) as error:
        read_conversations([str(path)])
    assert f"{path}, line 2: " in str(error.value)
    assert "\n" not in str(error.value)
    left_out: list[str] = []
    assert len(read_conversations([str(path)], left_out=left_out)) == 1
    assert left_out == [str(error.value)]
    only = write_jsonl(tmp_path / "b.jsonl", [row])
    with pytest.raises(ValueError, match=r"b\.jsonl: holds no conversation but broken rows, as: .*b\.jsonl, line 1: "):
        read_conversations([str(path), str(only)], left_out=left_out)


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: holds no conversation"):
        read_conversations(f"{tmp_path}/*.jsonl")
