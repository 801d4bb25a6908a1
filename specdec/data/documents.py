"""Reading text: files and globs in, named texts out."""

import glob
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.files import explain

log = logging.getLogger(__name__)


class Text(NamedTuple):
    """A text and where it came from."""

    place: str  # "corpus/a.txt", or "corpus/b.jsonl, line 7"
    text: str


def as_list(patterns: str | Sequence[str]) -> list[str]:
    """One path or many, as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def find_files(patterns: str | Sequence[str]) -> list[Path]:
    """The files that paths and globs (``**`` included) name, each once, in the order given; globs are sorted.

    Raises:
        ValueError: nothing is named, a file is missing or is a directory, or a glob matches no file.
    """
    found: dict[Path, None] = {}
    for pattern in as_list(patterns):
        if glob.has_magic(pattern) and not Path(pattern).exists():
            matches = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]
            if not matches:
                raise ValueError(f"{pattern}: no file matches; correct the pattern or the working directory")
            found |= dict.fromkeys(matches)
        elif Path(pattern).is_dir():
            raise ValueError(f"{pattern}: is a directory; name its files with a glob such as {pattern}/**/*.txt")
        elif not Path(pattern).is_file():
            raise ValueError(f"{pattern}: no such file; correct the path or the working directory")
        else:
            found[Path(pattern)] = None
    if not found:
        raise ValueError("no data files are named: give at least one path or glob")
    return list(found)


def warn_of_overlap(train: Sequence[Path | str], val: Sequence[Path | str]) -> None:
    """Log the sources that are both trained and validated on: a validation that only looks good."""
    both = [str(source) for source in val if source in set(train)]
    if both:
        log.warning("validation reads training files: %s", ", ".join(both))


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def read_text(path: Path) -> str:
    """A whole file as text.

    Raises:
        ValueError: the file is unreadable or not UTF-8.
    """
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise explain(error, path) from error


def surrogates(value: Any) -> bool:
    """Whether a text in it cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_jsonl(path: Path, left_out: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON-lines file with their places ("file, line n"); blank lines are passed over.

    Args:
        left_out: takes what is wrong with each broken line, which is left out then; None stops at the first.

    Raises:
        ValueError: the file is unreadable, or a line is not UTF-8, not JSON, not an object or holds half a
            surrogate pair; the message names file and line.
    """
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                place = f"{path}, line {number}"
                try:
                    value = _object(line, place)
                except ValueError as error:
                    if left_out is None:
                        raise
                    left_out.append(str(error))
                    continue
                if value is not None:
                    yield place, value
    except OSError as error:
        raise explain(error, path) from error


def _object(line: bytes, place: str) -> dict[str, Any] | None:
    """What a line holds; None if it is blank."""
    text = _decode(line, place)
    if not text.strip():
        return None
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}, column {error.colno}: not valid JSON: {error.msg}; one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        raise ValueError(f"{place}: not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    if surrogates(value):
        raise ValueError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff)")
    return value


def _read_rows(path: Path, key: str) -> Iterator[Text]:
    for place, row in read_jsonl(path):
        if key not in row:
            raise ValueError(f"{place}: the row has no {key!r} field, only {sorted(row)}")
        if not isinstance(row[key], str):
            raise ValueError(f"{place}: {key!r} must be a string, got {type(row[key]).__name__}")
        yield Text(place, row[key])


def read_texts(patterns: str | Sequence[str], key: str = "text") -> list[Text]:
    """Every document of the files: a ``.jsonl`` file gives one a line (its ``key`` field), another file is one.

    Empty documents are left out and counted in the log; a file named without a glob may not be empty.

    Raises:
        ValueError: a file is missing, empty or undecodable, a row is broken, or no document is left.
    """
    named = {Path(pattern) for pattern in as_list(patterns)}
    texts: list[Text] = []
    empty = 0
    for path in find_files(patterns):
        read = list(_read_rows(path, key)) if path.suffix == ".jsonl" else [Text(str(path), read_text(path))]
        kept = [item for item in read if item.text.strip()]
        if not kept and path in named:
            raise ValueError(f"{path}: the file holds no text; remove it from the data or fill it")
        empty += len(read) - len(kept)
        texts += kept
    if empty:
        log.warning("%d empty documents were left out, %d remain", empty, len(texts))
    if not texts:
        raise ValueError(f"no documents in {', '.join(as_list(patterns))}: every file is empty")
    return texts
