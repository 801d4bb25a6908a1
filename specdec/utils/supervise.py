"""Runs a command in a separate process group, and ends all of it once standard input ends.

Whoever started this closes its end to stop the command; if it is killed, the kernel closes it, so that no server and no
training is left alone with the machine's memory. What is written there first is another grace. A separate script
that uses only the standard library: ``python supervise.py GRACE COMMAND ...``.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

POLL = 0.05  # seconds
SETTLE = 2.0  # seconds for killed processes to be gone
PR_SET_PDEATHSIG = 1  # of prctl(2)
NOT_RUN = 127  # the exit status of what could not be started, as a shell has it


def run_supervised(grace: float, command: list[str]) -> int:
    """Run a command to its end, or until standard input ends, with ``grace`` seconds between SIGTERM to the command and
    SIGKILL to its process group; its exit status, 128 and the signal's number if one ended it."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ignoring them would be inherited
        signal.signal(number, lambda number, frame: signals.append(number))
    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def die_with_parent() -> None:
        """In the child: SIGTERM when its parent dies, however; on Linux only."""
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # it has died meanwhile
                os._exit(NOT_RUN)

    try:
        # close_fds: the child inherits what this process was given, such as an open file with a lock
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            close_fds=False,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
        return NOT_RUN
    closed: list[int] = []
    while _runs(child.pid) and not signals and not closed:
        closed = select.select([0], [], [], POLL)[0]
    if _runs(child.pid):
        if closed:
            grace = float(os.read(0, 32) or grace)
        os.kill(child.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while _runs(child.pid) and time.monotonic() < end:
            time.sleep(POLL)
    # before it is waited for: until then its number, the group's, is given to nobody else
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    end = time.monotonic() + SETTLE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # until all of the group are gone, but for zombies, which hold nothing
        while time.monotonic() < end:
            os.killpg(child.pid, 0)
            time.sleep(POLL)
    return status if status >= 0 else 128 - status


def _runs(pid: int) -> bool:
    """Whether a child runs; it is not waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


if __name__ == "__main__":
    sys.exit(run_supervised(float(sys.argv[1]), sys.argv[2:]))
