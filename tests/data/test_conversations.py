from pathlib import Path

import pytest

from specdec.data.conversations import conversation, read_conversations
from tests.data.tiny import write_jsonl

OPENAI = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def test_the_layout_is_found_row_by_row(tmp_path: Path) -> None:
    mixed = {"conversations": OPENAI["messages"]}
    path = write_jsonl(tmp_path / "a.jsonl", [OPENAI, SHAREGPT, mixed])
    read = read_conversations(str(path))
    assert [item.messages for item in read] == [OPENAI["messages"]] * 3
    assert [item.place for item in read] == [f"{path}, line {number}" for number in (1, 2, 3)]


def test_what_a_template_may_read_is_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    read = conversation({"messages": [OPENAI["messages"][0], call], "tools": tools}, "x")
    assert read.messages[1] == call
    assert read.tools == tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"needs 'messages' or 'conversations', it has neither, only \['text'\]"),
        (OPENAI | SHAREGPT, "it has both"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "a message needs 'role' and 'content'"),
        ({"messages": ["hi"]}, "a message needs 'role' and 'content'"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "unknown role 'gpt'"),
        ({"conversations": [{"from": "alice", "value": "x"}]}, "unknown speaker 'alice'"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string, got int"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a string, got NoneType"),
        ({"conversations": [{"from": "gpt", "value": ["x"]}]}, "must be a string, got list"),
        (OPENAI | {"tools": "f"}, "'tools' must be a list"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path: Path, row: dict, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [OPENAI, row])
    with pytest.raises(ValueError, match=message) as error:
        read_conversations([str(path)])
    assert f"{path}, line 2: " in str(error.value)


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: the file holds no conversation"):
        read_conversations(f"{tmp_path}/*.jsonl")
