"""Reading conversations: chat JSON lines in two layouts in, one kind of message out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.data.documents import as_list, find_files, read_jsonl

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages, the tools they may call, and where they came from."""

    place: str  # "chats.jsonl, line 7"
    messages: list[Message]  # {"role": one of ROLES, "content": str, and what else the template may read}
    tools: list[dict[str, Any]] | None


def _message(turn: Any, place: str) -> Message:
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        if turn["from"] not in SHAREGPT_ROLES:
            raise ValueError(f"{place}: unknown speaker {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
        message = {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}
    elif isinstance(turn, dict) and "role" in turn and ("content" in turn or "tool_calls" in turn):
        if turn["role"] not in ROLES:
            raise ValueError(f"{place}: unknown role {turn['role']!r}; known: {', '.join(ROLES)}")
        message = turn
    else:
        raise ValueError(f"{place}: a message needs 'role' and 'content', or 'from' and 'value'")
    calls = bool(message.get("tool_calls")) and message.get("content") is None
    if not calls and not isinstance(message.get("content"), str):
        raise ValueError(f"{place}: a message's text must be a string, got {type(message.get('content')).__name__}")
    return message


def conversation(row: dict[str, Any], place: str) -> Conversation:
    """A row's conversation; the layout is found by its keys.

    ``messages`` and ``conversations`` may each hold OpenAI turns (role, content) or ShareGPT turns (from, value).

    Raises:
        ValueError: neither or both lists are there, the list is empty, or a message is malformed.
    """
    keys = [key for key in ("messages", "conversations") if key in row]
    if len(keys) != 1:
        has = "both" if keys else f"neither, only {sorted(row)}"
        raise ValueError(f"{place}: a row needs 'messages' or 'conversations', it has {has}")
    turns = row[keys[0]]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: {keys[0]!r} must be a list of at least one message")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{place}: 'tools' must be a list of JSON schemas")
    return Conversation(place, [_message(turn, place) for turn in turns], tools)


def read_conversations(patterns: str | Sequence[str]) -> list[Conversation]:
    """Every conversation of the JSON-lines files.

    Raises:
        ValueError: a file is missing or empty, or a row is broken; the message names file and line.
    """
    conversations: list[Conversation] = []
    for path in find_files(as_list(patterns)):
        read = [conversation(row, place) for place, row in read_jsonl(path)]
        if not read:
            raise ValueError(f"{path}: the file holds no conversation; remove it from the data or fill it")
        conversations += read
    return conversations
