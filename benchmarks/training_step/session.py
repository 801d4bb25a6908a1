"""The parent of the workers: starts them, and gives one of them at a time the word to take one step."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import check_memory
from benchmarks.process import Process
from benchmarks.training_step.measured import Measured
from benchmarks.training_step.systems import Entry, Group
from benchmarks.training_step.worker import Job

NEEDS_GB = {"T": 1.0, "S": 2.5, "M": 5.0}  # free memory to start a worker with


class Settings(NamedTuple):
    """Of a whole run."""

    python: str
    peers: str | None  # the other environment's python
    threads: int
    warm_up: int
    steps: int
    seed: int


class Worker(Process):
    """Builds one system and waits."""

    def __init__(self, python: str, entry: Entry, job: Job, log: Path) -> None:
        self.entry = entry
        super().__init__(python, entry.key, "benchmarks.training_step.worker", job, log)

    def step(self) -> dict[str, Any]:
        """One training step."""
        answer: dict[str, Any] = self.ask("step")
        return answer


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
            check_memory(f"{entry.key} on {group.workload}", NEEDS_GB[group.workload])
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
