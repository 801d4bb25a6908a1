"""What a card consists of for readers, whatever it is written as."""

from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    """A section's name; level 1 is the title."""

    level: int
    text: str


class Text(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Bullets(NamedTuple):
    """Points of plain text."""

    items: Sequence[str]


class Grid(NamedTuple):
    """A table; the first ``left`` columns are words."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


class Picture(NamedTuple):
    """A figure in the card's folder."""

    file: str
    caption: str


class Command(NamedTuple):
    """A line for a terminal."""

    line: str


Block = Heading | Text | Bullets | Grid | Picture | Command
