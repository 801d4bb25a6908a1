"""Answers on disk as they come, so that a run that ends early, however it ends, goes on where it was.

A file of JSON lines: first the settings, then, in any order, answers, failures, and the beginnings of sessions.
"""

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.files import explain, write_text
from specdec.regeneration.talk import Answer, Found
from specdec.values import pairs, words

FORMAT = "specdec.regeneration.journal.v1"
SYNC = 2.0  # seconds between two waits for the disk


class Journal:
    """The file, for one process at a time; to be entered::

        with Journal(path, settings) as journal:
            for row, answers in journal.answers.items(): ...
            journal.write(answer)

    A last line that was cut off is dropped.

    Attributes:
        answers: by row, in the order of turns; what failed is not among them.
        seconds: of all earlier sessions, up to the last thing that each of them wrote.
        sessions: how many there were, this one included.

    Raises:
        ValueError: on entering, if the file was begun with other settings, is broken, in use or not to be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.answers: dict[str, list[Answer]] = {}
        self.seconds, self.sessions = 0.0, 0
        self._begin = self._synced = time.monotonic()

    def __enter__(self) -> Self:
        try:
            if not self.path.exists():
                write_text(self.path, _line({"format": FORMAT, "settings": self.settings}))
            self._file = self.path.open("r+b", buffering=0)
        except OSError as error:
            raise explain(error, self.path) from error
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    @property
    def elapsed(self) -> float:
        """Seconds of this session."""
        return time.monotonic() - self._begin

    def write(self, found: Found) -> None:
        """Keep what became of a question.

        Raises:
            ValueError: the disk is full.
        """
        self._append({**found._asdict(), "at": round(self.elapsed, 3)})

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path}: another process writes it: wait for its end") from error
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        at = 0.0
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            entry = self._entry(line, number)
            if number == 1:
                self._check(entry)
            elif "session" in entry:
                self.seconds, at = self.seconds + at, 0.0
                self.sessions += 1
            else:
                at = float(entry.pop("at"))
                self._keep(entry, number)
        self.seconds += at
        self._file.truncate(whole)
        self._file.seek(whole)
        self.sessions += 1
        self._append({"session": self.sessions})

    def _entry(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number}: not JSON: remove the line, or begin anew") from error
        if not isinstance(entry, dict) or (number > 1 and not {"session", "at"} & entry.keys()):
            raise ValueError(f"{self.path}, line {number}: not an entry of a journal: remove the line, or begin anew")
        return entry

    def _check(self, entry: dict[str, Any]) -> None:
        if entry.get("format") != FORMAT:
            raise ValueError(f"{self.path}: not a journal of specdec regenerate: choose another --out")
        differing = [f"{key} {words(old)} there, {words(new)} now" for key, old, new in pairs(entry["settings"], self.settings)]  # fmt: skip # noqa: E501
        if differing:
            raise ValueError(
                f"{self.path} was begun otherwise: {'; '.join(differing)}: give what it was begun with, another --out, "
                "or remove it"
            )

    def _keep(self, entry: dict[str, Any], number: int) -> None:
        if "reason" in entry:
            return
        try:
            answer = Answer(**entry)
        except TypeError as error:
            raise ValueError(f"{self.path}, line {number}: not an answer: remove the line, or begin anew") from error
        before = self.answers.setdefault(answer.row, [])
        if answer.turn != len(before):
            raise ValueError(f"{self.path}, line {number}: turn {answer.turn} of {answer.row} is out of order")
        before.append(answer)

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            data = _line(entry).encode()
            if os.write(self._file.fileno(), data) < len(data):
                raise ValueError(f"{self.path}: no space left on the device")
            if time.monotonic() - self._synced > SYNC:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise explain(error, self.path) from error


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
