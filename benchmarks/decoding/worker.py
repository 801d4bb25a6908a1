"""One system in a process of its own: loads, warms up, then answers one prompt at a time.

``python -m benchmarks.decoding.worker JOB`` speaks lines of JSON: first what was loaded, then an answer to every line
of standard input; a closed input ends it. Whatever else is printed goes to standard error. Linux only: it reads
``/proc``.
"""

import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any, NamedTuple

from benchmarks.training_step.worker import machine_seconds


class Job(NamedTuple):
    """What to load."""

    module: str  # of this package
    options: dict[str, Any]
    dtype: str
    threads: int
    longest: int  # tokens of the longest text, prompt and answer
    target: str  # a directory in Hugging Face's format, in the dtype
    drafter: str | None  # as specdec keeps it
    served: str | None  # as vLLM reads it
    method: str | None  # vLLM's name for it
    assistant: str | None


class Made(NamedTuple):
    """A text."""

    ids: list[int]  # new tokens
    passes: int  # of the target; specdec's and vLLM's without the prompt's
    committed: int  # tokens that these passes gave
    prompt_ms: float | None = None  # of that call; None where a system does not say
    draft_ms: float | None = None  # in all
    verify_ms: float | None = None


class System:
    """Base: greedy decoding of one text at a time; made from a :class:`Job`."""

    packages: tuple[str, ...] = ()

    def __init__(self, job: Job) -> None:
        self.more: dict[str, Any] = {}
        """What only this system knows."""

    def before(self) -> None:
        """Called before a text; not timed."""

    def generate(self, prompt: list[int], tokens: int) -> Any:
        """Exactly so many tokens, whatever they are; timed."""
        raise TypeError(f"{type(self).__name__} must generate")

    def made(self, raw: Any) -> Made:
        """What :meth:`generate` returned; not timed."""
        raise TypeError(f"{type(self).__name__} must say what it made")

    def first(self, prompt: list[int], tokens: int) -> None:
        """As far as the first of so many tokens; timed."""
        self.generate(prompt, 1)

    def accept(self, prompt: list[int], tokens: int) -> dict[str, float] | None:
        """What a round costs outside the models, in ms; None where that is not known."""
        return None


def others(cpu_seconds: float, machine: float, wall: float) -> float:
    """The share of the machine that other processes used meanwhile."""
    cores = os.cpu_count() or 1
    ticks = cores / os.sysconf("SC_CLK_TCK")  # the kernel counts whole ticks of each core
    return max(0.0, machine - cpu_seconds - ticks) / (wall * cores)


def timed(system: System, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Answer a prompt, and then its first token alone."""
    system.before()
    machine, cpu, begin = machine_seconds(), time.process_time(), time.perf_counter()
    raw = system.generate(prompt, tokens)
    wall, cpu, machine = time.perf_counter() - begin, time.process_time() - cpu, machine_seconds() - machine
    made = system.made(raw)
    begin = time.perf_counter()
    system.first(prompt, tokens)
    first = time.perf_counter() - begin
    if len(made.ids) != tokens:
        raise ValueError(f"{len(made.ids)} tokens came where {tokens} were asked for")
    return {"seconds": wall, "first_seconds": first, "others": others(cpu, machine, wall), **made._asdict()}


def build(job: Job) -> System:
    """Load the system."""
    import torch

    torch.set_num_threads(job.threads)
    kind: type[System] = importlib.import_module(f"benchmarks.decoding.{job.module}").Measured
    return kind(job)


def main() -> None:
    """Serve until the input ends."""
    begin = time.perf_counter()
    job = Job(**json.loads(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = build(job)
    import torch

    about = {
        "start_seconds": time.perf_counter() - begin,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in (*system.packages, "torch")},
        **system.more,
    }
    print(json.dumps(about), file=replies)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "generate":
            answer = timed(system, ask["prompt"], ask["tokens"])
        else:
            assert ask["do"] == "accept", ask
            answer = system.accept(ask["prompt"], ask["tokens"])
        print(json.dumps(answer), file=replies)


if __name__ == "__main__":
    main()
