"""One measurement in a process of its own: builds a system, then takes one training step whenever it is told to.

``python -m benchmarks.training_step.worker JOB`` speaks lines of JSON on standard output: first what was built, then
one line for every line ``step`` on standard input; a closed input ends it. Whatever else is printed goes to standard
error. Linux only: it reads ``/proc``.
"""

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat's columns: all but idle and waiting for a disk; 7 is what a host took away


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


def machine_seconds() -> float:
    """CPU seconds that all processes of this machine have used."""
    with open("/proc/stat") as lines:
        columns = [int(x) for x in lines.readline().split()[1:]]
    return sum(columns[i] for i in BUSY) / os.sysconf("SC_CLK_TCK")


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Take one step. ``others`` is the share of the machine that other processes used meanwhile."""
    forget_peak()
    machine, own, begin = machine_seconds(), time.process_time(), time.perf_counter()
    step()
    wall, own, machine = time.perf_counter() - begin, time.process_time() - own, machine_seconds() - machine
    cores = os.cpu_count() or 1
    ticks = cores / os.sysconf("SC_CLK_TCK")  # the kernel counts whole ticks of each core
    return {
        "seconds": wall,
        "cpu_seconds": own,
        "others": max(0.0, machine - own - ticks) / (wall * cores),
        "peak_mb": resident("VmHWM"),
    }


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


def main() -> None:
    """Serve until the input ends."""
    job = Job(**json.loads(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = build(job)
    about = {
        "trainable": system.trainable,
        "products": system.products,
        "versions": {name: version(name) for name in (*system.packages, "torch")},
        **system.more,
    }
    print(json.dumps(about), file=replies)
    before: float | None = None
    for word in sys.stdin:
        assert word.strip() == "step", word
        first = before is None
        before = resident("VmRSS") if before is None else before
        reply: dict[str, Any] = {"before_mb": before, **timed(system.step)}
        if first:
            reply["losses"] = system.losses()
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
