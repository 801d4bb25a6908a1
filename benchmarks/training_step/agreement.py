"""Whether the systems computed the same thing: cross entropy of every unroll step, on the same weights and rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.training_step.measured import Measured
from benchmarks.training_step.systems import FLOOR, FULL

TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}  # relative, at any unroll step


class Comparison(NamedTuple):
    """One system's losses beside specdec's under the same definition."""

    key: str
    with_key: str | None  # None: no specdec was measured under this definition
    rows: str
    losses: list[float]
    expected: list[float]
    worst: float  # relative


def compare(measured: Sequence[Measured]) -> list[Comparison]:
    """Every measurement with the first of specdec that counts the same rows."""
    out = []
    for one in measured:
        if one.entry.key in (FLOOR, FULL):
            continue
        alike = [m for m in measured if m.entry.system == "specdec" and m.entry.rows == one.entry.rows]
        reference = next((m for m in alike if m.entry.key != FULL), None)
        if reference is one:
            continue
        expected = [] if reference is None else reference.losses
        worst = _apart(one.losses, expected)
        with_key = None if reference is None else reference.entry.key
        out.append(Comparison(one.entry.key, with_key, one.entry.rows, one.losses, expected, worst))
    return out


def _apart(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference; NaN if there is one."""
    apart = [abs(a / b - 1) for a, b in zip(losses, expected, strict=False)]
    return math.nan if any(map(math.isnan, apart)) else max(apart, default=0.0)


def objections(measured: Sequence[Measured], dtype: str) -> list[str]:
    """Why no ratio may be given; empty where systems agree."""
    found = []
    for c in compare(measured):
        if c.with_key is None:
            found.append(f"{c.key} trains {c.rows} and was compared with nothing: measure a specdec that does")
        elif not c.worst <= TOLERANCE[dtype]:
            found.append(f"{c.key} and {c.with_key} differ by {c.worst:.1e}, more than {TOLERANCE[dtype]:.0e}")
    systems = [m for m in measured if m.entry.key != FLOOR]
    if len({m.trainable for m in systems}) > 1:
        counts = ", ".join(f"{m.entry.key} {m.trainable:,}" for m in systems)
        found.append(f"they train different numbers of parameters: {counts}")
    if len({tuple(m.digest) for m in systems}) > 1:
        found.append("they drew different weights or data from one seed: the torch versions differ")
    return found
