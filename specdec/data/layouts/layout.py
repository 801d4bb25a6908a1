"""What a layout of chat rows is: the columns that tell it, and the messages that its rows hold."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

ID_COLUMNS = ("id", "prompt_id", "conversation_id", "question_id", "task_id")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]
"""``role``, one of ``ROLES``, ``content``, and what else the template may read."""
Values = Mapping[str, Any]


class Layout:
    """How rows with certain columns become messages; a subclass is one layout."""

    name: ClassVar[str]
    columns: ClassVar[str]
    """For messages: what a row needs."""

    def has_columns(self, row: Values) -> bool:
        """Whether the row can be read so."""
        raise NotImplementedError

    def unread(self, row: Values) -> list[str]:
        """Columns that may belong to what is said, and that are not read."""
        return []

    def messages(self, row: Values, place: str) -> list[Message]:
        """What is said.

        Raises:
            ValueError: the row is malformed; the message names ``place`` and the column.
        """
        raise NotImplementedError


def text(row: Values, key: str, place: str) -> str:
    """A column's string.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(row[key], str):
        raise ValueError(f"{place}: {key!r} must be a string, got {type(row[key]).__name__}")
    return row[key]


def parsed(value: Any, what: str) -> Any:
    """JSON that stands in a string, and what is no string as it is.

    Raises:
        ValueError: it is not JSON; ``what`` is said to be wrong.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def with_system(row: Values, messages: list[Message], place: str) -> list[Message]:
    """The messages behind the system prompt that stands in a column of its own, if one does.

    Raises:
        ValueError: it is no string, or the messages begin with another one.
    """
    key = next((key for key in SYSTEM if key in row), None)
    if key is None or not text(row, key, place):
        return messages
    system = {"role": "system", "content": row[key]}
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != row[key]:
            raise ValueError(f"{place}: {key!r} and the first message are two different system prompts: drop one")
        return messages
    return [system, *messages]


SYSTEM = ("system", "system_prompt")
