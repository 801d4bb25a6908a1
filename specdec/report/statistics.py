"""Intervals over prompts: Student's t of statistics of sums, their error by the jackknife.

Passes of one prompt, and its turns, are alike; prompts are what is independent. So every statistic is a function of
sums over prompts, and whole prompts are left out in turn.

Legend: P prompts, F sums kept of each.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

HOW = "95 % Student's t over prompts, error by the jackknife"
# of tests
ALPHA = 0.05
POWER = 0.8
ANY = (-math.inf, math.inf)
SHARE = (0.0, 1.0)
POSITIVE = (0.0, math.inf)
LENGTH = (1.0, math.inf)

Array = npt.NDArray[np.float64]
Range = tuple[float, float]
"""The least and the most that a statistic can be; an interval ends there."""
Statistic = Callable[[Array], Array]
"""From sums, (..., F), to a number each, (...)."""
Measured = dict[str, float | None]
"""``mean``, ``low`` and ``high``; None where they are not defined."""


class Interval(NamedTuple):
    """A mean with its 95 % interval; no interval (None) from fewer than two prompts."""

    mean: float
    low: float | None
    high: float | None


def ratio(sums: Array) -> Array:
    """The first sum over the second: a mean weighted by the second."""
    return sums[..., 0] / sums[..., 1]


def over(sums: Array) -> Array:
    """A mean over another: the quotient of two ratios."""
    return ratio(sums[..., :2]) / ratio(sums[..., 2:])


def less(sums: Array) -> Array:
    """A mean less another: the difference of two ratios."""
    return ratio(sums[..., :2]) - ratio(sums[..., 2:])


def possible(unit: str) -> Range:
    """Return the range of a figure of this unit."""
    if unit.startswith("share"):
        return SHARE
    if unit.startswith("difference"):
        return (-1.0, 1.0) if "of share" in unit else ANY
    if unit.startswith("tokens per target pass"):
        return LENGTH
    return (-1.0, 1.0) if unit == "cosine" else POSITIVE


def interval(sums_PF: Array, of: Statistic = ratio, bounds: Range = ANY) -> Interval | None:
    """A statistic of all prompts' sums with its 95 % interval; None without a prompt.

    The interval is Student's t with P - 1 degrees of freedom; the standard error is the jackknife's (Tukey 1958; Efron
    1982, https://doi.org/10.1137/1.9781611970319), to first order that of the linearized statistic. A bootstrap takes
    the spread of few prompts for the truth: ``benchmarks/coverage.py`` has both. There is no interval
    where the statistic is not defined without one of the prompts.
    """
    prompts = len(sums_PF)
    total_F = sums_PF.sum(0)
    if not prompts:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(of(total_F))
        without_P = of(total_F - sums_PF)
    if prompts < 2 or not np.isfinite(without_P).all():
        return Interval(mean, None, None)
    error = math.sqrt((prompts - 1) * float(without_P.var()))
    return bounded(mean, float(stdtrit(prompts - 1, 1 - ALPHA / 2)) * error, bounds)


def bounded(mean: float, half: float, bounds: Range) -> Interval:
    """Return the interval from mean - half to mean + half, cut at the bounds; it always holds the mean.

    Of a share the interval lies in [0, 1]. What is cut off holds no value that a share can have, so the interval holds
    the truth exactly as often as before. Wilson's interval is no alternative: it takes passes for independent, and
    those of one prompt are not.
    """
    low = max(mean - half, bounds[0])
    high = min(mean + half, bounds[1])
    return Interval(mean, min(low, mean), max(high, mean))


def measured(sums_PC: Array, of: Statistic = ratio, bounds: Range = ANY) -> Measured:
    """A statistic of sums and weights in turn with its interval; prompts whose weights are all zero say nothing."""
    has_weight_P = (sums_PC[:, 1::2] > 0).any(1)
    figure = interval(sums_PC[has_weight_P], of, bounds)
    if figure is None or not np.isfinite(figure.mean):
        return {"mean": None, "low": None, "high": None}
    return figure._asdict()
