"""What each layout reads, and which one a row has."""

from typing import Any

import pytest

from specdec.data.layouts import LAYOUTS, named, recognise
from specdec.data.layouts.turns import SHAREGPT_ROLES

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]

READ: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": SAID, "source": "web"}, SAID),
    ("messages", {"prompt": "hi", "prompt_id": "a", "messages": SAID}, SAID),
    ("messages", {"messages": [{"role": "user", "content": "hi", "name": None}, SAID[1]]}, SAID),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, SAID[1]]}, SAID),
    ("messages", {"system": "be brief", "messages": SAID}, [SYSTEM, *SAID]),
    ("messages", {"system": "be brief", "messages": [SYSTEM, *SAID]}, [SYSTEM, *SAID]),
    ("sharegpt", {"conversations": TURNS}, SAID),
    ("sharegpt", {"conversations": {"from": ["human", "gpt"], "value": ["hi", "hello"]}}, SAID),
    ("sharegpt", {"system": "be brief", "conversations": TURNS}, [SYSTEM, *SAID]),
    ("ultrachat", {"id": "0", "data": ["hi", "hello", "so?"]}, [*SAID, {"role": "user", "content": "so?"}]),
    ("alpaca", {"instruction": "hi", "output": "hello"}, SAID),
    ("alpaca", {"instruction": "hi", "input": "", "output": "hello", "text": "Below"}, SAID),
    ("prompt_response", {"prompt": "hi", "response": "hello"}, SAID),
    ("prompt_response", {"prompt": "hi", "completion": "hello", "id": 3}, SAID),
    ("prompt_response", {"prompt": "hi", "answer": "hello"}, SAID),
    ("prompt_response", {"question": "hi", "answer": "hello"}, SAID),
    ("prompt_response", {"system_prompt": "be brief", "question": "hi", "response": "hello"}, [SYSTEM, *SAID]),
]


@pytest.mark.parametrize(("name", "row", "messages"), READ)
def test_each_layout_reads_its_rows(name: str, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    layout = recognise(row, "x")
    assert layout.name == name
    assert layout.messages(row, "x") == messages
    assert named(name) is layout


def test_an_alpaca_input_follows_after_a_blank_line() -> None:
    row = {"instruction": "add", "input": "1, 2", "output": "3"}
    assert recognise(row, "x").messages(row, "x")[0]["content"] == "add\n\n1, 2"


def test_what_a_template_may_read_is_kept() -> None:
    thought = {"role": "assistant", "content": "hello", "reasoning_content": "hm", "thinking": "so"}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    row = {"messages": [SAID[0], call, result, thought]}
    assert recognise(row, "x").messages(row, "x") == row["messages"]


def test_a_call_s_arguments_become_an_object() -> None:
    written = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for calls in ([written], [CALL], [written["function"]]):
        row = {"messages": [SAID[0], {"role": "assistant", "content": "", "tool_calls": calls}]}
        call = recognise(row, "x").messages(row, "x")[1]["tool_calls"][0]
        assert call.get("function", call) == CALL["function"]
    turns = [TURNS[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
             {"from": "observation", "value": "2"}]  # fmt: skip
    row = {"conversations": turns}
    _, call, result = recognise(row, "x").messages(row, "x")
    assert call == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert result == {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"its columns \(none\) are of no known layout"),
        ({"instruction": "a", "output": "b", "messages": SAID}, r"more than one layout \(messages, alpaca\)"),
        ({"prompt": "a", "response": "b", "data": ["a"]}, r"more than one layout \(ultrachat, prompt_response\)"),
        (
            {"question": "a", "answer": "b", "context": "c"},
            "context may be a part of what is said, and prompt_r",
        ),
        ({"instruction": "a", "output": "b", "history": []}, "history may be a part of what is said, and alpaca"),
        ({"prompt": "a", "response": "b", "answer": "c"}, "answer may be a part of what is said"),
    ],
)
def test_a_row_of_no_or_of_several_layouts_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^place: .*{message}"):
        recognise(row, "place")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": 3, "output": "b"}, "'instruction' must be a string, got int"),
        ("alpaca", {"instruction": "a", "input": ["b"], "output": "b"}, "'input' must be a string, got list"),
        ("prompt_response", {"prompt": "a", "response": ["b"]}, "'response' must be a string, got list"),
        ("prompt_response", {"prompt": "a", "question": "b", "answer": "c"}, "'prompt' and 'question' may each be"),
        ("ultrachat", {"data": ["a", 3]}, "'data' must be a list of at least one string"),
        ("ultrachat", {"data": []}, "'data' must be a list of at least one string"),
        ("messages", {"system": "be long", "messages": [SYSTEM, *SAID]}, "two different system prompts"),
        ("messages", {"system": 3, "messages": SAID}, "'system' must be a string"),
        ("messages", {"messages": [SAID[0] | {"tool_calls": "f"}]}, "'tool_calls' must be a list"),
        ("messages", {"messages": [SAID[0] | {"tool_calls": [{"function": "f"}]}]}, "needs a function with its name"),
        (
            "messages",
            {"messages": [SAID[0] | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of tool call f must be JSON",
        ),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "{"}]}, "a function call must be JSON"),
        ("sharegpt", {"conversations": {"from": ["human"], "value": []}}, "must be a list of at least one message"),
    ],
)
def test_a_malformed_row_is_named(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^place: .*{message}"):
        named(name).messages(row, "place")


def test_names_are_unique_and_speakers_known() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    assert set(SHAREGPT_ROLES.values()) == {"user", "assistant", "system", "tool"}
