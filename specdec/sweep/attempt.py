"""One attempt at a job, as a process under a keeper (:mod:`specdec.keeper`), started by :mod:`specdec.sweep.worker`.

``python -m specdec.sweep.attempt FOLDER MODULE GRACE`` runs ``python -m MODULE`` with the job's arguments, and nothing
where the work is there already. The command has the job's threads, dies with this process, and inherits the lock, so
that nobody else takes the job before all of it is gone. SIGINT, SIGTERM and SIGHUP are passed on to it. Should the
keeper be killed, its part is done here: SIGTERM to the command, and after the grace the process group is ended.
"""

import contextlib
import datetime
import math
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

from specdec.keeper import with_parent
from specdec.serving import said
from specdec.sweep.job import Job
from specdec.sweep.state import Attempt, End, Folder, State, now

BUSY = 75  # the exit status where somebody else has the job: EX_TEMPFAIL of sysexits.h
PATIENCE = 1.0  # seconds for the lock; whoever only looks whether it is held lets go at once
BEAT = 1.0  # seconds between touches of the lock
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
)  # of a launcher around the sweep: a job is a command of its own


class Ran(NamedTuple):
    """A command that has ended."""

    status: int
    """Of its exit, 128 and the signal's number if one ended it."""
    asked: int | None
    """The first signal that was passed on."""
    seconds: float
    peak_memory_bytes: int


def main(argv: Sequence[str]) -> int:
    """Run it; 0 if the work is there, 1 if the command failed, 75 if somebody else has the job, 128 and a signal's
    number if this process was asked to end or the command ended by one.

    Raises:
        ValueError: there is no such job, or its folder may not be written.
    """
    folder, module, kept = Folder(Path(argv[0])), argv[1], _Kept(float(argv[2]))
    job, end = folder.job(), time.monotonic() + PATIENCE
    with _woken() as pipe:
        while True:
            with folder.locked() as lock:
                if lock is not None:
                    status = _attempt(folder, job, module, lock, pipe, kept)
                    kept.end()
                    return status
            if time.monotonic() > end:
                return BUSY
            time.sleep(BEAT / 20)


class _Kept:
    """Whether the keeper lives, and what is to be done if not."""

    def __init__(self, grace: float) -> None:
        self.grace, self.keeper, self.since = grace, os.getppid(), math.inf

    def is_gone(self) -> bool:
        """Whether it is; if it has been for the grace, this ends all of it, this process included."""
        if os.getppid() == self.keeper:
            return False
        self.since = min(self.since, time.monotonic())
        if time.monotonic() - self.since > self.grace:
            self.end()
        return True

    def end(self) -> None:
        """End what is left of the process group if the keeper is not there to do it."""
        if os.getppid() != self.keeper and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)


def settle(folder: Folder, job: Job) -> None:
    """Write down how killed attempts ended, as far as nobody has; nothing while somebody works on the job."""
    with folder.locked() as lock:
        if lock is not None:
            _settle(folder, job)


def _settle(folder: Folder, job: Job) -> list[Attempt]:
    attempts = folder.attempts()
    for one in attempts:
        if one.end is None:
            lived = (folder.last_alive() - datetime.datetime.fromisoformat(one.begun)).total_seconds()
            end: End = "done" if one is attempts[-1] and folder.is_done(job) else "killed"
            folder.note(one.number, end=end, seconds=round(max(0.0, lived), 3))
    found, state = folder.attempts(), folder.state()
    if found and folder.is_done(job) and (state is None or state.state != "done"):
        last = found[-1]
        peak = None if state is None else state.peak_memory_bytes
        ended = folder.last_alive().isoformat(timespec="milliseconds")
        folder.write(
            State(
                state="done", attempt=last.number, begun=last.begun, host=last.host, pid=last.pid, ended=ended,
                seconds=_seconds(found), peak_memory_bytes=peak,
            )
        )  # fmt: skip
    return found


def _seconds(attempts: Sequence[Attempt]) -> float:
    return round(sum(one.seconds or 0.0 for one in attempts), 3)


