"""Sixteen kinds of conversation, as rows of the data that people have."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Row = dict[str, Any]

# a word that is not ASCII, a number, a string
ARGUMENTS = {"city": "Zürich", "days": 3, "unit": "celsius"}
OTHER_ARGUMENTS = {"place": "Malmö", "hours": 48, "scale": "mercalli"}


def _tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    types = {
        key: {"type": "integer" if isinstance(value, int) else "string"}
        for key, value in arguments.items()
    }
    properties = {key: value | {"description": f"the {key}"} for key, value in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}.", "parameters": parameters},
    }


TOOLS = [_tool("get_forecast", ARGUMENTS), _tool("find_tremors", OTHER_ARGUMENTS)]

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "what is two plus two?"}
AGAIN = {"role": "user", "content": "and the sky, is it green?"}
WEATHER = {"role": "user", "content": "will there be rain?"}
FOUR = {"role": "assistant", "content": "it is four"}
BLUE = {"role": "assistant", "content": "the sky is blue"}
RAIN = {"role": "assistant", "content": "bring an umbrella"}
FIRST_THOUGHT = "add both numbers"
SECOND_THOUGHT = "remember the noon"
CALL_THOUGHT = "ask the service"
LAST_THOUGHT = "clouds mean rain"


def _call(arguments: Any, name: str = "get_forecast", number: int = 1) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _calls(*calls: dict[str, Any], **more: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | more


def _result(text: str, name: str = "get_forecast", number: int = 1) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call_{number}", "content": text}


def _inline(thought: str, message: Message) -> Message:
    return message | {"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}


def _parts(message: Message) -> Message:
    first, rest = message["content"].split(" ", 1)
    texts = [{"type": "text", "text": f"{first} "}, {"type": "text", "text": rest}]
    return message | {"content": texts}


def _row(*messages: Message, tools: bool = False) -> Row:
    return {"messages": list(messages)} | ({"tools": TOOLS} if tools else {})


def _with_tools(*messages: Message) -> Row:
    return _row(*messages, tools=True)


CALL = _call(ARGUMENTS)
CALL_TEXT = _call(json.dumps(ARGUMENTS, ensure_ascii=False))
SECOND_CALL = _call(OTHER_ARGUMENTS, "find_tremors", 2)
CLOUDS = _result("dark clouds")
QUIET = _result("all quiet", "find_tremors", 2)
NOTHING = {"tool_calls": None, "reasoning_content": None, "name": None}
THOUGHT_TWICE = (
    ASKED,
    FOUR | {"reasoning_content": FIRST_THOUGHT},
    AGAIN,
    BLUE | {"reasoning_content": SECOND_THOUGHT},
)

KINDS: dict[str, Sequence[Row]] = {
    "plain": [_row(ASKED, FOUR)],
    "system": [_row(SYSTEM, ASKED, FOUR)],
    "turns": [
        _row(ASKED, FOUR, AGAIN, BLUE),
        _row(SYSTEM, ASKED, FOUR, AGAIN, BLUE),
        _row(*THOUGHT_TWICE),
        _row(*THOUGHT_TWICE[:3], BLUE),
        _row(ASKED, FOUR, *THOUGHT_TWICE[2:]),
    ],
    "thought": [
        *(
            _row(ASKED, FOUR | {key: FIRST_THOUGHT})
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        _row(ASKED, _inline(FIRST_THOUGHT, FOUR)),
        _row(SYSTEM, ASKED, _inline(FIRST_THOUGHT, FOUR), AGAIN, _inline(SECOND_THOUGHT, BLUE)),
    ],
    "empty thought": [
        _row(ASKED, FOUR | {"reasoning_content": ""}),
        _row(ASKED, _inline("", FOUR)),
    ],
    "call with content": [
        _with_tools(WEATHER, _calls(CALL, content="one moment")),
        _with_tools(WEATHER, _calls(CALL, content="one moment", reasoning_content=CALL_THOUGHT)),
    ],
    "call without content": [
        _with_tools(WEATHER, _calls(CALL)),
        _with_tools(
            WEATHER, {name: value for name, value in _calls(CALL).items() if name != "content"}
        ),
        _with_tools(WEATHER, _calls(CALL, reasoning_content=CALL_THOUGHT)),
    ],
    "string arguments": [_with_tools(WEATHER, _calls(CALL_TEXT))],
    "object arguments": [_with_tools(SYSTEM, WEATHER, _calls(CALL))],
    "two calls": [_with_tools(WEATHER, _calls(CALL, SECOND_CALL))],
    "result and answer": [
        _with_tools(WEATHER, _calls(CALL), CLOUDS, RAIN),
        _with_tools(WEATHER, _calls(CALL, content="one moment"), CLOUDS, RAIN),
        _with_tools(WEATHER, _calls(CALL, SECOND_CALL), CLOUDS, QUIET, RAIN, AGAIN, BLUE),
        _with_tools(
            WEATHER,
            _calls(CALL, reasoning_content=CALL_THOUGHT),
            CLOUDS,
            RAIN | {"reasoning_content": LAST_THOUGHT},
        ),
    ],
    "parts": [
        _row(_parts(ASKED), _parts(FOUR)),
        _row(_parts(SYSTEM), _parts(ASKED), _parts(FOUR), _parts(AGAIN), _parts(BLUE)),
    ],
    "null": [
        _row(ASKED, FOUR | NOTHING),
        _with_tools(WEATHER, _calls(CALL_TEXT, content=None), CLOUDS, RAIN | NOTHING),
    ],
    "consecutive": [_row(ASKED, FOUR, BLUE)],
    "trailing user": [_row(ASKED, FOUR, AGAIN)],
    "end": [_with_tools(SYSTEM, ASKED, FOUR, WEATHER, _calls(CALL), CLOUDS, RAIN, AGAIN)],
}
