"""Rows of prompt files and Hub data: as of all data, and the lines of plain text."""

from collections.abc import Iterator
from pathlib import Path

from specdec.data import rows
from specdec.data.documents import read_text
from specdec.data.hub import PREFIX, repository
from specdec.data.rows import Row

DATA = (".jsonl", ".json", ".parquet", ".arrow")


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a data file, as :func:`specdec.data.rows.read_rows` has them, or of ``hub:REPOSITORY:CONFIG:SPLIT``.

    Any other file is plain text: a ``prompt`` on every line that is not blank.

    Raises:
        ValueError: it cannot be read, or a row is no object; the message names the place.
    """
    path = Path(source)
    if source.startswith(PREFIX) or rows.is_saved(path) or path.suffix.lower() in DATA:
        return rows.read_rows(source)
    return _text_lines(path)


def stem(source: str) -> str:
    """A short name for it."""
    return repository(source).rpartition("/")[2] if source.startswith(PREFIX) else Path(source).stem


def _text_lines(path: Path) -> Iterator[Row]:
    """Not splitlines: the other line separators of Unicode may stand in a prompt."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield Row(f"{path}, line {number}", f"line-{number}", {"prompt": line.rstrip("\r")})