def _attempt(folder: Folder, job: Job, module: str, lock: IO, pipe: int, kept: _Kept) -> int:
    before, last = _settle(folder, job), folder.state()
    if folder.is_done(job):
        return 0
    number = 1 + max((one.number for one in before), default=0)
    state = State(
        state="running", attempt=number, begun=now(), host=socket.gethostname(), pid=os.getpid(),
        seconds=_seconds(before), peak_memory_bytes=None if last is None else last.peak_memory_bytes,
    )  # fmt: skip
    folder.note(number, begun=state.begun, host=state.host, pid=state.pid)
    folder.write(state)
    os.utime(lock.fileno())
    refused = _clear(folder, job, begun=bool(before))
    if refused:
        ran = Ran(2, None, 0.0, 0)
    else:
        sys.stdout.write(f"--- attempt {number}, {state.begun}, {state.host}: {module} {shlex.join(job.command)}\n")
        sys.stdout.flush()
        ran = _run([sys.executable, "-m", module, *job.command], job.threads, lock, pipe, kept)
    name: Literal["done", "failed", "stopped"] = (
        "done" if folder.is_done(job) else "failed" if ran.asked is None else "stopped"
    )
    end: End = "died" if name == "failed" and ran.status > 128 else name
    folder.note(number, end=end, seconds=round(ran.seconds, 3), status=ran.status)
    folder.write(
        State(
            state=name, attempt=number, begun=state.begun, host=state.host, pid=state.pid,
            ended=now(), seconds=round((state.seconds or 0.0) + ran.seconds, 3), status=ran.status,
            message=refused or _reason(folder, job, ran) if name == "failed" else None,
            peak_memory_bytes=max(state.peak_memory_bytes or 0, ran.peak_memory_bytes),
        )
    )  # fmt: skip
    if end == "done":
        return 0
    if ran.asked is not None:
        return 128 + ran.asked
    return ran.status if end == "died" else 1


def _clear(folder: Folder, job: Job, begun: bool) -> str:
    """Remove what an earlier attempt left of a job that cannot go on with it; why not, else nothing."""
    output = folder.output(job)
    if job.resumes or not output.exists():
        return ""
    if not begun:
        return f"{output} exists already, and no attempt at this job has made it: remove it, or choose another study"
    try:
        shutil.rmtree(output)
    except OSError as error:
        return f"{error.filename or output}: cannot be removed: {error.strerror}"
    return ""


def _reason(folder: Folder, job: Job, ran: Ran) -> str:
    if ran.status > 128:
        hint = ": was there memory enough?" if ran.status == 128 + signal.SIGKILL else ""
        return f"ended by {_name(ran.status - 128)}{hint}"
    if ran.status == 0:
        return f"ended well, but made no {job.directory}/{job.done}"
    return said.last(folder.log)[: said.LONGEST]


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextlib.contextmanager
def _woken() -> Iterator[int]:
    """Signals, and the ends of children, as bytes of a pipe."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    old = {number: signal.signal(number, lambda *_: None) for number in (*SIGNALS, signal.SIGCHLD)}
    try:
        yield read
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _run(command: Sequence[str], threads: int, lock: IO, pipe: int, kept: _Kept) -> Ran:
    """Run a command to its end; signals are passed on, also those that came before."""
    environment = {name: text for name, text in os.environ.items() if name not in RANKS and name[:6] != "SLURM_"}
    begin, asked = time.monotonic(), None
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment | dict.fromkeys(THREADS, str(threads)),
        preexec_fn=with_parent(signal.SIGKILL),
        pass_fds=[lock.fileno()],
    )
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        woken = select.select([pipe], [], [], BEAT)[0]
        for number in os.read(pipe, 64) if woken else b"":
            if number in SIGNALS:
                asked = asked or number
                os.kill(child.pid, number)  # not waited for yet: the number is still its own
        if kept.is_gone() and asked is None:  # where the kernel does not tell
            asked = signal.SIGTERM
            os.kill(child.pid, asked)
        os.utime(lock.fileno())
    child.returncode = os.waitstatus_to_exitcode(status)
    exited = child.returncode if child.returncode >= 0 else 128 - child.returncode
    scale = 1 if sys.platform == "darwin" else 1024
    return Ran(exited, asked, time.monotonic() - begin, usage.ru_maxrss * scale)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"{error}")
