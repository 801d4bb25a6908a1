"""Runs the jobs of a study, each once it can, until all are done or cannot be."""

import abc
import datetime
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specdec.studies.worker import PATIENCE, Job, JobFolder, Launch
from specdec.utils.signals import Asked, Note, noted

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


class Ended(NamedTuple):
    """What an engine knows of a job whose worker has ended."""

    end: str | None
    """As :data:`specdec.studies.worker.End`; None where the worker was lost."""
    message: str | None = None


@dataclass
class Engine(metaclass=abc.ABCMeta):
    """Starts workers for jobs and says when they have ended, here or on other machines."""

    ask: ClassVar[float] = 0.1
    """Seconds between looks at what runs."""

    def open(self, study: Path, launch: Launch, retries: int) -> None:
        """Get ready for the jobs of a study.

        Args:
            retries: how often a job whose worker was lost with its machine is begun anew by the engine itself, where it
                can do that.

        Raises:
            ValueError: it cannot be had here; the message says what to do.
        """
        self.study, self.launch = study, launch
        self.running: dict[str, Any] = {}

    def refuses(self, job: Job) -> str:
        """Why the job can never run here; nothing if it can."""
        return ""

    def has_room(self, job: Job) -> bool:
        """Whether to start it now."""
        return True

    @abc.abstractmethod
    def submit(self, job: Job) -> Any:
        """Have a worker begin with a job; a handle for the two methods below."""

    @abc.abstractmethod
    def result(self, handle: Any) -> Ended | None:
        """How a worker ended; None while it runs."""

    @abc.abstractmethod
    def cancel(self, handle: Any) -> None:
        """Stop a worker, so that its job can be gone on with; does not wait for it."""

    def start(self, job: Job) -> None:
        """Submit a job, and keep its handle."""
        self.running[job.key] = self.submit(job)

    def ended(self, seconds: float) -> dict[str, Ended]:
        """The jobs whose workers have ended since the last call, by key; waits for one, so long at most."""
        until = time.monotonic() + seconds
        while True:
            found = {key: end for key, handle in self.running.items() if (end := self.result(handle)) is not None}
            for key in found:
                del self.running[key]
            if found or time.monotonic() >= until:
                return found
            time.sleep(self.ask)

    def close(self) -> None:
        """Stop what runs, and wait for that: no worker is left."""
        for handle in self.running.values():
            self.cancel(handle)
        until = time.monotonic() + self.launch.grace + PATIENCE
        while self.running and time.monotonic() < until:
            self.ended(POLL)


