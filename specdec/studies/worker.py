"""One job of a study, and one attempt at it: the command under a supervisor, its lock, and the journal of attempts.

A worker starts :mod:`specdec.utils.supervise`, which starts the command. If the worker's process is killed, the kernel
closes the supervisor's input and it ends the command; if the supervisor is killed, the worker does; what is left of a
command gets SIGTERM first, so that a fit saves. The journal ``jobs/KEY/attempts.jsonl`` is the job's lock: it is held
until the worker, the supervisor and the command are all gone, so that no job is run twice at a time.
"""

import contextlib
import dataclasses
import datetime
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specdec.utils import supervise
from specdec.utils.files import explain
from specdec.utils.journal import Journal, JournalBusyError, is_being_written, read_journal

JOBS, CONFIG, LOG, ATTEMPTS = "jobs", "config.yaml", "log.txt", "attempts.jsonl"
GRACE = 30.0  # seconds for a command to end by itself: fit ends its optimizer step and saves
PATIENCE = 10.0  # seconds more, until what was killed is gone
POLL = 0.1
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")  # of a launcher around the sweep: a job has its own
LONGEST = 400  # letters of a reason

End = Literal["done", "failed", "stopped", "died", "busy"]
"""Of an attempt: ``stopped`` because it was asked to, ``died`` of a signal that nobody here sent, ``busy`` where
another worker has the job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of a study, addressed by what decides its result.

    Args:
        key: content address, also the name of its folder in ``jobs/``.
        kind: the command: ``cache``, ``fit``, ``evaluate``, ``drift`` or ``robustness``.
        label: for people, as ``fc_norm=on K=4 seed=1: fit``.
        command: arguments of ``python -m specdec``, run in the folder where ``specdec sweep`` was.
        directory: what it makes, relative to the study's directory: ``fits/KEY``.
        done: file below ``directory`` that is there only when the work is done.
        needs: keys of the jobs that must be done before.
        resumes: the same command goes on with what a killed one has left; otherwise that is removed first.
        threads: CPU threads that it asks of the machine.
        config: what ``jobs/KEY/config.yaml`` holds.
    """

    key: str
    kind: str
    label: str
    command: tuple[str, ...]
    directory: str
    done: str
    needs: tuple[str, ...] = ()
    resumes: bool = False
    threads: int = 1
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """JSON-able data, without the config."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "config"}


@dataclass(frozen=True)
class Launch:
    """How the commands of jobs are run.

    Args:
        cwd: the folder in which they run, on every machine.
        module: what ``python -m`` is given.
        grace: seconds to end by themselves when they are stopped.
    """

    cwd: Path
    module: str = "specdec"
    grace: float = GRACE


class Attempt(NamedTuple):
    """One attempt at a job, as its journal tells."""

    begun: str
    """UTC, ISO 8601."""
    host: str
    end: str | None = None
    """One of :data:`End`, or ``killed``; None: it runs, or was killed and nobody has noted that yet."""
    seconds: float | None = None
    """That the command ran; None of a killed one."""
    message: str | None = None
    """Why it failed, in one line."""


class JobFolder:
    """``jobs/KEY`` of a study: ``config.yaml``, ``log.txt`` and ``attempts.jsonl``."""

    def __init__(self, study: Path, key: str) -> None:
        self.study, self.key, self.path = study, key, study / JOBS / key

    def attempts(self) -> list[Attempt]:
        """All of them in order."""
        return _attempts(read_journal(self.path / ATTEMPTS))

    def is_held(self) -> bool:
        """Whether somebody works on it, or what is left of a killed attempt still lives."""
        return is_being_written(self.path / ATTEMPTS)

    def is_done(self, job: Job) -> bool:
        """Whether its work is there."""
        return (self.study / job.directory / job.done).exists()


def work(
    study: Path,
    job: Job,
    launch: Launch,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> tuple[End, str | None]:
    """Attempt a job unless its work is there or somebody has it, and wait for it; the end, and why it failed.

    Whatever ends this call ends the command, and waits for that.

    Args:
        environment: variables besides this process's own.
        stop: set by another thread to end the command.

    Raises:
        ValueError: the job's folder cannot be written.
    """
    folder = JobFolder(study, job.key)
    for _ in range(20):  # whoever only looks whether the journal is locked lets go at once
        with (
            contextlib.suppress(JournalBusyError),
            Journal(folder.path / ATTEMPTS, "specdec.job", {"key": job.key}) as one,
        ):
            return _attempt(folder, job, launch, one, environment or {}, stop or threading.Event())
        time.sleep(0.05)
    return "busy", None


def _attempt(
    folder: JobFolder, job: Job, launch: Launch, journal: Journal, environment: Mapping[str, str], stop: threading.Event
) -> tuple[End, str | None]:
    """The attempt itself, under the journal's lock."""
    before = _attempts(journal.entries)
    if before and before[-1].end is None:  # it was killed
        journal.append({"end": "done" if folder.is_done(job) else "killed"})
    if folder.is_done(job):
        return "done", None
    if before and not job.resumes:
        shutil.rmtree(folder.study / job.directory, ignore_errors=True)
    begun, start = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), time.monotonic()
    journal.append({"begun": begun, "host": socket.gethostname()})
    supervisor = _start(folder, job, launch, f"attempt {len(before) + 1}, {begun}", journal.fileno(), environment)
    try:
        while supervisor.poll() is None and not stop.wait(POLL):
            pass
    finally:
        stopped = supervisor.poll() is None
        assert supervisor.stdin is not None
        supervisor.stdin.close()  # upon which it ends the command
        status = supervisor.wait(launch.grace + PATIENCE)
        if status < 0:  # the supervisor itself was killed
            _end_session(supervisor.pid, launch.grace)
        end, message = _judged(folder, job, status, stopped)
        journal.append({"end": end, "seconds": round(time.monotonic() - start, 3), "message": message})
    return end, message


