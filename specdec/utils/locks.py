"""What all processes of this machine share: the cache, and locks that keep them apart in it."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from specdec.utils.files import explain

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """``$SPECDEC_CACHE``, else ``$XDG_CACHE_HOME/specdec``, else ``~/.cache/specdec``."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it; it ends with the process, however that ends.

    The file stays: were it removed, two processes could hold a lock of the same name.

    Raises:
        ValueError: ``path`` may not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    except OSError as error:
        raise explain(error, path) from error
    with stream:
        if not lock_now(stream):
            log.info("waiting for another process that holds %s", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def lock_now(stream: IO, shared: bool = False) -> bool:
    """Whether the lock of an open file could be had without waiting.

    It lasts until this process, and all that have inherited the open file, have closed it or ended.

    Args:
        shared: beside others that ask for no more.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
