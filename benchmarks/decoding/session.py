"""The parent of the workers: starts them, and gives one of them at a time a prompt."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.decoding.measured import Measured
from benchmarks.decoding.prompts import Prompts
from benchmarks.decoding.systems import Entry
from benchmarks.decoding.worker import Job
from benchmarks.machine import check_memory
from benchmarks.process import Process

NEEDS_GB = {"of_vllm": 3.0}  # free memory to start a worker with
NEEDS = 2.0  # the others'
PAUSE = 0.05  # seconds between turns, so that the last one's threads have stopped to wait for work


class Settings(NamedTuple):
    """Of a whole run."""

    python: str
    vllm: str | None
    threads: int
    tokens: int
    warm_up: int
    repeats: int


class Worker(Process):
    """Loads one system and waits."""

    def __init__(self, python: str, key: str, job: Job, log: Path) -> None:
        super().__init__(python, key, "benchmarks.decoding.worker", job, log)

    def do(self, what: str, prompt: list[int], tokens: int) -> Any:
        """An answer to a prompt (``generate``), or what a round of it costs outside the models (``accept``)."""
        return self.ask({"do": what, "prompt": prompt, "tokens": tokens})


def turns(prompts: int, systems: int, repeats: int) -> Iterator[tuple[int, int, int]]:
    """(repeat, prompt, system): every prompt goes to every system before the next, and the first one moves on."""
    for repeat in range(repeats):
        for prompt in range(prompts):
            for turn in range(systems):
                yield repeat, prompt, (turn + prompt + repeat) % systems


def run(
    entries: Sequence[Entry],
    prompts: Prompts,
    job: Callable[[Entry], Job],
    settings: Settings,
    logs: Path,
    told: Callable[[str], None],
) -> list[Measured]:
    """Measure systems of one dtype: all are alive, and one at a time works.

    Args:
        job: what a system is to load.
        logs: a directory for what the workers print.
        told: called with what happens next.
    """
    out: list[Measured] = []
    with contextlib.ExitStack() as alive:
        workers = []
        for number, entry in enumerate(entries):
            check_memory(entry.key, NEEDS_GB.get(entry.module, NEEDS))
            where = f"{number + 1} of {len(entries)}"
            told(f"{where}: starting {entry.key}")
            python = settings.vllm if entry.module == "of_vllm" else settings.python
            assert python is not None
            todo = job(entry)
            worker = Worker(python, entry.key, todo, logs / f"{todo.dtype}-{entry.key}.log")
            alive.callback(worker.close)
            told(f"{where}: warming up {entry.key}, which may compile")
            begin = time.perf_counter()
            one = Measured(entry, worker.about)
            for _ in range(settings.warm_up):
                worker.do("generate", prompts.warm_up, settings.tokens)
                one.about.setdefault("first_text_seconds", time.perf_counter() - begin)
            if entry.ours:
                worker.do("accept", prompts.warm_up, settings.tokens)  # compiles
            out.append(one)
            workers.append(worker)
        for each in prompts.sets:
            for repeat, prompt, i in turns(len(each.prompts), len(workers), settings.repeats):
                if i == (prompt + repeat) % len(workers):
                    told(f"{each.name} prompts, {prompt + 1} of {len(each.prompts)}")
                time.sleep(PAUSE)
                answer = workers[i].do("generate", each.prompts[prompt], settings.tokens)
                if entries[i].ours:
                    answer |= workers[i].do("accept", prompts.warm_up, settings.tokens) or {}
                out[i].add(each.name, prompt, answer)
    return out
