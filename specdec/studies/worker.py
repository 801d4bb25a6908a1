"""One job of a study, and one attempt at it: the command under a supervisor, its lock, and the journal of attempts.

A worker starts :mod:`specdec.utils.supervise`, which starts the command. If the worker's process is killed, the kernel
closes the supervisor's input and it ends the command; if the supervisor is killed, the worker does; what is left of a
command gets SIGTERM first, so that a fit saves. The journal ``jobs/KEY/attempts.jsonl`` is the job's lock: it is held
until the worker, the supervisor and the command are all gone, so that no job is run twice at a time.
"""

import contextlib
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

import yaml

from specdec.features.store import INDEX
from specdec.utils import supervise
from specdec.utils.files import drop_sums, write_sums, write_text
from specdec.utils.imports import flags
from specdec.utils.journal import Journal, JournalBusyError, is_being_written, read_journal
from specdec.utils.links import open_in_place
from specdec.utils.reading import explained

JOBS = "jobs"
CONFIG = "config.yaml"
LOG = "log.txt"
ATTEMPTS = "attempts.jsonl"
# of a study, by the kind of job; what measures leave: measures
FOLDERS = {"cache": "features", "fit": "fits"}
LAST_FILES = {
    "cache": INDEX, "fit": "DONE.json", "evaluate": "metrics.json", "drift": "drift.json",
    "robustness": "robustness.json",
}  # fmt: skip
RESUME = ("cache", "fit")  # go on with what a killed attempt left; what others left is removed
GRACE = 30.0  # seconds for a command to end by itself: fit ends its optimizer step and saves
PATIENCE = 10.0  # seconds more, until what was killed is gone
POLL = 0.1
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# of a launcher around the sweep: a job has its own
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
LONGEST = 400  # letters of a reason


class JobResult(NamedTuple):
    """How a worker's attempt at a job ended, and why it failed, in one line.

    ``stopped``: on request; ``died``: of a signal from elsewhere; ``busy``: another worker has the job; None: the
    worker itself was lost.
    """

    end: Literal["done", "failed", "stopped", "died", "busy"] | None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of a study.

    Args:
        key: a hash of what decides its result, also the name of its folder in ``jobs/``.
        kind: the command: ``cache``, ``fit``, ``evaluate``, ``drift`` or ``robustness``.
        label: for people, as ``fc_norm=on K=4 seed=1: fit``.
        command: arguments of ``python -m``, run in the folder where ``specdec sweep`` was.
        needs: keys of the jobs that must be done before.
        threads: CPU threads that it gets.
        config: for ``jobs/KEY/config.yaml``.
    """

    key: str
    kind: str
    label: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    threads: int = 1
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)


class JobFolder:
    """A job's files: in ``path``, ``jobs/KEY``, its ``config.yaml``, ``log.txt`` and ``attempts.jsonl``; in ``output``
    (``features/KEY``, ``fits/KEY`` or ``measures/KEY``) what it makes.
    """

    def __init__(self, study: Path, kind: str, key: str) -> None:
        self.path = study / JOBS / key
        self.output = study / FOLDERS.get(kind, "measures") / key
        self.last_file = self.output / LAST_FILES[kind]

    def attempts(self) -> list[dict[str, Any]]:
        """All attempts in order, each with ``begun`` (UTC, ISO 8601) and ``host``; one that has ended with ``end`` (see
        :class:`JobResult`, or ``killed``), and unless it was killed ``seconds`` and ``message``.
        """
        return _attempts(read_journal(self.path / ATTEMPTS))

    def is_held(self) -> bool:
        """Whether a worker has it, or what is left of a killed attempt still lives."""
        return is_being_written(self.path / ATTEMPTS)

    def is_done(self) -> bool:
        """Whether the last file that it makes is there."""
        return self.last_file.exists()


def specdec_job(
    study: Path, kind: str, key: str, label: str, config: Mapping[str, Any], threads: int, needs: tuple[str, ...],
    *arguments: str,
) -> Job:  # fmt: skip
    """The job of a command of specdec, with further arguments in addition to its config file and ``--out``."""
    folder = JobFolder(study, kind, key)
    files = ("--config", str(folder.path / CONFIG), "--out", str(folder.output))
    command = ("specdec", kind, *flags(), *files, *arguments)
    return Job(
        key=key,
        kind=kind,
        label=label,
        command=command,
        needs=needs,
        threads=threads,
        config=config,
    )


def write_config(study: Path, job: Job) -> None:
    """Write ``jobs/KEY/config.yaml``."""
    text = yaml.safe_dump(dict(job.config), sort_keys=False, allow_unicode=True)
    folder = study / JOBS / job.key
    drop_sums(folder, CONFIG)
    write_text(folder / CONFIG, text)
    write_sums(folder, CONFIG)


def run_job(
    study: Path,
    job: Job,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> JobResult:
    """Attempt a job unless it is done or another worker has it, and wait for it.

    Whatever ends this call ends the command, and waits for that.

    Args:
        cwd: the folder in which the command runs.
        environment: variables besides this process's own.
        stop: set by another thread to end the command.

    Raises:
        ValueError: the job's folder cannot be written.
    """
    folder = JobFolder(study, job.kind, job.key)
    for _ in range(20):  # a process that only looks whether the journal is locked lets go at once
        journal = Journal(folder.path / ATTEMPTS, "specdec.job", {"key": job.key})
        with contextlib.suppress(JournalBusyError), journal:
            earlier = _attempts(journal.entries)
            if earlier and "end" not in earlier[-1]:  # it was killed
                journal.append({"end": "done" if folder.is_done() else "killed"})
            if folder.is_done():
                return JobResult("done")
            if earlier and job.kind not in RESUME:
                shutil.rmtree(folder.output, ignore_errors=True)
            begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            journal.append({"begun": begun, "host": socket.gethostname()})
            title = f"--- attempt {len(earlier) + 1}, {begun}: {shlex.join(job.command)}\n"
            supervisor = _start_supervisor(folder, job, cwd, journal, environment or {}, title)
            return _wait(folder, supervisor, journal, stop or threading.Event())
        time.sleep(0.05)
    return JobResult("busy")


def _start_supervisor(
    folder: JobFolder,
    job: Job,
    cwd: Path,
    journal: Journal,
    environment: Mapping[str, str],
    title: str,
) -> subprocess.Popen[bytes]:
    """Start the supervisor, which starts the command; both write to the job's log, behind ``title``."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name not in RANKS and not name.startswith("SLURM_")
    }
    command = [sys.executable, "-m", *job.command]
    with explained(folder.path), open_in_place(folder.path / LOG, "ab") as stream:
        stream.write(title.encode())
        stream.flush()
        return subprocess.Popen(
            [sys.executable, "-I", supervise.__file__, str(GRACE), *command],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C goes to us alone
            pass_fds=[journal.fileno()],  # the lock
            env=inherited | dict.fromkeys(THREADS, str(job.threads)) | dict(environment),
        )


