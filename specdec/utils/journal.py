"""A journal: JSON lines that survive a kill, so that long work resumes where it was.

The first line says what the work is; every later one is something that was finished. A last line that a kill cut short
is dropped when the journal is opened again. Every line carries the CRC-32 of its own content, so that a changed bit is
found and told from what a kill left.
"""

import errno
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from specdec.utils.config import differences, to_text
from specdec.utils.links import open_in_place
from specdec.utils.locks import lock_now
from specdec.utils.reading import explained, open_regular

SYNC = 2.0  # seconds between two waits for the disk
CHECKED = b'{"crc32": "%08x", '  # begins a line; the checksum is of the line without it
Line = TypeVar("Line")


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
        self.path = path
        self.kind = kind
        self.settings = settings
        self.entries: list[dict[str, Any]] = []
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        with explained(self.path):  # of the lock too: a file system may have none
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_in_place(self.path, "a+b", buffering=0)
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
        try:
            os.fsync(self._file.fileno())
        finally:
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
        lines = whole_lines(self.path, content, _parsed)
        header = {"journal": self.kind, "settings": self.settings}
        # not there, or the first line was cut short
        new = not lines and _line(header).startswith(content)
        first = lines[0] if lines else header if new else {}
        if first.get("journal") != self.kind:
            raise ValueError(f"{self.path}: no journal of {self.kind}: choose another place")
        if changes := "; ".join(
            f"{key} {to_text(old)} there, {to_text(now)} now"
            for key, old, now in differences(first["settings"], self.settings)
        ):
            raise ValueError(
                f"{self.path} was begun otherwise: {changes}: give the same again, or another place"
            )
        self.entries = lines[1:]
        self._file.truncate(whole)
        if new:
            self.append(header)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole entries of a journal that another process may be writing; none if it is not there. ValueError, with
    the line, if it is damaged."""
    if not path.exists():
        return []
    with open_regular(path) as stream:
        return whole_lines(path, stream.read(), _parsed)[1:]


def whole_lines(path: Path, content: bytes, parsed: Callable[[bytes], Line | None]) -> list[Line]:
    """What ``parsed`` makes of every line of a file, without a last one that a kill cut short.

    ValueError, with the line, where it makes None of one, since a checksum is not the content's.
    """
    *lines, last = content.split(b"\n")
    if parsed(last[:-1]) is not None:  # no kill adds to a whole line: its end was changed
        lines.append(last)
    values = []
    for number, line in enumerate(lines, start=1):
        if (value := parsed(line)) is None:
            raise ValueError(
                f"{path}, line {number}: damaged, or of an earlier specdec: its checksum is not its content's: remove "
                "the line, or start again"
            )
        values.append(value)
    return values


def is_being_written(path: Path) -> bool:
    """Whether a process holds the lock of a journal."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return not lock_now(stream, shared=True)


def _line(entry: dict[str, Any]) -> bytes:
    body = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
    return CHECKED % zlib.crc32(body) + body[1:] + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The entry of a line without its end, None if it is damaged."""
    start = len(CHECKED % 0)
    body = b"{" + line[start:]
    if line[:start] != CHECKED % zlib.crc32(body):
        return None
    entry: dict[str, Any] = json.loads(body)
    return entry
