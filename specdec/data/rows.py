"""Rows of data files, of datasets saved to disk and of the Hugging Face Hub: their values, and where they stand."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specdec.data.documents import as_list, find_files, read_jsonl, read_text, surrogates
from specdec.data.hub import PREFIX, hub_rows
from specdec.files import explain

Made = TypeVar("Made")

SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves in its folder


class Row(NamedTuple):
    """One row."""

    place: str
    """For messages: ``gsm8k.jsonl, line 7``."""
    name: str
    """Its id if it brings none: ``line-7``."""
    values: dict[str, Any]
    """Without those that are null."""


def find_sources(patterns: str | Sequence[str]) -> list[str]:
    """Files, folders that ``save_to_disk`` made, and names on the Hub, each once; globs are sorted.

    Raises:
        ValueError: nothing is named, or a name leads nowhere.
    """
    found: dict[str, None] = {}
    for pattern in as_list(patterns):
        whole = pattern.startswith(PREFIX) or is_saved(Path(pattern))
        found |= dict.fromkeys([pattern] if whole else map(str, find_files(pattern)))
    if not found:
        raise ValueError("no data files are named: give at least one path, glob or hub:REPOSITORY:CONFIG:SPLIT")
    return list(found)


def is_saved(path: Path) -> bool:
    """Whether it is a folder that ``datasets`` saved."""
    return any((path / name).is_file() for name in SAVED)


def read_rows(source: str, left_out: list[str] | None = None) -> Iterator[Row]:
    """The rows of a file, of a folder that ``save_to_disk`` made, or of ``hub:REPOSITORY:CONFIG:SPLIT``.

    A ``.json`` file is a list of rows, ``.parquet`` and ``.arrow`` are tables, any other file has an object on every
    line.

    Args:
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: it cannot be read, or a row is no object; the message names the place.
    """
    if source.startswith(PREFIX):
        return _columns(hub_rows(source), source)
    path = Path(source)
    if is_saved(path):
        return _columns(_saved(path), source)
    tables = {".parquet": _parquet, ".arrow": _arrow}
    suffix = path.suffix.lower()
    if suffix in tables:
        return tables[suffix](path)
    return (_json_list if suffix == ".json" else _json_lines)(path, left_out)


def each_row(source: str, of: Callable[[Row], Made], left_out: list[str] | None = None) -> Iterator[Made]:
    """What ``of`` makes of every row; a row that it refuses is as broken as one that cannot be read.

    Args:
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: the source cannot be read, or a row is broken.
    """
    for row in read_rows(source, left_out):
        try:
            made = of(row)
        except ValueError as error:
            _leave_out(error, left_out)
        else:
            yield made


def _leave_out(error: ValueError, left_out: list[str] | None) -> None:
    if left_out is None:
        raise error
    left_out.append(str(error))


def _json_lines(path: Path, left_out: list[str] | None) -> Iterator[Row]:
    for place, values in read_jsonl(path, left_out):
        yield _row(values, place, place.removeprefix(f"{path}, ").replace(" ", "-"))


def _json_list(path: Path, left_out: list[str] | None) -> Iterator[Row]:
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        hint = "; are these JSON lines? name the file .jsonl" if line and error.msg == "Extra data" else ""
        raise ValueError(f"{path}{line}, column {error.colno}: not valid JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        raise ValueError(f"{path}: not usable JSON: {error}") from error
    if not isinstance(value, list):
        raise ValueError(f"{path}: must be a list of rows, not {type(value).__name__}; or name JSON lines .jsonl")
    for number, item in enumerate(value, start=1):
        try:
            row = _row(item, f"{path}, row {number}", f"row-{number}")
            if surrogates(item):
                raise ValueError(f"{row.place}: holds half of a surrogate pair (\\ud800 to \\udfff)")
        except ValueError as error:
            _leave_out(error, left_out)
        else:
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet  # only here: most files need none of it

    with _told(path, "Parquet file"), parquet.ParquetFile(path) as file:
        batches = [batch.to_pylist() for batch in file.iter_batches()]
    return _columns((row for batch in batches for row in batch), str(path))


def _arrow(path: Path) -> Iterator[Row]:
    """Arrow's file format, and the stream format that ``datasets`` writes."""
    import pyarrow
    from pyarrow import ipc

    with _told(path, "Arrow file"), pyarrow.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        table = (ipc.open_file if magic == b"ARROW1" else ipc.open_stream)(file).read_all()
    return _columns((row for batch in table.to_batches() for row in batch.to_pylist()), str(path))


def _saved(path: Path) -> Iterable[Any]:
    from datasets import DatasetDict, load_from_disk

    with _told(path, "folder of save_to_disk"):
        found = load_from_disk(str(path))
    if isinstance(found, DatasetDict):
        if not found:
            raise ValueError(f"{path}: holds no split: save a dataset there, or remove it from the data")
        raise ValueError(f"{path}: holds the splits {', '.join(found)}: name one, as {path}/{next(iter(found))}")
    return found


@contextlib.contextmanager
def _told(path: Path, kind: str) -> Iterator[None]:
    """Turn what goes wrong while reading into a ValueError of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # pyarrow's are among them
        if isinstance(error, OSError) and error.errno:
            raise explain(error, path) from error
        raise ValueError(f"{path}: not a readable {kind}: {' '.join(str(error).split())}") from error


def _columns(values: Iterable[Any], source: str) -> Iterator[Row]:
    """Rows of a table, in which every absent key stands as a null."""
    for number, value in enumerate(values, start=1):
        yield _row(_present(value), f"{source}, row {number}", f"row-{number}")


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _row(value: Any, place: str, name: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return Row(place, name, {key: item for key, item in value.items() if item is not None})
