"""Intervals over prompts: BCa bootstraps of statistics of sums.

Passes of one prompt, and its turns, are alike; prompts are what is independent. So every statistic is a function of
sums over prompts, and whole prompts are drawn.

Legend: P prompts, F sums kept of each.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

RESAMPLES = 10_000
SEED = 0
HOW = f"95 % BCa bootstrap over prompts, {RESAMPLES} resamples, seed {SEED}"
ALPHA, POWER = 0.05, 0.8  # of tests
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the bootstrap, whatever the number of prompts

Array = npt.NDArray[np.float64]
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


def interval(sums_PF: Array, of: Statistic = ratio) -> Interval | None:
    """A statistic of all prompts' sums with its 95 % interval; None without a prompt.

    The interval is BCa (Efron 1987, https://www.jstor.org/stable/2289144): percentiles of the resamples,
    moved for their bias and their skewness. Acceptance differs from prompt to prompt with a long tail; on simulated
    prompts of that kind BCa misses the truth less often than plain percentiles.
    """
    prompts = len(sums_PF)
    if not prompts:
        return None
    mean = float(of(sums_PF.sum(0)))
    if prompts < 2:
        return Interval(mean, None, None)

    def statistic(chosen: npt.NDArray[np.int64], axis: int) -> Array:
        return of(sums_PF[chosen].sum(-2))

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.filterwarnings("ignore", "The BCa confidence interval cannot be calculated")
        drawn = bootstrap(
            (np.arange(prompts),), statistic, vectorized=True, n_resamples=RESAMPLES,
            batch=max(1, _DRAWS_AT_ONCE // prompts), method="BCa", rng=np.random.default_rng(SEED),
        )  # fmt: skip
    low, high = drawn.confidence_interval
    if np.isnan(low) or np.isnan(high):  # no skewness where all prompts say the same
        low, high = np.quantile(drawn.bootstrap_distribution, [0.025, 0.975])
    return Interval(mean, float(low), float(high))


def measured(sums_PC: Array, of: Statistic = ratio) -> Measured:
    """A statistic of sums and weights in turn with its interval; prompts whose weights are all zero say nothing.

    There is no interval where the statistic is not defined without one of the prompts, or for some resample.
    """
    sums_PC = sums_PC[(sums_PC[:, 1::2] > 0).any(1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        if not len(sums_PC) or not np.isfinite(mean := float(of(sums_PC.sum(0)))):
            return {"mean": None, "low": None, "high": None}
        found = interval(sums_PC, of) if np.isfinite(of(sums_PC.sum(0) - sums_PC)).all() else None
    if found is None or found.low is None or found.high is None or not np.isfinite(found.low + found.high):
        return {"mean": mean, "low": None, "high": None}
    return found._asdict()
