"""What is seen of a sweep: a table that lives on a terminal, else a line at every beginning and end."""

import datetime
import logging
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec.sweep.following import Far, Follower
from specdec.sweep.run import SETTLED, Entry, Phase

log = logging.getLogger(__name__)

EVERY = 2.0  # seconds between two pictures
FAILURES = 5  # the latest, whose reasons are told
ORDER = (Phase.FAILED, Phase.RUNNING, Phase.ELSEWHERE, Phase.WAITING, Phase.NOT_RUN, Phase.DONE)
STYLE = {Phase.FAILED: "red", Phase.RUNNING: "bold", Phase.DONE: "green", Phase.NOT_RUN: "dim", Phase.WAITING: "dim"}


class Shown:
    """Shows a sweep; give :meth:`watch` to :func:`specdec.sweep.run.run`.

    Args:
        console: where to; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live = Live(console=self.console, auto_refresh=False, transient=False)
        self._followers: dict[str, Follower] = {}
        self._phases: dict[str, Phase] = {}
        self._at_once = 1  # the most jobs so far
        self._drawn = -EVERY

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()
            self._redirect()

    def watch(self, entries: Sequence[Entry], ended: bool) -> None:
        """As :data:`specdec.sweep.run.Watch`."""
        self._at_once = max(self._at_once, sum(entry.phase is Phase.RUNNING for entry in entries))
        if not self.console.is_terminal:
            self._tell(entries)
        elif ended or time.monotonic() - self._drawn >= EVERY:
            if not self._live.is_started:
                self._live.start()
                self._redirect()
            self._live.update(self.picture(entries), refresh=True)
            self._drawn = time.monotonic()

    def _redirect(self) -> None:
        """Have what is logged stand above the table, and again where it stood before."""
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)

    def _tell(self, entries: Sequence[Entry]) -> None:
        new = [entry for entry in entries if self._phases.get(entry.job.key, Phase.WAITING) is not entry.phase]
        self._phases = {entry.job.key: entry.phase for entry in entries}
        for entry in new:
            if entry.phase is Phase.RUNNING:
                log.info("%s: begins", entry.job.label)
            elif entry.phase is Phase.ELSEWHERE:
                log.info("%s: somebody else has it", entry.job.label)
            elif entry.phase in SETTLED:
                took = clock(seconds) if (seconds := _seconds(entry)) is not None else ""
                said = [entry.phase.value, *filter(None, [took, entry.message])]
                log.info("%s: %s (%s)", entry.job.label, ": ".join(said), self.footer(entries))

    def picture(self, entries: Sequence[Entry]) -> Group:
        """The table as it is now; as many rows as the terminal has lines, those that matter most first."""
        runs: dict[str, list[Entry]] = {}
        for entry in entries:
            runs.setdefault(entry.job.label.rpartition(": ")[0], []).append(entry)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("arm", "seed", "job", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("done", "rate", "elapsed", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        rows = [(name, _telling(jobs)) for name, jobs in runs.items()]
        rows.sort(key=lambda row: ORDER.index(row[1].phase))
        failed = [entry for entry in entries if entry.phase is Phase.FAILED][-FAILURES:]
        most, means = max(1, self.console.height - 4 - len(failed)), _means(entries)
        for name, entry in rows[:most]:
            table.add_row(*self._row(name, entry, means), style=STYLE.get(entry.phase, ""))
        hidden = [Text(f"and {len(rows) - most} more runs", style="dim")] if len(rows) > most else []
        told = [Text(f"{one.job.label}: {one.message}", "red", no_wrap=True, overflow="ellipsis") for one in failed]
        return Group(table, *hidden, *told, Text(self.footer(entries)))

    def _row(self, name: str, entry: Entry, means: Mapping[str, float]) -> list[str]:
        arm, _, seed = name.rpartition("seed=")
        arm, seed = (arm.strip(), seed) if arm or name.startswith("seed=") else (name, "")
        far, left = self._far(entry), self.left(entry, means)
        return [
            arm, seed, entry.job.kind, entry.phase.value,
            "" if far is None else f"{far.done:g}/{far.total:g}" if far.unit == "steps" else f"{far.done:g} %",
            f"{far.rate:.3g} {far.unit}/s" if far and far.rate else "",
            clock(seconds) if (seconds := _seconds(entry)) is not None else "",
            clock(left) if left is not None and entry.phase is Phase.RUNNING else "",
        ]  # fmt: skip

    def _far(self, entry: Entry) -> Far | None:
        if entry.phase not in (Phase.RUNNING, Phase.ELSEWHERE):
            return None
        follower = self._followers.setdefault(entry.job.key, Follower(entry.folder.log))
        return follower.look()

    def footer(self, entries: Sequence[Entry]) -> str:
        """How many of the jobs are done, and how long the rest will take."""
        by = [entry.phase for entry in entries]
        left = sum(phase not in SETTLED for phase in by)
        told = [f"{by.count(Phase.DONE)} of {len(by)} jobs done"]
        told += [f"{by.count(phase)} {phase.value}" for phase in (Phase.FAILED, Phase.NOT_RUN) if phase in by]
        if left:
            seconds, whole = self.eta(entries)
            words = "" if whole else "at least "
            told.append(f"{left} left, {words}{clock(seconds)} more" if whole or seconds else f"{left} left")
        return ", ".join(told)

    def eta(self, entries: Sequence[Entry]) -> tuple[float, bool]:
        """Seconds until all is done, at as many jobs at once as there were; and whether every job's are known."""
        means = _means(entries)
        left = [self.left(entry, means) for entry in entries if entry.phase not in SETTLED]
        known = [seconds for seconds in left if seconds is not None]
        return max(sum(known) / self._at_once, max(known, default=0.0)), len(known) == len(left)

    def left(self, entry: Entry, means: Mapping[str, float]) -> float | None:
        """Seconds that a job still takes: by its own rate, else by what jobs of its kind took; None if neither is
        known."""
        far = self._far(entry)
        if far is not None and far.seconds_left is not None:
            return far.seconds_left
        mean = means.get(entry.job.kind)
        return None if mean is None else max(0.0, mean - (_seconds(entry) or 0.0))


def _telling(jobs: Sequence[Entry]) -> Entry:
    """Of a run's jobs the one that says most about it."""
    for phase in (Phase.RUNNING, Phase.ELSEWHERE, Phase.FAILED, Phase.WAITING):
        for entry in jobs:
            if entry.phase is phase:
                return entry
    return jobs[-1]


def _means(entries: Sequence[Entry]) -> dict[str, float]:
    """Seconds that the jobs of a kind took."""
    took: dict[str, list[float]] = {}
    for entry in entries:
        if entry.phase is Phase.DONE and entry.took is not None:
            took.setdefault(entry.job.kind, []).append(entry.took)
    return {kind: statistics.mean(times) for kind, times in took.items()}


def _seconds(entry: Entry) -> float | None:
    """That a job ran, in all attempts; None if that is not known."""
    return time.monotonic() - entry.begun if entry.phase is Phase.RUNNING else entry.took


def clock(seconds: float) -> str:
    """``0:01:23``."""
    return str(datetime.timedelta(seconds=round(seconds)))