def _wait(
    folder: JobFolder,
    supervisor: subprocess.Popen[bytes],
    journal: Journal,
    stop: threading.Event,
) -> JobResult:
    """Wait for a supervisor, and have it end the command if ``stop`` is set or this call is ended."""
    start = time.monotonic()
    try:
        while supervisor.poll() is None and not stop.wait(POLL):
            pass
    finally:
        stopped = supervisor.poll() is None
        assert supervisor.stdin is not None
        supervisor.stdin.close()  # upon which it ends the command
        status = supervisor.wait(GRACE + PATIENCE)
        if status < 0:  # the supervisor itself was killed
            _end_session(supervisor.pid)
        if folder.is_done():
            result = JobResult("done")
        elif stopped:
            result = JobResult("stopped")
        else:
            result = _failure(folder, status)
        seconds = round(time.monotonic() - start, 3)
        journal.append({"end": result.end, "seconds": seconds, "message": result.message})
    return result


def _failure(folder: JobFolder, status: int) -> JobResult:
    """Tell why a job is not done, from its supervisor's exit status."""
    number = -status if status < 0 else status - 128
    if number > 0:
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        hint = ": was there memory enough?" if name == "SIGKILL" else ""
        return JobResult("died", f"ended by {name}{hint}")
    if status == 0:
        return JobResult("failed", f"ended well, but made no {folder.last_file}")
    text = (folder.path / LOG).read_text(encoding="utf-8", errors="replace").strip()
    return JobResult("failed", text.splitlines()[-1].strip()[:LONGEST])


def _attempts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = []
    for entry in entries:
        if "begun" in entry:
            attempts.append({})
        attempts[-1] |= entry
    return attempts


def _end_session(session: int) -> None:
    """End what a killed supervisor has left, on Linux; the kernel has sent its command SIGTERM already."""
    until = time.monotonic() + GRACE
    # the command itself
    while any(pid == group for pid, group in _members(session)) and time.monotonic() < until:
        time.sleep(POLL)
    for group in {group for _, group in _members(session)}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _members(session: int) -> list[tuple[int, int]]:
    """Processes of a session and the process group of each, without zombies."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                members.append((int(path.parent.name), int(group)))
    return members
