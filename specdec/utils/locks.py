"""Locks and claims of files that end with the process that holds them."""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specdec.utils.links import open_in_place
from specdec.utils.reading import explained

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it; it ends with the process, however that ends.

    The file stays: were it removed, two processes could hold a lock of the same name. ValueError if it cannot be made.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = open_in_place(path, "a")
    with stream:
        if not lock_now(stream):
            log.info("waiting for another process that holds %s", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def lock_now(stream: IO, shared: bool = False) -> bool:
    """Whether the lock of an open file could be had without waiting, ``shared`` next to others that ask for no more.

    It lasts until this process, and all that have inherited the open file, have closed it or ended. OSError if the file
    system has no locks.
    """
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def claim_of(path: Path) -> Path:
    """The claim of a directory that is yet to be made: a file next to it."""
    return path.with_name(f".{path.name}.claimed")


def take_claim(path: Path, patience: float = 0.0) -> IO[Any] | None:
    """Claim what the file ``path`` stands for: an open file whose lock ends with the last process that has inherited
    it. None: a living process has it, after this many seconds too, or the folder is gone."""
    end = time.monotonic() + patience
    while True:
        with explained(path.parent):
            try:
                stream = open_in_place(path, "a+")
                # unless its last holder has just removed the file that was opened here
                if (
                    lock_now(stream)
                    and path.exists()
                    and os.path.samestat(os.fstat(stream.fileno()), path.stat())
                ):
                    stream.truncate(0)
                    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                    stream.flush()
                    return stream
            except FileNotFoundError:
                return None  # whoever had the folder gave it up just now
        stream.close()
        if time.monotonic() >= end:
            return None
        log.info("waiting for the run that has %s", path.parent)
        time.sleep(0.5)


def release_claim(path: Path, claim: IO[Any]) -> None:
    """Remove the file, then let go: from here on the place may be another's."""
    path.unlink(missing_ok=True)
    fcntl.flock(claim, fcntl.LOCK_UN)  # workers that still end hold the same lock
    claim.close()


def is_held(claim: Path) -> bool:
    """Whether a living process has a claim."""
    with explained(claim):
        try:
            stream = open_in_place(claim, "r")
        except (FileNotFoundError, NotADirectoryError):
            return False
    with stream:
        return not lock_now(stream)


def claim_message(path: Path, claim: Path) -> str:
    """What is said of a claim that another has."""
    holder = "" if not claim.exists() else f" ({claim.read_text(encoding='utf-8').strip()})"
    return f"{path} is claimed by another run{holder}: wait for its end, or choose another --out"
