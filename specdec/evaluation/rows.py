"""Rows of prompt files and Hub data: their values, and where they stand."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specdec.evaluation.hub import PREFIX, hub_rows, repository
from specdec.files import explain


class Row(NamedTuple):
    """One row."""

    place: str
    """For messages: ``gsm8k.jsonl, line 7``."""
    name: str
    """Its id if it brings none: ``line-7``."""
    values: dict[str, Any]
    """Without those that are null."""


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file, or of ``hub:REPOSITORY:CONFIG:SPLIT``.

    A ``.jsonl`` file has an object on every line, a ``.json`` file a list of them, a ``.parquet`` file a row for each.
    Any other file is plain text: a ``prompt`` on every line that is not blank.

    Raises:
        ValueError: it cannot be read, or a row is no object; the message names the place.
    """
    if source.startswith(PREFIX):
        return _numbered(hub_rows(source), source)
    read = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet}
    return read.get(Path(source).suffix.lower(), _text_lines)(Path(source))


def stem(source: str) -> str:
    """A short name for it."""
    return repository(source).rpartition("/")[2] if source.startswith(PREFIX) else Path(source).stem


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        place = f"{path}, line {number}"
        yield _row(_parsed(line, place), place, f"line-{number}")


def _text_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        yield Row(f"{path}, line {number}", f"line-{number}", {"prompt": line.rstrip("\r")})


def _json_list(path: Path) -> Iterator[Row]:
    value = _parsed(_decoded(path), str(path))
    if not isinstance(value, list):
        raise ValueError(f"{path}: must be a list of rows, not {type(value).__name__}; or name JSON lines .jsonl")
    yield from _numbered(value, str(path))


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # only here: most files need none of it
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = [batch.to_pylist() for batch in file.iter_batches()]
    except OSError as error:
        raise explain(error, path) from error
    except (ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {' '.join(str(error).split())}") from error
    yield from _numbered((row for batch in batches for row in batch), str(path))


def _numbered(values: Iterable[Any], source: str) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        yield _row(value, f"{source}, row {number}", f"row-{number}")


def _row(value: Any, place: str, name: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return Row(place, name, {key: item for key, item in value.items() if item is not None})


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank; not splitlines: JSON strings may hold the other line separators of Unicode."""
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if line.strip():
            yield number, line


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        hint = "; are these JSON lines? name the file .jsonl" if line and error.msg == "Extra data" else ""
        raise ValueError(f"{place}{line}, column {error.colno}: not valid JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        raise ValueError(f"{place}: not usable JSON: {error}") from error
