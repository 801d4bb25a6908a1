"""Runs the jobs of a study, each once it can, until all are done or cannot be."""

import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.serving import said
from specdec.signals import Asked, Note, noted
from specdec.sweep.attempt import BUSY, settle
from specdec.sweep.engine import Ended, Engine
from specdec.sweep.job import Job
from specdec.sweep.state import LOST, Folder
from specdec.sweep.worker import Way

log = logging.getLogger(__name__)

RETRIES = 3
POLL = 1.0  # seconds between looks at what nobody tells of: another runner's jobs


class Phase(enum.Enum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ELSEWHERE = "elsewhere"  # another runner works on it, or what is left of a killed attempt still lives
    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


SETTLED = (Phase.DONE, Phase.FAILED, Phase.NOT_RUN)


@dataclass
class Entry:
    """A job in a sweep, and where it stands."""

    job: Job
    folder: Folder
    phase: Phase = Phase.WAITING
    message: str = ""
    begun: float = 0.0
    """On the clock :func:`time.monotonic`, of the worker's start."""
    before: int = 0
    """Attempts that had been begun when the sweep was."""
    known: int = 0
    """Attempts that had been begun when its worker was started."""
    stillborn: int = 0
    """Workers that were killed before they began an attempt."""
    took: float | None = None
    """Seconds that its command ran, once it has come to an end."""
    waited: float = 0.0
    """Seconds, of all its workers, from the start of one to the knowledge of its end."""


@dataclass(frozen=True)
class Outcome:
    """What became of a sweep's jobs, by their keys."""

    done: tuple[str, ...]
    failed: Mapping[str, str]
    """And why, in one line."""
    not_run: Mapping[str, str]
    """Those that need a failed one, and which."""
    left: tuple[str, ...] = ()
    """Those to go on with, where somebody asked the sweep to end."""
    signal: int | None = None
    seconds: float = 0.0
    workers_seconds: float = 0.0
    """From the start of every worker to the knowledge of its end, together."""

    @property
    def status(self) -> int:
        """The exit status: 0, 1 if a job failed, 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.not_run))


Watch = Callable[[Sequence[Entry], bool], None]
"""Called with all entries about every second, and with True when one of them has come to an end."""


def run(
    study: Path,
    jobs: Iterable[Job],
    engine: Engine,
    *,
    way: Way | None = None,
    retries: int = RETRIES,
    watch: Watch = lambda entries, ended: None,
) -> Outcome:
    """Run all jobs of a study that are not done, in the order of their needs; call it in the main thread.

    What is done is never run again, what was interrupted goes on, and what failed before is tried once more. Several
    runners may work on one study at a time, also from several machines that share its folder. Ctrl-C and SIGTERM stop
    the workers, which save what they have; a second one does not wait for that.

    Args:
        study: its folder; ``jobs/`` is made in it.
        jobs: in the order in which they are started where several can be.
        way: how commands are run; by default in the working folder.
        retries: how often a job is begun anew in this sweep after attempts that ended by a signal. One that ends by
            itself with an error is not.

    Raises:
        ValueError: a job needs one that is not there or itself, the engine cannot be had, or the study cannot be
            written.
    """
    begin = time.monotonic()
    entries = _entries(study, jobs)
    sweep = _Sweep(entries, engine, retries, watch)
    with noted() as note:
        try:
            with engine.open(study, way or Way(Path.cwd()), retries):
                log.info("%d jobs, %d of them done, on %s", len(entries), sweep.done, engine.describe())
                sweep.go(note)
                if note.number is not None:
                    log.warning("stopping: what runs saves and ends; once more does not wait for it")
        except Asked:
            pass
        except SystemError as error:  # Ray makes this of it
            if not isinstance(error.__cause__, Asked):
                raise
    for entry in entries.values():  # some have ended well when they were asked to stop
        if entry.phase is Phase.RUNNING and entry.folder.is_done(entry.job):
            entry.phase = Phase.DONE
    by = {phase: [key for key, entry in entries.items() if entry.phase is phase] for phase in Phase}
    return Outcome(
        tuple(by[Phase.DONE]),
        {key: entries[key].message for key in by[Phase.FAILED]},
        {key: entries[key].message for key in by[Phase.NOT_RUN]},
        tuple(key for key, entry in entries.items() if entry.phase not in SETTLED),
        note.number,
        time.monotonic() - begin,
        sum(entry.waited for entry in entries.values()),
    )


def _entries(study: Path, jobs: Iterable[Job]) -> dict[str, Entry]:
    found = {job.key: job for job in jobs}
    seen: dict[str, bool] = {}  # False while its needs are looked at

    def look(key: str, above: str) -> Iterator[str]:
        if key not in found:
            raise ValueError(f"{study}: job {above} needs {key}, which is not in the study")
        if not seen.get(key, True):
            raise ValueError(f"{study}: job {key} needs itself")
        if key in seen:
            return
        seen[key] = False
        for need in found[key].needs:
            yield from look(need, key)
        seen[key] = True
        yield key

    for key in found:
        for _ in look(key, key):
            pass
    out = {}
    for key, job in found.items():
        folder = Folder.of(study, job)
        before = max((one.number for one in folder.attempts()), default=0)
        out[key] = Entry(job, folder, before=before)
    return out


class _Sweep:
    def __init__(self, entries: Mapping[str, Entry], engine: Engine, retries: int, watch: Watch) -> None:
        self.entries, self.engine, self.retries, self.watch = entries, engine, retries, watch
        self._looked = -POLL
        for entry in entries.values():
            if entry.folder.is_done(entry.job):
                self._look(entry)

    @property
    def done(self) -> int:
        return sum(entry.phase is Phase.DONE for entry in self.entries.values())

    def go(self, note: Note) -> None:
        """To the end, or until somebody asks for it."""
        all_of_them = list(self.entries.values())
        self._start()
        self.watch(all_of_them, False)
        while note.number is None and any(entry.phase not in SETTLED for entry in all_of_them):
            ended = self.engine.ended(POLL)
            for one in ended:
                self._after(one)
            if time.monotonic() - self._looked >= POLL:
                self._looked = time.monotonic()
                for entry in all_of_them:
                    if entry.phase is Phase.ELSEWHERE:
                        self._look(entry)
            self._start()
            self.watch(all_of_them, bool(ended))

    def _start(self) -> None:
        for entry in self.entries.values():
            if entry.phase is not Phase.WAITING:
                continue
            bad = [need for need in entry.job.needs if self.entries[need].phase in (Phase.FAILED, Phase.NOT_RUN)]
            if bad:
                needed = self.entries[bad[0]]
                root = needed.message if needed.phase is Phase.NOT_RUN else f"needs {needed.job.label}, which failed"
                self._end(entry, Phase.NOT_RUN, root)
            elif all(self.entries[need].phase is Phase.DONE for need in entry.job.needs):
                if why := self.engine.refuses(entry.job):
                    self._end(entry, Phase.FAILED, why)
                elif self.engine.has_room(entry.job):
                    self._look(entry)
                    if entry.phase is Phase.WAITING:
                        self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        entry.known = len(entry.folder.attempts())
        entry.phase, entry.begun = Phase.RUNNING, time.monotonic()
        self.engine.start(entry.folder.path, entry.job)

    def _after(self, ended: Ended) -> None:
        """What a worker's end means for its job."""
        entry = self.entries[ended.key]
        entry.waited += time.monotonic() - entry.begun
        if len(entry.folder.attempts()) == entry.known and ended.status != BUSY and not entry.folder.is_done(entry.job):
            if ended.status is None or ended.status <= 128:
                reason = ended.message or said.last(entry.folder.log)
                self._end(entry, Phase.FAILED, f"its worker did not begin: {reason}")
                return
            entry.stillborn += 1
        self._look(entry)

    def _look(self, entry: Entry) -> None:
        """Find out from its folder where a job stands that no worker of ours is at."""
        folder = entry.folder
        if folder.is_held():
            entry.phase = Phase.ELSEWHERE
            return
        settle(folder, entry.job)
        if folder.is_done(entry.job):
            self._end(entry, Phase.DONE)
            return
        attempts = [one for one in folder.attempts() if one.number > entry.before]
        lost = sum(one.end in LOST for one in attempts) + entry.stillborn
        state = folder.state()
        message = (state.message if state else None) or "it was killed"
        if attempts and attempts[-1].end == "failed":
            self._end(entry, Phase.FAILED, message)
        elif lost > self.retries:
            self._end(entry, Phase.FAILED, f"{message}, {lost} times in this sweep")
        else:
            if entry.phase is Phase.RUNNING and attempts and attempts[-1].end in LOST:
                log.warning("%s: %s; it is begun anew", entry.job.label, message)
            entry.phase = Phase.WAITING

    def _end(self, entry: Entry, phase: Phase, message: str = "") -> None:
        entry.phase, entry.message = phase, message
        state = entry.folder.state()
        entry.took = None if state is None or phase is Phase.NOT_RUN else state.seconds


def failures(outcome: Outcome, jobs: Mapping[str, Job]) -> list[str]:
    """A line for every job that failed or was not run."""
    told = [f"{jobs[key].label}: failed: {why}" for key, why in outcome.failed.items()]
    return told + [f"{jobs[key].label}: not run: {why}" for key, why in outcome.not_run.items()]
