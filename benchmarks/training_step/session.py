"""The parent of the workers: starts them, and gives one of them at a time the word to take one step."""

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.training_step.measured import Measured
from benchmarks.training_step.systems import Entry, Group
from benchmarks.training_step.worker import Job

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 1800.0  # seconds for one answer: the first step may compile
NEEDS_GB = {"T": 1.0, "S": 2.5, "M": 5.0}  # free memory to start a worker with


class Settings(NamedTuple):
    """Of a whole run."""

    python: str
    peers: str | None  # the other environment's python
    threads: int
    warm_up: int
    steps: int
    seed: int


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


class Worker:
    """A process that builds one system and waits.

    Raises:
        ValueError: it could not be started, died, or gave no answer in time; the message ends with its last words.
    """

    def __init__(self, python: str, entry: Entry, job: Job, log: Path) -> None:
        self.entry, self.log = entry, log
        command = [python, "-m", "benchmarks.training_step.worker", json.dumps(job._asdict())]
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
            raise ValueError(f"{entry.key}: {python} cannot be run: {error.strerror}") from error
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def step(self) -> dict[str, Any]:
        """One training step."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it better
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise ValueError(f"{self.entry.key}: no answer for {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            words = [text.strip() for text in self.log.read_text().splitlines() if text.strip()]
            raise ValueError(f"{self.entry.key} ended: {words[-1] if words else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def free_gb() -> float:
    """Memory that a new process could take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9


def run(group: Group, settings: Settings, logs: Path, told: Callable[[list[Measured], str], None]) -> list[Measured]:
    """Measure a group: all of its workers are alive, each takes a step in turn, and the turn's start moves on.

    Args:
        logs: a directory for what the workers print.
        told: called with what is known and what happens next.
    """
    out: list[Measured] = []
    with contextlib.ExitStack() as alive:
        workers = []
        for entry in group.entries:
            if free_gb() < NEEDS_GB[group.workload]:
                raise ValueError(
                    f"{free_gb():.1f} GB of memory are free, {entry.key} on {group.workload} wants "
                    f"{NEEDS_GB[group.workload]} GB: measure fewer --systems at once"
                )
            told(out, f"building {entry.key}")
            mask = group.mask_of(entry)
            job = Job(
                entry.module, list(entry.options), group.workload, group.dtype, mask, settings.threads, settings.seed
            )
            python = settings.peers if entry.peer else settings.python
            assert python is not None
            worker = Worker(python, entry, job, logs / f"{group.workload}-{group.dtype}-{group.mask}-{entry.key}.log")
            alive.callback(worker.close)
            one = Measured(entry, worker.about)
            for n in range(settings.warm_up):
                told(out, f"warming up {entry.key}, step {n + 1} of {settings.warm_up}")
                answer = worker.step()
                if n == 0:
                    one.losses = answer.pop("losses")
                one.warm_up.append(answer)
            out.append(one)
            workers.append(worker)
        for n in range(settings.steps):
            for turn in range(len(workers)):
                i = (turn + n) % len(workers)
                told(out, f"step {n + 1} of {settings.steps}: {workers[i].entry.key}")
                out[i].steps.append(workers[i].step())
    return out
