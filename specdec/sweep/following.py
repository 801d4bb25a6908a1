"""How far a command is, by the end of what it has said."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TAIL = 4096  # bytes
_STEP = re.compile(rb"step (\d+)/(\d+)")  # specdec.embedded.progress
_SHARE = re.compile(rb"([\d.]+) % of ")  # specdec.progress
_BEGUN = re.compile(rb"^--- attempt ", re.MULTILINE)  # specdec.sweep.attempt


class Far(NamedTuple):
    """How far a command is."""

    done: float
    total: float
    unit: str
    """``steps`` or ``%``."""
    rate: float | None
    """Of these a second, since it was first looked at; None where nothing can be said yet."""

    @property
    def seconds_left(self) -> float | None:
        """At this rate."""
        return (self.total - self.done) / self.rate if self.rate else None


class Follower:
    """Reads the end of a log now and then.

    Args:
        clock: seconds.
    """

    def __init__(self, log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.log, self.clock = log, clock
        self._first: tuple[float, float] | None = None  # when, and how far it was
        self._last: tuple[float, float, float, str] | None = None  # when, how far, of what, unit

    def look(self) -> Far | None:
        """How far it is; None where it has not said that."""
        if (said := self._said()) is None:
            return None
        done, total, unit = said
        if self._last is None or done < self._last[1] or unit != self._last[3]:
            self._first = self._last = None  # another attempt
        if self._last is None or done > self._last[1]:
            self._last = self.clock(), done, total, unit
            self._first = self._first or self._last[:2]
        assert self._first is not None
        (begin, before), (at, now) = self._first, self._last[:2]
        return Far(done, total, unit, (now - before) / (at - begin) if at > begin else None)

    def _said(self) -> tuple[float, float, str] | None:
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL))
                tail = stream.read(TAIL)
        except OSError:
            return None
        tail = _BEGUN.split(tail)[-1]
        found = [*_STEP.finditer(tail), *_SHARE.finditer(tail)]
        if not found:
            return None
        last = max(found, key=lambda match: match.start())
        if last.re is _STEP:
            return float(last[1]), float(last[2]), "steps"
        return float(last[1]), 100.0, "%"
