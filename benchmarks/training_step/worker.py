"""One measurement in a process of its own: builds a system, then takes one training step whenever it is told to.

``python -m benchmarks.training_step.worker JOB`` says what was built, then answers every ``"step"``. Linux only: it
reads ``/proc``.
"""

import ctypes
import importlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import serving


class Job(NamedTuple):
    """What to build."""

    module: str  # of this package
    options: list[str]
    workload: str
    dtype: str  # float32 or bfloat16
    mask: str
    threads: int
    seed: int


class System(NamedTuple):
    """A trainer, ready for its first step."""

    step: Callable[[], Any]  # forward, backward, clipping, optimizer
    losses: Callable[[], list[float]]  # of the last step, by unroll step: cross entropy in nats per row that counts
    trainable: int  # parameters
    packages: tuple[str, ...]
    products: str  # which library multiplies float32 matrices
    more: dict[str, Any]  # what only this system knows


def resident(field: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let the peak of the resident set start anew from what it is now."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Take one step: what it took, and the peak of the resident set."""
    forget_peak()
    _, spent = serving.timed(step)
    return {**spent._asdict(), "peak_mb": resident("VmHWM")}


def build(job: Job) -> System:
    """Make the system, and leave no memory behind that its steps could take without growing."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx  # in every worker, for it takes memory, and some steps use it

    torch.set_num_threads(job.threads)
    system: System = importlib.import_module(f"benchmarks.training_step.{job.module}").build(job)
    # no garbage collection here: by the other heap that it leaves, one peer's growth rose by two fifths
    ctypes.CDLL(None).malloc_trim(0)
    return system


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]:
    """What was built, and what takes its steps."""
    system = build(Job(**job))
    about = {
        "trainable": system.trainable,
        "products": system.products,
        "versions": {name: version(name) for name in (*system.packages, "torch")},
        **system.more,
    }
    before: float | None = None

    def step(word: Any) -> dict[str, Any]:
        nonlocal before
        assert word == "step", word
        first = before is None
        before = resident("VmRSS") if before is None else before
        reply: dict[str, Any] = {"before_mb": before, **timed(system.step)}
        if first:
            reply["losses"] = system.losses()
        return reply

    return about, step


if __name__ == "__main__":
    serving.serve(start)
