"""Rows of data, from files and from the Hugging Face Hub, each with its place for messages."""

import glob
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.data.tables import parquet_rows
from specdec.utils.extras import require
from specdec.utils.reading import (
    check_listed,
    check_sum,
    explained,
    open_regular,
    read_bytes,
    regular,
    sha256,
)

log = logging.getLogger(__name__)

# pyarrow's errors are among them
READING = (OSError, ValueError, KeyError, TypeError, RuntimeError)
HUB = "hub:"
HUB_NAME = re.compile(r"hub:([^:@]+)(?:@([^:]+))?:([^:]+):(.+)")
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
"""How the names of files end that have an object on every line."""
ROW_FILES = (*JSON_LINES, ".json", ".parquet")
# the first of them in a row is its id
ID_COLUMNS = ("question_id", "prompt_id", "conversation_id", "task_id", "id")


class DataRow(NamedTuple):
    """One row of a source."""

    place: str  # for messages: "gsm8k.jsonl, line 7"
    name: str  # its id if it brings none: "line-7"
    values: dict[str, Any]  # without those that are null

    @property
    def own_id(self) -> str | None:
        """The id that the row brings, if it does; ValueError if that is neither a string nor an integer."""
        row_id = next((self.values[key] for key in ID_COLUMNS if key in self.values), None)
        if isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
            raise ValueError(
                f"{self.place}: the id must be a string or an integer, not {type(row_id).__name__}"
            )
        return None if row_id is None else str(row_id)


def find_sources(patterns: str | Sequence[str]) -> list[str]:
    """Return files and names on the Hub, each once, in the order given; globs are sorted.

    Raises:
        ValueError: nothing is named, a file is missing or is a directory, or a glob matches no file.
    """
    sources: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern)
        if pattern.startswith(HUB) or path.is_file() or _is_saved(path):
            sources[pattern] = None
        elif path.is_dir():
            raise ValueError(
                f"{pattern}: is a directory; name its files with a glob such as {pattern}/**/*.txt"
            )
        else:
            matches = [
                name for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()
            ]
            if not matches:
                what = "no file matches" if glob.has_magic(pattern) else "no such file"
                raise ValueError(f"{pattern}: {what}; correct it or the working directory")
            sources |= dict.fromkeys(matches)
    if not sources:
        raise ValueError(
            "no data files are named: give at least one path, glob or hub:REPOSITORY:CONFIG:SPLIT"
        )
    return list(sources)


def warn_of_overlap(train: Sequence[str], val: Sequence[str]) -> None:
    """Log the sources that are both trained and validated on: a validation that only looks good."""
    if both := [source for source in val if source in set(train)]:
        log.warning("validation reads training files: %s", ", ".join(both))


def has_rows(source: str) -> bool:
    """Return whether a source holds rows; any other file is plain text."""
    path = Path(source)
    return source.startswith(HUB) or _is_saved(path) or path.suffix.lower() in ROW_FILES