@dataclass
class SweepJob:
    """A job in a sweep, and where it stands."""

    job: Job
    folder: JobFolder
    phase: Phase = Phase.WAITING
    message: str = ""
    begun: float = 0.0
    """On the clock :func:`time.monotonic`, of its worker's start."""
    lost: int = 0
    """Attempts of this sweep that ended by a signal, or with their machine."""


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

    @property
    def status(self) -> int:
        """The exit status: 0, 1 if a job failed, 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.not_run))


Watch = Callable[[Sequence[SweepJob]], None]
"""Called with all entries about every second, and when one of them has come to an end."""


def run(
    study: Path,
    jobs: Iterable[Job],
    engine: Engine,
    *,
    launch: Launch | None = None,
    retries: int = RETRIES,
    watch: Watch = lambda entries: None,
) -> Outcome:
    """Run all jobs of a study that are not done, in the order of their needs; call it in the main thread.

    What is done is never run again, what was interrupted goes on, and what failed before is tried once more. Several
    runners may work on one study at a time, also from several machines that share its folder. Ctrl-C and SIGTERM stop
    the workers, which save what they have; a second one does not wait for that.

    Args:
        study: its folder; ``jobs/`` is made in it.
        jobs: in the order in which they are started where several can be.
        launch: how commands are run; by default in the working folder.
        retries: how often a job is begun anew in this sweep after attempts that ended by a signal. One that ends by
            itself with an error is not.

    Raises:
        ValueError: a job needs one that is not there or itself, the engine cannot be had, or the study cannot be
            written.
    """
    entries = {job.key: SweepJob(job, JobFolder(study, job.key)) for job in jobs}
    _check_needs(study, entries)
    sweep = _Sweep(entries, engine, retries, watch)
    with noted() as note:
        try:
            engine.open(study, launch or Launch(Path.cwd()), retries)
            try:
                done = sum(entry.phase is Phase.DONE for entry in entries.values())
                log.info("%d jobs, %d of them done, on %s", len(entries), done, type(engine).__name__)
                sweep.go(note)
                if note.number is not None:
                    log.warning("stopping: what runs saves and ends; once more does not wait for it")
            finally:
                engine.close()
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
    )


def failures(outcome: Outcome, jobs: Mapping[str, Job]) -> list[str]:
    """A line for every job that failed or was not run."""
    told = [f"{jobs[key].label}: failed: {why}" for key, why in outcome.failed.items()]
    return told + [f"{jobs[key].label}: not run: {why}" for key, why in outcome.not_run.items()]


def _check_needs(study: Path, entries: Mapping[str, SweepJob]) -> None:
    for key, entry in entries.items():
        if missing := next((need for need in entry.job.needs if need not in entries), None):
            raise ValueError(f"{study}: job {key} needs {missing}, which is not in the study")
    try:
        TopologicalSorter({key: entry.job.needs for key, entry in entries.items()}).prepare()
    except CycleError as error:
        raise ValueError(f"{study}: job {error.args[1][0]} needs itself") from error


class _Sweep:
    def __init__(self, entries: Mapping[str, SweepJob], engine: Engine, retries: int, watch: Watch) -> None:
        self.entries, self.engine, self.retries, self.watch = entries, engine, retries, watch
        self._looked = time.monotonic()
        for entry in entries.values():
            if entry.folder.is_done(entry.job):
                entry.phase = Phase.DONE

    def go(self, note: Note) -> None:
        """To the end, or until somebody asks for it."""
        everyone = list(self.entries.values())
        self._start()
        self.watch(everyone)
        while note.number is None and any(entry.phase not in SETTLED for entry in everyone):
            for key, ended in self.engine.ended(POLL).items():
                self._after(self.entries[key], ended)
            if time.monotonic() - self._looked >= POLL:
                self._looked = time.monotonic()
                for entry in everyone:
                    if entry.phase is Phase.ELSEWHERE and not entry.folder.is_held():
                        entry.phase = Phase.WAITING
            self._start()
            self.watch(everyone)

    def _start(self) -> None:
        """Begin what can be begun, and settle what never can."""
        for entry in self.entries.values():
            if entry.phase is not Phase.WAITING:
                continue
            needs = [self.entries[need] for need in entry.job.needs]
            if bad := [need for need in needs if need.phase in (Phase.FAILED, Phase.NOT_RUN)]:
                failed = f"needs {bad[0].job.label}, which failed"
                self._end(entry, Phase.NOT_RUN, bad[0].message if bad[0].phase is Phase.NOT_RUN else failed)
            elif all(need.phase is Phase.DONE for need in needs):
                if entry.folder.is_done(entry.job):
                    self._end(entry, Phase.DONE)
                elif entry.folder.is_held():
                    entry.phase = Phase.ELSEWHERE
                elif why := self.engine.refuses(entry.job):
                    self._end(entry, Phase.FAILED, why)
                elif self.engine.has_room(entry.job):
                    entry.phase, entry.begun = Phase.RUNNING, time.monotonic()
                    log.info("%s: begins", entry.job.label)
                    self.engine.start(entry.job)

    def _after(self, entry: SweepJob, ended: Ended) -> None:
        """What a worker's end means for its job."""
        if ended.end == "done":
            self._end(entry, Phase.DONE)
        elif ended.end == "failed":
            self._end(entry, Phase.FAILED, ended.message or "")
        elif ended.end == "busy":
            entry.phase = Phase.ELSEWHERE
        else:
            entry.lost += 1
            if entry.lost > self.retries:
                self._end(entry, Phase.FAILED, f"{ended.message}, {entry.lost} times in this sweep")
            else:
                log.warning("%s: %s; it is begun anew", entry.job.label, ended.message)
                entry.phase = Phase.ELSEWHERE if entry.folder.is_held() else Phase.WAITING

    def _end(self, entry: SweepJob, phase: Phase, message: str = "") -> None:
        ran = entry.phase is Phase.RUNNING
        took = f" in {datetime.timedelta(seconds=round(time.monotonic() - entry.begun))}" if ran else ""
        entry.phase, entry.message = phase, message
        log.info("%s: %s%s%s", entry.job.label, phase.value, took, f": {message}" if message else "")
