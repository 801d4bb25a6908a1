"""Intervals over prompts: bootstrap of ratios of sums.

Passes of one prompt, and its turns, are alike; prompts are what is independent. So every statistic is a function of
sums over prompts, and whole prompts are drawn.

Legend: P prompts, F sums kept of each, R resamples.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 0
METHOD = "95 % BCa bootstrap over prompts"
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the bootstrap, whatever the number of prompts

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""From sums, (..., F), to a number each, (...)."""


class Interval(NamedTuple):
    """A mean with its 95 % interval; no interval (None) from fewer than two prompts."""

    mean: float
    low: float | None
    high: float | None


def ratio(sums: Array) -> Array:
    """The first sum over the second: a mean weighted by the second."""
    return sums[..., 0] / sums[..., 1]


def interval(sums_PF: Array, of: Statistic = ratio, seed: int = SEED, resamples: int = RESAMPLES) -> Interval | None:
    """A statistic of all prompts' sums with its 95 % interval; None without a prompt.

    The interval is BCa (Efron 1987, https://www.jstor.org/stable/2289144): percentiles of the resamples,
    moved for their bias and their skewness. Acceptance differs from prompt to prompt with a long tail; on simulated
    prompts of that kind BCa misses the truth less often than plain percentiles.
    """
    prompts, total_F = len(sums_PF), sums_PF.sum(0)
    if not prompts:
        return None
    mean = float(of(total_F))
    if prompts < 2:
        return Interval(mean, None, None)
    drawn_R, left_out_P = of(resampled(sums_PF, seed, resamples)), of(total_F - sums_PF)
    low, high = np.quantile(drawn_R, _levels(mean, drawn_R, left_out_P))
    return Interval(mean, float(low), float(high))


def resampled(sums_PF: Array, seed: int, resamples: int) -> Array:
    """Sums over P prompts drawn with replacement, (R, F)."""
    generator, prompts = np.random.default_rng(seed), len(sums_PF)
    rows = max(1, _DRAWS_AT_ONCE // prompts)
    out: list[Array] = []
    for start in range(0, resamples, rows):
        chosen_RP = generator.integers(prompts, size=(min(rows, resamples - start), prompts))
        chosen_RP += prompts * np.arange(len(chosen_RP))[:, None]
        times_RP = np.bincount(chosen_RP.ravel(), minlength=chosen_RP.size).reshape(chosen_RP.shape)
        out.append(times_RP @ sums_PF)
    return np.concatenate(out)


def _levels(mean: float, drawn_R: Array, left_out_P: Array) -> list[float]:
    """The quantiles that BCa reads off instead of 2.5 and 97.5 %."""
    normal, resamples = NormalDist(), len(drawn_R)
    below = ((drawn_R < mean).sum() + (drawn_R == mean).sum() / 2) / resamples
    bias = normal.inv_cdf(min(max(float(below), 1 / (resamples + 1)), resamples / (resamples + 1)))
    away_P = left_out_P.mean() - left_out_P
    spread = float((away_P**2).sum()) ** 1.5
    skew = float((away_P**3).sum()) / (6 * spread) if spread else 0.0  # the «acceleration»; at most 1 / 6
    moved = [bias + normal.inv_cdf(level) for level in (0.025, 0.975)]
    return [normal.cdf(bias + z / (1 - skew * z)) for z in moved]
