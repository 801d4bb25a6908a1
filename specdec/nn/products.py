"""Which library multiplies float32 matrices on a CPU.

torch sends them to MKL, which takes a slow path on processors that are not Intel's; oneDNN, which torch brings too, is
about twice as fast there. The processor's maker decides, not a clock: what is measured depends on whatever else the
machine does, and two runs that chose otherwise would round otherwise. The public switch to it is
``torch.set_float32_matmul_precision("medium")``: oneDNN may then round to bfloat16 *where the processor has units for
that* (AMX), and computes in full float32 where it has not. So the switch is tried, and taken back unless products come
out as exact as before.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

_switched = False  # whether the setting is fast_products' own


def _exact() -> bool:
    """Whether float32 products keep float32's digits: bfloat16's eight would lose the small part of each factor."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 128, generator=generator, dtype=torch.float64).float() for _ in range(2))
    want = a.double() @ b.double()
    return bool(((a @ b).double() - want).abs().max() <= 1e-5 * want.abs().max())


def _maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor, as it says itself: ``GenuineIntel``, ``AuthenticAMD``; nothing where it does not."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


@contextlib.contextmanager
def fast_products() -> Iterator[str]:
    """Inside, float32 products on the CPU take oneDNN where MKL is slow; yields the library's name, for the log.

    Neither loses precision. The setting before is restored at the end.
    """
    global _switched
    before = torch.get_float32_matmul_precision()
    if before != "highest":  # the user has chosen, or this function further out
        yield f"torch's setting {before!r}"
        return
    chosen = _choose()
    try:
        torch.set_float32_matmul_precision("medium" if chosen else before)
        _switched = chosen
        yield "oneDNN" if chosen else "torch's default"
    finally:
        torch.set_float32_matmul_precision(before)
        _switched = False


@contextlib.contextmanager
def small_products() -> Iterator[None]:
    """Inside, what :func:`fast_products` chose further out is undone: of small matrices oneDNN's call costs more than
    MKL's slow path."""
    if not _switched:
        yield
        return
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


@functools.cache
def _choose() -> bool:
    """Whether MKL takes its slow path here and oneDNN is as exact; the same in every process of one machine type."""
    maker = _maker()
    if not torch.backends.mkl.is_available() or not maker or "Intel" in maker:
        return False
    torch.set_float32_matmul_precision("medium")
    try:
        return _exact()
    finally:
        torch.set_float32_matmul_precision("highest")
