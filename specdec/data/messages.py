"""Messages of conversations: one form of them, whatever a row calls their parts."""

import json
from typing import Any

Message = dict[str, Any]
"""``role``, one of ``ROLES``, ``content``, and what else the template may read."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message's thought
WEIGHT_KEYS = ("weight", "train", "loss")  # of whether a message is learned
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of the parts of a content
# of a message; they change what is said
UNREAD_KEYS = ("prefix", "partial", "reasoning_details", "thoughts", "audio")


def parse_json_field(value: Any, what: str) -> Any:
    """Return the value of a string of JSON, or what is no string as it is.

    Raises:
        ValueError: it is not JSON; the message begins with ``what``.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def as_message(turn: Any, place: str = "message") -> Message:
    """Return a turn as a message: a text, a thought, tool calls, each under one name whatever the row calls it.

    Further keys are the template's to read.
    """
    if not isinstance(turn, dict) or not ({"from", "value"} <= turn.keys() or "role" in turn):
        raise ValueError(f"{place}: a message needs 'role' and 'content', or 'from' and 'value'")
    out = {name: value for name, value in turn.items() if value is not None}
    if "role" not in out:
        speaker = out.pop("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise ValueError(
                f"{place}: unknown speaker {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}"
            )
        out = {"role": SHAREGPT_ROLES[speaker], "content": out.pop("value", None), **out}
    if out["role"] not in ROLES:
        raise ValueError(f"{place}: unknown role {out['role']!r}; known: {', '.join(ROLES)}")
    if out["role"] == "function":
        out["role"] = "tool"
    if "function_call" in out:
        out["tool_calls"] = [out.pop("function_call")]
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], place)
    if unread := [name for name in UNREAD_KEYS if out.get(name)]:
        raise ValueError(
            f"{place}: a message has {unread[0]!r}, which specdec does not read: drop it"
        )
    _take_thinking_parts(out)
    _name_thought(out, place)
    if not out.get("content") and isinstance(out.get("refusal"), str):
        out["content"] = out["refusal"]
    out.pop("refusal", None)
    says_otherwise = bool(out.get("tool_calls") or out.get("reasoning_content"))
    out["content"] = _content(out.get("content"), place, may_be_missing=says_otherwise)
    if (weight := _weight(out, place)) is not None:
        out["weight"] = weight
    for name in ("prompt_token_ids", "token_ids"):
        if name in out and not _are_ids(out[name]):
            raise ValueError(f"{place}: {name!r} must be a list of at least one token id")
    return out


def _content(content: Any, place: str, may_be_missing: bool) -> str:
    """Return a message's text, or the texts of its parts one after another."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, place) for part in content)
    if content is None:
        raise ValueError(
            f"{place}: a message has no text ('content'), and neither a tool call nor a thought"
        )
    if not isinstance(content, str):
        raise ValueError(
            f"{place}: a message's text must be a string, got {type(content).__name__}"
        )
    return content


def _part(part: Any, place: str) -> str:
    """Return the text of a part of a message; raise ValueError if it is an image or another part without text."""
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise ValueError(
            f"{place}: a message has a part of type {kind!r}; known: {', '.join(TEXT_PARTS)}, thinking"
        )
    return text


def _take_thinking_parts(message: Message) -> None:
    """Move the parts of a message that are thoughts to its key ``reasoning_content``."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return
    thinking = [
        part
        for part in parts
        if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")
    ]
    thoughts: list[Any] = []
    for part in thinking:
        thought = part.get(part["type"], part.get("text"))
        thoughts += (
            [item.get("text") for item in thought] if isinstance(thought, list) else [thought]
        )
    if thoughts and all(isinstance(thought, str) for thought in thoughts):
        message["reasoning_content"] = "".join(map(str, thoughts))
        message["content"] = [part for part in parts if part not in thinking]


def _name_thought(message: Message, place: str) -> None:
    """Move a message's thought to the key ``reasoning_content``, whichever of :data:`THOUGHT_KEYS` it has."""
    thoughts = {}
    for key in THOUGHT_KEYS:
        if key in message:
            thoughts[key] = message.pop(key)
            if not isinstance(thoughts[key], str):
                raise ValueError(
                    f"{place}: {key!r} must be a string, got {type(thoughts[key]).__name__}"
                )
    texts = {thought for thought in thoughts.values() if thought.strip()}
    if len(texts) > 1:
        raise ValueError(
            f"{place}: {' and '.join(map(repr, thoughts))} are different thoughts: drop all but one"
        )
    if texts:
        message["reasoning_content"] = texts.pop()


def _weight(message: Message, place: str) -> int | None:
    """Return whether a message is learned, 0 or 1, by whichever of :data:`WEIGHT_KEYS` it has, or None."""
    weights = {message.pop(key) for key in WEIGHT_KEYS if key in message}
    if not weights:
        return None
    if len(weights) > 1 or not all(
        isinstance(weight, bool | int | float) and weight in (0, 1) for weight in weights
    ):
        raise ValueError(
            f"{place}: {', '.join(WEIGHT_KEYS)} of a message must be 0 or 1 (false or true) and agree"
        )
    return int(weights.pop())


def _are_ids(ids: Any) -> bool:
    return (
        isinstance(ids, list)
        and bool(ids)
        and all(type(token) is int and 0 <= token < 2**31 for token in ids)
    )


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return calls as OpenAI has them; the arguments stay an object, or a string of JSON that holds one."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place}: 'tool_calls' must be a list of objects")
    out = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a tool call needs a function with its name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            _check_json(arguments, f"{place}: the arguments of tool call {function['name']}")
        what = f"{place}: the arguments of tool call {function['name']}"
        if not isinstance(parse_json_field(arguments or "{}", what), dict):
            raise ValueError(f"{what} must be an object")
        rest = {
            name: value
            for name, value in call.items()
            if name not in ("function", "name", "arguments")
        }
        out.append(
            {
                "type": "function",
                **rest,
                "function": {"name": function["name"], "arguments": arguments or {}},
            }
        )
    return out


def _check_json(text: str, what: str) -> None:
    """Raise ValueError for JSON that reads otherwise than it says: a key comes twice, or a number is none."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) < len(items):
            raise ValueError("a key comes twice")
        return dict(items)

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text or "{}", object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def ordered_results(messages: list[Message], place: str) -> list[Message]:
    """Return messages with the results of tools in the order of the calls that they answer, where ids say so."""
    out: list[Message] = []
    ids: list[Any] = []  # of the calls before
    results: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        call_ids = [result["tool_call_id"] for result in results if "tool_call_id" in result]
        if ids and all(ids) and len(call_ids) == len(results) > 0:
            if wrong := [name for name in call_ids if name not in ids]:
                raise ValueError(
                    f"{place}: the result of tool call {wrong[0]!r} has no such call before it"
                )
            if len(set(call_ids)) < len(call_ids):
                raise ValueError(f"{place}: two results are of the same tool call")
            results.sort(key=lambda result: ids.index(result["tool_call_id"]))
        out += results
        results = []
        out.append(message)
        ids = [call.get("id") for call in message.get("tool_calls") or ()]
    return out[:-1]
