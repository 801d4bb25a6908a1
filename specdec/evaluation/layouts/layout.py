"""What a layout of prompt rows is: the columns that tell it, and what its rows ask."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

ID_COLUMNS = ("question_id", "prompt_id", "task_id", "id")
Values = Mapping[str, Any]


class Asked(NamedTuple):
    """What a row asks: exactly one is set."""

    turns: list[str] | None = None
    """User turns of a conversation whose answers the target gives."""
    messages: list[dict[str, str]] | None = None
    """A conversation that ends with a user turn; each message has ``role`` and ``content``."""
    text: str | None = None
    """Raw text, used as it is."""


class Layout:
    """How rows with certain columns become prompts; a subclass is one layout."""

    name: ClassVar[str]
    columns: ClassVar[frozenset[str]]
    """All of them must be in a row."""
    others: ClassVar[frozenset[str] | None] = None
    """What else may be in a row that is recognised, beside id and category; None: anything."""
    category: ClassVar[str | None] = None
    """Of rows that bring none."""
    by_name: ClassVar[bool] = False
    """Used only where it is asked for: another layout has its columns."""

    def has_columns(self, row: Values) -> bool:
        """Whether the row could be read so."""
        return self.columns <= row.keys()

    def recognises(self, row: Values) -> bool:
        """Whether the row is of this layout, by its columns."""
        known = self.columns.union(ID_COLUMNS, ("category",), self.others or ())
        return not self.by_name and self.has_columns(row) and (self.others is None or row.keys() <= known)

    def ask(self, row: Values, place: str) -> Asked:
        """What the row asks.

        Raises:
            BlankError: a part of what it asks is blank.
            ValueError: the row is malformed; the message names ``place`` and the column.
        """
        raise TypeError(f"{type(self).__name__} must say what a row asks")


class BlankError(ValueError):
    """Nothing is said where something is asked: not a fault of the file, but a prompt that cannot be decoded."""


def text(value: Any, what: str) -> str:
    """A string that is not blank.

    Raises:
        BlankError: it is.
        ValueError: it is none; ``what`` is said to be wrong.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise BlankError(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{what} holds half of a surrogate pair, which is no text")
    return value


def items(value: Any, what: str) -> list[Any]:
    """A list with something in it.

    Raises:
        ValueError: it is none; ``what`` is said to be wrong.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list with something in it")
    return value
