"""One turn of a list of messages, as OpenAI or as ShareGPT writes it."""

from typing import Any

from specdec.data.layouts.layout import ROLES, Message, Values, parsed, with_system

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


def read_turns(row: Values, key: str, place: str) -> list[Message]:
    """A column of turns, behind the system prompt if that has a column of its own.

    Raises:
        ValueError: the column is no list with something in it, or a turn is malformed.
    """
    turns = row[key]
    columns = turns.values() if isinstance(turns, dict) else ()
    if all(isinstance(one, list) for one in columns) and len({len(one) for one in columns}) == 1:
        # a table of columns: how older versions of datasets keep a list of objects
        turns = [dict(zip(turns, one, strict=True)) for one in zip(*columns, strict=True)]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: {key!r} must be a list of at least one message")
    return with_system(row, [message(turn, place) for turn in turns], place)


def message(turn: Any, place: str) -> Message:
    """A turn as a message; further keys (thinking, tool calls) are the template's to read.

    Raises:
        ValueError: its speaker is unknown, or it has no text.
    """
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        out = _sharegpt(turn, place)
    elif isinstance(turn, dict) and "role" in turn and ("content" in turn or "tool_calls" in turn):
        if turn["role"] not in ROLES:
            raise ValueError(f"{place}: unknown role {turn['role']!r}; known: {', '.join(ROLES)}")
        # null stands for an absent key, but for content: templates tell a null from an empty text
        out = {name: value for name, value in turn.items() if value is not None or name == "content"}
        if isinstance(out.get("content"), list):
            out["content"] = _joined(out["content"])
    else:
        raise ValueError(f"{place}: a message needs 'role' and 'content', or 'from' and 'value'")
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], place)
    calls = bool(out.get("tool_calls")) and out.get("content") is None
    if not calls and not isinstance(out.get("content"), str):
        raise ValueError(f"{place}: a message's text must be a string, got {type(out.get('content')).__name__}")
    return out


def _sharegpt(turn: dict[str, Any], place: str) -> Message:
    if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
        raise ValueError(f"{place}: unknown speaker {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    said: Message = {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}
    if turn["from"] == "function_call":
        function = parsed(turn["value"], f"{place}: a function call")
        said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return said | rest


def _joined(parts: list[Any]) -> Any:
    """Parts of text as one text, a line each, as servers join them; other parts stay, to be refused."""
    if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return parts


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Calls with their arguments as an object: templates write the JSON themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place}: 'tool_calls' must be a list of objects")
    out = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError(f"{place}: a tool call needs a function with its name")
        if "arguments" in function:
            arguments = parsed(function["arguments"], f"{place}: the arguments of tool call {function['name']}")
            function = {**function, "arguments": arguments}
        out.append({**call, "function": function} if "function" in call else function)
    return out
