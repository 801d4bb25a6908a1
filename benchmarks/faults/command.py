"""One command of specdec in a child of this process: torch, lightning and specdec are imported once, and every command
forks from there within milliseconds. What a user's own process would be it is in all that matters here: a session, a
working folder, standard streams and limits of its own.
"""

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness

LIMIT = 30.0  # seconds after which a command hangs
PATIENCE = 300.0  # for one that must succeed
POLL = 0.002
TRACEBACK = "Traceback (most recent call last)"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(harness.ROOT),
}  # fmt: skip

Inside = Callable[[], Callable[[], Any]]


def warm(cache: Path) -> None:
    """Import, in the one process from which all commands fork, whatever they import; ``cache`` is for libraries."""
    os.environ.update(
        ENVIRONMENT, HF_HOME=str(cache / "huggingface"), MPLCONFIGDIR=str(cache / "matplotlib")
    )
    import importlib

    import torch

    torch.set_num_threads(1)
    from specdec import cli

    for place, _ in cli.COMMANDS.values():
        importlib.import_module(place.partition(":")[0])
    for library in (
        "datasets",
        "matplotlib.pyplot",
        "scipy.stats",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(library)


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however."""
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


class Ended(NamedTuple):
    """How a command ended. ``status`` is negative for a signal, None where it hung; ``told`` is what its ``inside``
    left; ``peak_mb`` the growth of its resident set."""

    status: int | None
    out: str
    err: str
    seconds: float
    peak_mb: float
    told: Any

    @property
    def lines(self) -> list[str]:
        """What it said on standard error."""
        return [line for line in self.err.replace("\r", "\n").split("\n") if line.strip()]

    @property
    def error_lines(self) -> list[str]:
        """The lines from its error on: warnings may stand before it."""
        places = [number for number, line in enumerate(self.lines) if ": error: " in line]
        return self.lines[places[0] :] if places else self.lines

    @property
    def last(self) -> str:
        """The last line of it, for a report."""
        return " ".join(self.lines[-1].split())[:240] if self.lines else ""


class Command:
    """A command that runs.

    Args:
        argv: without ``specdec``.
        cwd: its working folder.
        inside: called in the forked child before the command; what that returns is called behind it, and the JSON of
            its result is ``told``.
        fresh: start an interpreter for it, as launchers of several processes need.
        memory: bytes of address space that it may take beyond this process's.
        progress: let it log; else only warnings, errors and what libraries print reach standard error.
    """

    def __init__(
        self, argv: Sequence[object], *, cwd: Path, inside: Inside | None = None, fresh: bool = False,
        memory: int | None = None, progress: bool = False,
    ) -> None:  # fmt: skip
        self.argv = [str(word) for word in argv]
        self._streams = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115  closed by wait
        self._start, self._ended = time.monotonic(), None
        self._base = _resident()
        if fresh:
            # waited for below, as a forked one is
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specdec", *self.argv], cwd=cwd, stdin=subprocess.DEVNULL,
                stdout=self._streams[0], stderr=self._streams[1], start_new_session=True,
                env=os.environ | ENVIRONMENT,
            )  # fmt: skip
            self.pid = self._process.pid
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                self._child(cwd, inside, memory, progress)
        self._handle = os.pidfd_open(self.pid)

    def _child(self, cwd: Path, inside: Inside | None, memory: int | None, progress: bool) -> None:
        status = 1
        try:
            die_with_parent()
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, handle in enumerate(
                [nothing, *(stream.fileno() for stream in self._streams[:2])]
            ):
                os.dup2(handle, number)
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w", buffering=1)
            os.chdir(cwd)
            if memory is not None:
                own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (own + memory, own + memory))
            if not progress:
                logging.disable(logging.INFO)
            from specdec import cli

            behind = None if inside is None else inside()
            try:
                status = cli.main(self.argv)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:  # noqa: BLE001  as the interpreter does
                traceback.print_exc()
            if behind is not None:
                self._streams[2].write(json.dumps(behind()).encode())
                self._streams[2].flush()
        except BaseException:  # noqa: BLE001  of this file, which a report must show
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status & 0xFF)

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._ended is None and not select.select([self._handle], [], [], 0)[0]

    def until(self, ready: Callable[[], bool], patience: float = PATIENCE) -> bool:
        """Wait for something; whether it came while the command ran."""
        end = time.monotonic() + patience
        while self.runs() and time.monotonic() < end:
            if ready():
                return True
            time.sleep(POLL)
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send its session's first process group a signal."""
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has no session of its own yet
                if self._ended is None:
                    os.kill(self.pid, number)

    def wait(self, limit: float = PATIENCE) -> Ended:
        """Its end; after ``limit`` seconds it is killed."""
        if self._ended is not None:
            return self._ended
        hung = not select.select([self._handle], [], [], limit)[0]
        if hung:
            self.kill()
        _, status, used = os.wait4(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it left
        os.close(self._handle)
        texts = []
        for stream in self._streams:
            stream.seek(0)
            texts.append(stream.read(1_000_000).decode(errors="replace"))
            stream.close()
        if hasattr(self, "_process"):
            self._process.returncode = 0  # it was waited for above
        grown = max(0.0, used.ru_maxrss * 1024 - self._base) / 1e6
        code = None if hung else os.waitstatus_to_exitcode(status)
        told = json.loads(texts[2]) if texts[2] else None
        self._ended = Ended(code, texts[0], texts[1], time.monotonic() - self._start, grown, told)
        return self._ended


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def finish(
    argv: Sequence[object], cwd: Path, fresh: bool = False, inside: Inside | None = None
) -> Ended:
    """Run a command that must succeed; ValueError, with its last words, if it does not."""
    ended = Command(argv, cwd=cwd, fresh=fresh, inside=inside).wait()
    if ended.status != 0:
        said = "\n".join(ended.lines[-12:])
        raise ValueError(f"specdec {' '.join(map(str, argv))}: status {ended.status}: {said}")
    return ended
