"""What the messages of a row say, and the forms in which a template may take them."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.chat_oracle.conversations import Message

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
INLINE = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
ABSENT = "absent"


class Said(NamedTuple):
    """A message of a row, whatever its form."""

    role: str
    text: str
    thought: str = ""
    inline: str | None = None  # the content as it is, where it has the thought in tags
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()  # id, name, arguments
    more: tuple[tuple[str, str], ...] = ()  # what else the message has, of a tool


class Form(NamedTuple):
    """How messages are written for a template."""

    # a key, "inline" in tags of the content, or "verbatim" as the row has them
    thought: str = THOUGHT_KEYS[0]
    string: bool = False  # the arguments of calls as a string of JSON
    empty: str | None = ""  # the content of a call without text
    parts: bool = False  # the content as a list of parts


def said(message: Message) -> Said:
    """What a message of a row says."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), "")
    inline = None
    if message["role"] == "assistant" and not thought and (match := INLINE.fullmatch(text)):
        inline = text
        thought = match[1].strip()
        text = match[2].strip()
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["id"], call["function"]["name"], values))
    more = tuple((key, message[key]) for key in ("name", "tool_call_id") if message.get(key))
    return Said(message["role"], text, thought, inline, tuple(calls), more)


def forms(messages: Sequence[Said], tags: bool = True) -> Iterator[Form]:
    """The forms that differ for these messages; the likelier one comes first.

    Args:
        tags: whether a thought may stand in the content, in tags.
    """
    inline = any(message.inline is not None for message in messages)
    thoughts = inline or any(message.thought for message in messages)
    calls = any(message.calls for message in messages)
    silent = any(message.calls and not message.text for message in messages)
    keys = THOUGHT_KEYS if thoughts else THOUGHT_KEYS[:1]
    if thoughts and tags:
        keys = (*keys, "inline", *(("verbatim",) if inline else ()))
    empties = ("", None, ABSENT) if silent else ("",)
    for parts, key, empty, string in itertools.product(
        (False, True), keys, empties, (False, True) if calls else (False,)
    ):
        yield Form(key, string, empty, parts)


def written(message: Said, form: Form) -> Message:
    """A message in a form."""
    content: Any = message.text
    out: Message = {"role": message.role, **dict(message.more)}
    if form.thought == "verbatim" and message.inline is not None:
        content = message.inline
    elif message.thought and form.thought in ("inline", "verbatim"):
        content = f"<think>\n{message.thought}\n</think>\n\n{content}"
    elif message.thought:
        out[form.thought] = message.thought
    if message.calls:
        out["tool_calls"] = [
            {
                "id": number,
                "type": "function",
                "function": {"name": name, "arguments": _json(values) if form.string else values},
            }
            for number, name, values in message.calls
        ]
    if message.calls and not content and (form.empty != "" or not form.parts):
        return out if form.empty == ABSENT else out | {"content": form.empty}
    return out | {"content": [{"type": "text", "text": content}] if form.parts else content}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def lost(message: Said, text: str, thought: bool = True) -> list[str]:
    """What of a message does not stand in a text."""
    parts = [("the text", message.text), ("the thought", message.thought if thought else "")]
    for _, name, values in message.calls:
        parts.append(("a call", name))
        parts += [("the arguments of a call", str(value)) for value in values.values()]
        if f'\\"{next(iter(values))}' in text:
            parts.append(("the plain quotes of arguments", "\0"))
    return list(dict.fromkeys(name for name, part in parts if part not in text))
