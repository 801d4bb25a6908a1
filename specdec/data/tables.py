"""Rows of Parquet files, which may be a stranger's: what they decode to is bounded, whatever the file says."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from specdec.utils.reading import regular
from specdec.utils.text import printable

if TYPE_CHECKING:
    import pyarrow

DECODER = Path(__file__).parent / "parquet_process.py"  # a script, which needs nothing of specdec
MEMORY = 2**31  # bytes for the decoding of a batch of rows
ROWS = 1024  # of a batch
MOST_ROW = 2**27  # bytes of a row as objects of Python, estimated
AT_ONCE = MOST_ROW  # and of rows that are made at once, so that none of them is larger
OBJECT = 64  # bytes of an object of Python, without its content
# bytes of all rows, estimated: so many in any case, and so many times those of the file
MOST = 2**30
TIMES = 1000


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, of which no more than some are in memory.

    Raises:
        ValueError: it is no Parquet file, is damaged, or takes more memory than any file of texts.
    """
    most = MOST + TIMES * regular(path)
    total = 0
    first = 1
    for batch in _batches(path):
        size = _size_as_objects(batch)
        rows = [batch] if size <= AT_ONCE else (batch.slice(n, 1) for n in range(len(batch)))
        for number, part in enumerate(rows):
            part_size = size if part is batch else _size_as_objects(part)
            if part is not batch and part_size > MOST_ROW:
                raise ValueError(
                    f"{path}, row {first + number}: more than {MOST_ROW:,} bytes in a row are not read"
                )
            total += part_size
            if total > most:
                raise ValueError(
                    f"{path}: more than {most:,} bytes of rows in a file of {regular(path):,}: it is made to fill the "
                    "memory; if it is not, write it as JSON lines"
                )
            yield from part.to_pylist()
        first += len(batch)


def _batches(path: Path) -> Iterator["pyarrow.RecordBatch"]:
    """Yield batches of rows that another process decodes."""
    import pyarrow
    from pyarrow import ipc

    packages = Path(pyarrow.__file__).parents[1]
    numbers = (str(MEMORY), str(ROWS))
    command = [sys.executable, "-I", str(DECODER), str(path), *numbers, str(packages)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        is_whole = False
        try:
            with ipc.open_stream(process.stdout) as stream:
                yield from stream
            is_whole = True
        except (pyarrow.ArrowInvalid, OSError) as error:
            process.stdout.close()
            raise _unreadable(path, process.wait(), errors) from error
        finally:
            process.stdout.close()
            if not is_whole:
                process.kill()
            status = process.wait()
        if status != 0:
            raise _unreadable(path, status, errors)


def _unreadable(path: Path, status: int, errors: IO[bytes]) -> ValueError:
    """Return the error of a process that did not decode a file to its end."""
    if status == 1:
        errors.seek(0)
        reason = printable(errors.read().decode(errors="replace")).strip()
        return ValueError(f"{path}: not a readable Parquet file: {reason}")
    return ValueError(
        f"{path}: decoding {ROWS:,} of its rows takes more than {MEMORY / 2**30:g} GiB of memory: it "
        "is damaged, or made to fill the memory; if it is neither, write it as JSON lines"
    )


def _size_as_objects(values: Any) -> int:
    """Return about how many bytes a batch of rows, or an array, takes as objects of Python."""
    from pyarrow import types

    if hasattr(values, "columns"):
        return OBJECT * len(values) + sum(map(_size_as_objects, values.columns))
    count = OBJECT * len(values)
    kind = values.type
    if types.is_struct(kind):
        return count + sum(map(_size_as_objects, values.flatten()))
    if types.is_dictionary(kind):
        return count + _size_of_chosen(values)
    if hasattr(values, "flatten") and types.is_nested(kind):
        return count + _size_as_objects(values.flatten())
    if hasattr(values, "storage"):
        return count + _size_as_objects(values.storage)
    return count + int(values.nbytes)


def _size_of_chosen(values: Any) -> int:
    """Return about how many bytes the values take that an array names by their numbers in a dictionary."""
    from pyarrow import compute, types

    dictionary = values.dictionary
    kind = dictionary.type
    if types.is_string_view(kind) or types.is_binary_view(kind):
        dictionary = dictionary.cast("large_binary")
    elif not any(
        is_text(kind)
        for is_text in (
            types.is_string, types.is_large_string, types.is_binary, types.is_large_binary,
        )
    ):  # fmt: skip
        return len(values) * (int(dictionary.nbytes) // max(len(dictionary), 1))
    sizes = compute.binary_length(dictionary)
    return compute.sum(compute.take(sizes, values.indices)).as_py() or 0
