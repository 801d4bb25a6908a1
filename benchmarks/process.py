"""A process that measures, seen from its parent: started with a job, then asked one thing at a time."""

import contextlib
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800.0  # seconds for one answer: the first may compile


def environment(threads: int) -> dict[str, str]:
    """The same for everyone: so many threads, no network, no GPU."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }


class Process:
    """``python -m MODULE JOB``, as :func:`benchmarks.serving.serve` runs it; ``about`` is what it says first.

    Args:
        name: for messages.
        job: a named tuple with ``threads``.
        log: a file for what it prints.

    Raises:
        ValueError: it could not be started, died, or gave no answer in time; the message ends with its last words.
    """

    def __init__(self, python: str, name: str, module: str, job: Any, log: Path) -> None:
        self.name, self.log = name, log
        command = [python, "-m", module, json.dumps(job._asdict())]
        try:
            with log.open("w") as errors:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment(job.threads),
                    text=True,
                )
        except OSError as error:
            raise ValueError(f"{name}: {python} cannot be run: {error.strerror}") from error
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, question: Any) -> Any:
        """Its answer; both are JSON."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it better
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise ValueError(f"{self.name}: no answer for {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            words = [text.strip() for text in self.log.read_text().splitlines() if text.strip()]
            raise ValueError(f"{self.name} ended: {words[-1] if words else 'it said nothing'}")
        return json.loads(line)