def _is_saved(path: Path) -> bool:
    """Return whether it is a folder that ``save_to_disk`` made, of a data set or of several splits."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def stem(source: str) -> str:
    """Return a short name for a source: a file's without its suffix, a repository's without its owner."""
    return _hub_name(source)[0].rpartition("/")[2] if source.startswith(HUB) else Path(source).stem


def read_rows(
    source: str, of: Callable[[DataRow], Any] = lambda row: row, left_out: list[str] | None = None
) -> Iterator[Any]:
    """Yield what ``of`` makes of every row, by default the row.

    The source is a file, ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, or a folder that ``Dataset.save_to_disk`` made.

    A ``.jsonl``, ``.ndjson`` or ``.jsonlines`` file has an object on every line, a ``.json`` file is a list of rows,
    ``.parquet`` is a table; any other file is plain text, a ``prompt`` on every line that is not blank. A split may be
    a slice, as ``test[:80]``.

    Args:
        left_out: gets what is wrong with each row that is broken or that ``of`` refuses; None stops at the first.

    Raises:
        ValueError: the source cannot be read, or a row is broken; the message names the place.
    """
    for where, value in _values(source):
        try:
            content = of(_row(value, f"{source}, {where}", where.replace(" ", "-")))
        except ValueError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
        else:
            yield content


def read_text(path: Path) -> str:
    """A whole file as text.

    Raises:
        ValueError: the file is unreadable or not UTF-8.
    """
    with explained(path):
        return _decoded(read_bytes(path), str(path))


def read_plain_text(path: Path) -> str:
    """A whole file of plain text.

    Raises:
        ValueError: as of :func:`read_text`, or the file holds JSON lines, which its name does not say.
    """
    text = read_text(path)
    lines = (line for line in text.split("\n") if line.strip())
    if text.strip() and all(map(_is_object, lines)):
        raise ValueError(
            f"{path}: every line is a JSON object: name the file .jsonl, and its rows are read"
        )
    return text


def _is_object(line: str) -> bool:
    if not (line.lstrip().startswith("{") and line.rstrip().endswith("}")):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def hub_rows(source: str) -> Any:
    """The rows of ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, a ``datasets.Dataset``, from the Hub or its local cache.

    In place of CONFIG may stand files of the repository, as ``data/*.jsonl``, whose only split is ``train``: some
    repositories have a script, which is not run, or files that do not belong together.

    Raises:
        ValueError: the name is malformed, or there are no such rows.
    """
    name, revision, config, split = _hub_name(source)
    require("datasets", "datasets", f"{source}: the Hub's data")
    # only here: the import takes as long as reading most files
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    kind = (dict.fromkeys((*JSON_LINES, ".json"), "json") | {".parquet": "parquet"}).get(
        Path(config).suffix
    )
    place = (
        name
        if Path(name).is_dir()
        else f"hf://datasets/{name}" + (f"@{revision}" if revision else "")
    )
    try:
        if kind:
            return load_dataset(kind, data_files=f"{place}/{config}", split=split)
        return load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:240]
        raise ValueError(
            f"{source}: not to be had from the Hub or its local cache: {reason}"
        ) from error


def contents_of(source: str) -> Any:
    """Return what changes with a source's data, wherever it lies, JSON-ready; raise ValueError if it is unreadable."""
    path = Path(source)
    if source.startswith(HUB):
        return hub_fingerprint(source)
    if path.is_dir():
        return [sha256(file) for file in sorted(path.rglob("*")) if file.is_file()]
    return [path.suffix.lower(), sha256(path)]


def hub_fingerprint(source: str) -> str:
    """Return what changes with a split's data on the Hub; errors are those of :func:`hub_rows`."""
    return str(hub_rows(source)._fingerprint)


def _hub_name(source: str) -> tuple[str, str | None, str, str]:
    match = HUB_NAME.fullmatch(source)
    if not match:
        raise ValueError(
            f"{source}: write hub:REPOSITORY:CONFIG:SPLIT, as hub:openai/gsm8k:main:test"
        )
    return match[1], match[2], match[3], match[4]


def _values(source: str) -> Iterator[tuple[str, Any]]:
    """Where each row stands in its source, and its value: an object, or a line of JSON as bytes.

    JSON is read here and not by ``datasets``, which gives all rows the same columns: of tool calls with other arguments
    it would make calls with nulls, and a broken row would have no line number.
    """
    path = Path(source)
    suffix = Path(source).suffix.lower()
    if source.startswith(HUB) or suffix == ".parquet" or _is_saved(path):
        table = hub_rows(source) if source.startswith(HUB) else _stored_rows(path)
        yield from ((f"row {number}", _present(value)) for number, value in enumerate(table, 1))
    elif suffix in JSON_LINES:
        check_sum(path)
        with open_regular(path) as stream, explained(path):
            yield from (
                (f"line {number}", line) for number, line in enumerate(stream, 1) if line.strip()
            )
    elif suffix == ".json":
        items = _json(read_text(path), source, "; are these JSON lines? name the file .jsonl")
        if not isinstance(items, list):
            raise ValueError(
                f"{source}: must be a list of rows, not {type(items).__name__}; or name JSON lines .jsonl"
            )
        yield from ((f"row {number}", item) for number, item in enumerate(items, 1))
    else:  # not splitlines: the other line separators of Unicode may stand in a prompt
        lines = enumerate(read_plain_text(path).split("\n"), 1)
        yield from (
            (f"line {number}", {"prompt": line.rstrip("\r")})
            for number, line in lines
            if line.strip()
        )


def _stored_rows(path: Path) -> Iterable[dict[str, Any]]:
    """The rows of a Parquet file or of a folder of ``save_to_disk``; imports are here, since most files need none."""
    if not path.is_dir():
        regular(path)  # pyarrow tells a missing file in other words
        check_sum(path)
        return parquet_rows(path)
    check_listed(path)
    return _saved_rows(path)


def _saved_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder of ``save_to_disk``, validated first: a damaged one could end the process."""
    require("datasets", "datasets", f"{path}: a folder of save_to_disk")
    from datasets import DatasetDict, load_from_disk

    try:
        stored = load_from_disk(str(path))
        if not isinstance(stored, DatasetDict):
            stored.data.validate(full=True)
            yield from stored
            return
    except (*READING, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable folder of save_to_disk: {reason}") from error
    raise ValueError(f"{path}: holds the splits {', '.join(stored)}: name one of the folders in it")


def _present(value: Any) -> Any:
    """Without what is null: in a table every absent key stands as a null."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _row(value: Any, place: str, name: str) -> DataRow:
    if isinstance(value, bytes):
        value = _json(_decoded(value, place).rstrip(), place, "; one object a line")
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    try:  # no tokenizer takes such text, nor says where it is
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff)") from error
    return DataRow(place, name, {key: item for key, item in value.items() if item is not None})


def _json(text: str, place: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # also a number of thousands of digits; brackets without end
        raise ValueError(f"{place}: not usable JSON: {error}{hint}") from error


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
