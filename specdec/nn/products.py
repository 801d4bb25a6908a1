"""Which library multiplies float32 matrices on a CPU.

torch sends them to MKL, which takes a slow path on processors that are not Intel's; oneDNN, which torch brings too, is
about twice as fast there. The public switch to it is ``torch.set_float32_matmul_precision("medium")``: oneDNN may
then round to bfloat16 *where the processor has units for that* (AMX), and computes in full float32 where it has not.
So the switch is tried, and taken back unless products come out as exact as before.
"""

import contextlib
import functools
import time
from collections.abc import Iterator

import torch


def _exact() -> bool:
    """Whether float32 products keep float32's digits: bfloat16's eight would lose the small part of each factor."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 128, generator=generator, dtype=torch.float64).float() for _ in range(2))
    want = a.double() @ b.double()
    return bool(((a @ b).double() - want).abs().max() <= 1e-5 * want.abs().max())


def _seconds() -> float:
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return best


@contextlib.contextmanager
def fast_products() -> Iterator[str]:
    """Inside, float32 products on the CPU take the faster of the two libraries; yields its name, for the log.

    Neither loses precision. The setting before is restored at the end.
    """
    before = torch.get_float32_matmul_precision()
    if before != "highest":  # the user has chosen
        yield f"torch's setting {before!r}"
        return
    chosen = _choose()
    try:
        torch.set_float32_matmul_precision("medium" if chosen else before)
        yield "oneDNN" if chosen else "torch's default"
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def _choose() -> bool:
    """Whether oneDNN is faster and as exact; asked once, so that two runs of a process multiply alike."""
    plain = _seconds()
    torch.set_float32_matmul_precision("medium")
    try:
        return _exact() and _seconds() < 0.8 * plain
    finally:
        torch.set_float32_matmul_precision("highest")
