"""Files out of memory, so that the next read is the disk's."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from specdec.features.store import Store

MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def forget(store: Store) -> None:
    """Let go of every page of a cache: of the mappings first, since the system keeps what is mapped."""
    for contents in store._shards:
        for tensor in contents:
            start = tensor.data_ptr()
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                found = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)
                assert found == 0, os.strerror(ctypes.get_errno())
    drop(store.directory / entry.file for entry in store.index.shards)


def drop(files: Iterable[Path]) -> None:
    """Of files that are mapped nowhere."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
