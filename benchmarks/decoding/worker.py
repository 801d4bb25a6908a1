"""One system in a process of its own: loads, warms up, then answers one prompt at a time.

``python -m benchmarks.decoding.worker JOB`` says what was loaded, then answers. Linux only: it reads ``/proc``.
"""

import importlib
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from benchmarks import serving


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
        """What a round costs outside the models now, in ms, on the text after the first such prompt; None where that
        is not known."""
        return None


def timed(system: System, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Answer a prompt, and then its first token alone."""
    system.before()
    raw, spent = serving.timed(lambda: system.generate(prompt, tokens))
    made = system.made(raw)
    begin = time.perf_counter()
    system.first(prompt, tokens)
    first = time.perf_counter() - begin
    if len(made.ids) != tokens:
        raise ValueError(f"{len(made.ids)} tokens came where {tokens} were asked for")
    return {"seconds": spent.seconds, "first_seconds": first, "others": spent.others, **made._asdict()}


def build(job: Job) -> System:
    """Load the system."""
    import torch

    torch.set_num_threads(job.threads)
    kind: type[System] = importlib.import_module(f"benchmarks.decoding.{job.module}").Measured
    return kind(job)


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """What was loaded, and what answers prompts."""
    begin = time.perf_counter()
    system = build(Job(**job))
    import torch

    about = {
        "start_seconds": time.perf_counter() - begin,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in (*system.packages, "torch")},
        **system.more,
    }

    def answer(ask: Any) -> Any:
        if ask["do"] == "generate":
            return timed(system, ask["prompt"], ask["tokens"])
        assert ask["do"] == "accept", ask
        return system.accept(ask["prompt"], ask["tokens"])

    return about, answer


if __name__ == "__main__":
    serving.serve(start)
