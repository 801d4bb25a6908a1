"""The parent of the workers: starts them, and gives one of them at a time a prompt."""

import contextlib
import json
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.decoding.measured import Measured
from benchmarks.decoding.prompts import Prompts
from benchmarks.decoding.systems import Entry
from benchmarks.decoding.worker import Job
from benchmarks.training_step.session import PATIENCE, environment, free_gb

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


class Worker:
    """A process that loads one system and waits.

    Raises:
        ValueError: it could not be started, died, or gave no answer in time; the message ends with its last words.
    """

    def __init__(self, python: str, key: str, job: Job, log: Path) -> None:
        self.key, self.log = key, log
        command = [python, "-m", "benchmarks.decoding.worker", json.dumps(job._asdict())]
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
            raise ValueError(f"{key}: {python} cannot be run: {error.strerror}") from error
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, prompt: list[int], tokens: int) -> Any:
        """An answer to a prompt, or what a round of it costs outside the models."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it better
            self.process.stdin.write(json.dumps({"do": do, "prompt": prompt, "tokens": tokens}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise ValueError(f"{self.key}: no answer for {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            words = [text.strip() for text in self.log.read_text().splitlines() if text.strip()]
            raise ValueError(f"{self.key} ended: {words[-1] if words else 'it said nothing'}")
        return json.loads(line)


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
            if free_gb() < (needs := NEEDS_GB.get(entry.module, NEEDS)):
                raise ValueError(
                    f"{free_gb():.1f} GB of memory are free, {entry.key} wants {needs} GB: "
                    "measure fewer --systems at once"
                )
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
                worker.ask("generate", prompts.warm_up, settings.tokens)
                one.about.setdefault("first_text_seconds", time.perf_counter() - begin)
            out.append(one)
            workers.append(worker)
        for each in prompts.sets:
            for repeat, prompt, i in turns(len(each.prompts), len(workers), settings.repeats):
                if i == (prompt + repeat) % len(workers):
                    told(f"{each.name} prompts, {prompt + 1} of {len(each.prompts)}")
                time.sleep(PAUSE)
                answer = workers[i].ask("generate", each.prompts[prompt], settings.tokens)
                out[i].add(each.name, prompt, answer)
        for one, worker in zip(out, workers, strict=True):
            if one.entry.ours:
                told(f"{one.entry.key}: what a round costs outside the models")
                one.accept = worker.ask("accept", prompts.sets[0].prompts[0], settings.tokens)
    return out
