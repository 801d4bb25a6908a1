"""A journal: JSON lines that survive a kill, so that long work goes on where it was.

The first line says what the work is; every later one is something that was finished. A last line that a kill cut short
is dropped when the journal is opened again.
"""

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from specdec.utils.config import pairs, words
from specdec.utils.files import explained, lock_now

SYNC = 2.0  # seconds between two waits for the disk


class JournalBusyError(ValueError):
    """Another process writes the journal."""


class Journal:
    """Append-only JSON lines, written by one process at a time::

        with Journal(path, "specdec.regenerate", settings) as journal:
            done = {entry["row"] for entry in journal.entries}
            journal.append({"row": "7", "answer": "..."})

    Args:
        path: the file; it is made if it is not there.
        kind: whose journal it is; one of another kind is refused.
        settings: JSON-ready; a journal of other settings is refused, and the message says which differ.

    ``entries`` are what earlier processes wrote, in order. Entering raises JournalBusyError if another process, or one
    that inherited it, writes it; ValueError if it is damaged, not writable, or on a file system without locks.
    """

    def __init__(self, path: Path, kind: str, settings: dict[str, Any]) -> None:
        self.path, self.kind, self.settings = path, kind, settings
        self.entries: list[dict[str, Any]] = []
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        with explained(self.path):  # of the lock too: a file system may have none
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            alone = lock_now(self._file)
        try:
            if not alone:
                raise JournalBusyError(f"{self.path}: another process writes it: wait for its end")
            self._file.seek(0)
            self._read(self._file.read())
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def fileno(self) -> int:
        """Of the open file: a child that inherits it keeps the journal locked for as long as it lives."""
        return self._file.fileno()

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry, which a kill of this process leaves whole; ValueError if the disk is full.

        A power cut may cost those of the last :data:`SYNC` seconds.
        """
        data = _line(entry)
        with explained(self.path):
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, "no space left on device")
            if time.monotonic() - self._synced > SYNC:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def _read(self, content: bytes) -> None:
        """Take up the entries, drop what a kill cut short, and begin a new journal with its first line."""
        whole = content.rfind(b"\n") + 1
        lines = [self._parsed(line, number) for number, line in enumerate(content[:whole].splitlines(), start=1)]
        header = {"journal": self.kind, "settings": self.settings}
        new = not lines and _line(header).startswith(content)  # not there, or the first line was cut short
        first = lines[0] if lines else header if new else {}
        if first.get("journal") != self.kind:
            raise ValueError(f"{self.path}: no journal of {self.kind}: choose another place")
        if changes := "; ".join(
            f"{key} {words(old)} there, {words(now)} now" for key, old, now in pairs(first["settings"], self.settings)
        ):
            raise ValueError(f"{self.path} was begun otherwise: {changes}: give the same again, or another place")
        self.entries = lines[1:]
        self._file.truncate(whole)
        if new:
            self.append(header)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                return entry
        raise ValueError(f"{self.path}, line {number}: no entry of a journal: remove the line, or begin anew")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole entries of a journal that another process may be writing; none if it is not there."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines[1:] if line.endswith(b"\n")]


def is_being_written(path: Path) -> bool:
    """Whether a process holds the lock of a journal."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return not lock_now(stream, shared=True)


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()