def _start(
    folder: JobFolder, job: Job, launch: Launch, what: str, lock: int, environment: Mapping[str, str]
) -> subprocess.Popen:
    """The supervisor of the job's command, which holds the lock too."""
    keep = {name: text for name, text in os.environ.items() if name not in RANKS and not name.startswith("SLURM_")}
    command = [sys.executable, "-m", launch.module, *job.command]
    try:
        with (folder.path / LOG).open("ab") as stream:
            stream.write(f"--- {what}: {launch.module} {shlex.join(job.command)}\n".encode())
            stream.flush()
            return subprocess.Popen(
                [sys.executable, "-I", supervise.__file__, str(launch.grace), *command],
                cwd=launch.cwd,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C goes to us alone
                pass_fds=[lock],
                env=keep | dict.fromkeys(THREADS, str(job.threads)) | dict(environment),
            )
    except OSError as error:
        raise explain(error, error.filename or folder.path) from error


def _judged(folder: JobFolder, job: Job, status: int, stopped: bool) -> tuple[End, str | None]:
    """What a supervisor's exit status means."""
    number = -status if status < 0 else status - 128
    if folder.is_done(job):
        return "done", None
    if stopped:
        return "stopped", None
    if number > 0:
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        return "died", f"ended by {name}{': was there memory enough?' if name == 'SIGKILL' else ''}"
    if status == 0:
        return "failed", f"ended well, but made no {job.directory}/{job.done}"
    return "failed", _last_line(folder.path / LOG)


def _attempts(entries: list[dict[str, Any]]) -> list[Attempt]:
    found: list[Attempt] = []
    for entry in entries:
        if "begun" in entry:
            found.append(Attempt(**entry))
        else:
            found[-1] = found[-1]._replace(**entry)
    return found


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:LONGEST] if lines else "it said nothing"


def _end_session(session: int, grace: float) -> None:
    """End what a killed supervisor has left, on Linux: its command has had SIGTERM of the kernel, with its death."""
    until = time.monotonic() + grace
    while any(pid == group for pid, group in _members(session)) and time.monotonic() < until:  # the command itself
        time.sleep(POLL)
    for group in {group for _, group in _members(session)}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _members(session: int) -> list[tuple[int, int]]:
    """Processes of a session and the process group of each; those that have ended and wait for their parent aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                found.append((int(path.parent.name), int(group)))
    return found
