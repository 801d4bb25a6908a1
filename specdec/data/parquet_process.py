"""A process that decodes somebody else's Parquet file within a limit of memory.

A file of some hundred bytes may decode to gigabytes: a long text that every row repeats, a row with a billion
elements. What its footer says of its sizes need not be true, so that nothing but a limit helps.
:mod:`specdec.data.tables` starts this file as a script, ``parquet_process.py FILE BYTES ROWS PACKAGES``, where
PACKAGES is the folder in which pyarrow lies. It imports nothing of specdec. Batches of rows go to standard output as a
stream of Arrow; the last line of standard error says what failed.
"""

import os
import resource
import sys
from pathlib import Path

BUFFER = 2**20  # bytes of the file that are read at once, not a whole column of a row group


def bound_memory(memory: int) -> None:
    """Let this process take this many bytes more than it has; Linux alone counts what it has."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    limit = pages * resource.getpagesize() + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def write_batches(file: str, rows: int) -> None:
    """Write all rows of a Parquet file to standard output, in batches of this many."""
    from pyarrow import ipc, parquet

    with (
        parquet.ParquetFile(file, buffer_size=BUFFER) as table,
        ipc.new_stream(sys.stdout.buffer, table.schema_arrow) as stream,
    ):
        for batch in table.iter_batches(batch_size=rows, use_threads=False):
            stream.write_batch(batch)


def decode() -> int:
    """The exit status: 0, 1 for a file that cannot be read, 3 for one that takes more memory."""
    file, memory, rows, packages = sys.argv[1:]
    sys.path.append(packages)  # an isolated Python sees no PYTHONPATH and no packages of the user
    import pyarrow.parquet  # noqa: F401  what it takes itself does not count

    bound_memory(int(memory))
    try:
        write_batches(file, int(rows))
        sys.stdout.buffer.flush()
    except MemoryError:
        return 3
    except BrokenPipeError:  # whoever reads needs no more of it
        return 0
    except Exception as error:  # noqa: BLE001  pyarrow's are of many kinds
        sys.stderr.write(" ".join(str(error).split())[:500] + "\n")
        return 1
    return 0


if __name__ == "__main__":
    # nothing is left to flush, and a reader may be gone
    os._exit(decode())
