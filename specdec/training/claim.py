"""The claim of a directory: a file whose lock one run alone can hold, and which ends with it, however that ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Self, TextIO

from specdec.shared import lock_now

log = logging.getLogger(__name__)

CLAIM = ".claimed"  # lies in the directory from its choice to the end of the run, or until a killed run is resumed
PATIENCE = 15.0  # seconds; the data workers of a killed run notice within 5


class Claim:
    """A held claim; see :meth:`take`."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path, self._stream = path, stream

    @classmethod
    def take(cls, directory: Path, patience: float = 0.0) -> Self | None:
        """Claim a directory, or None: a living run has it.

        Args:
            patience: seconds to wait for what is left of a killed run to end.

        Raises:
            OSError: the claim cannot be written.
        """
        path, end, waiting = directory / CLAIM, time.monotonic() + patience, False
        while True:
            stream = path.open("a+")
            if _lock(stream) and _same(stream, path):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                stream.flush()
                return cls(path, stream)
            stream.close()
            if time.monotonic() >= end:
                return None
            if not waiting:
                log.info("waiting for the run that has %s (%s)", directory, holder(directory))
                waiting = True
            time.sleep(0.1)

    def release(self) -> None:
        """Remove the file, then let go: from here on the directory may be another run's."""
        self.path.unlink(missing_ok=True)
        fcntl.flock(self._stream, fcntl.LOCK_UN)  # workers that still end hold the same lock
        self._stream.close()


def is_held(directory: Path) -> bool:
    """Whether a living run has claimed a directory."""
    try:
        with (directory / CLAIM).open("r") as stream:
            return not _lock(stream)
    except (FileNotFoundError, NotADirectoryError):
        return False


def holder(directory: Path) -> str:
    """Who wrote the claim."""
    try:
        return (directory / CLAIM).read_text(encoding="utf-8").strip() or "of an unknown process"
    except OSError:
        return "which ends just now"


def _lock(stream: TextIO) -> bool:
    try:
        return lock_now(stream)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
            raise
        log.warning("%s: this file system has no locks: a second run here would not be noticed", stream.name)
    return True


def _same(stream: TextIO, path: Path) -> bool:
    """Whether the locked file is still the one of that name: its last holder may just have removed it."""
    try:
        found, here = os.fstat(stream.fileno()), path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (here.st_dev, here.st_ino)
