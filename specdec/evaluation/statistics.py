"""Intervals over prompts (bootstrap of ratios of sums), and the paired comparison of two evaluations.

Passes of one prompt, and its turns, are alike; prompts are what is independent. So every statistic is a function of
sums over prompts, and whole prompts are drawn.

Legend: P prompts, F sums kept of each, R resamples or relabellings.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 0
METHOD = "95 % BCa bootstrap over prompts"
HOW = f"{METHOD}, {RESAMPLES} resamples, seed {SEED}"
ALPHA, POWER = 0.05, 0.8
FEWEST = 6  # prompts: of fewer, even the rarest relabelling and its mirror image are not below ALPHA together
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


class Comparison(NamedTuple):
    """Acceptance length of A and B on the same prompts."""

    prompts: int
    a: float
    b: float
    difference: Interval
    """B less A."""
    ratio: Interval
    """B over A."""
    p_value: float
    """Probability of a difference at least so large if A and B were exchangeable on every prompt."""
    deviation: float
    """Standard deviation over prompts of what one adds to the difference."""

    def prompts_needed(self, detect: float) -> int:
        """Prompts like these with which a true difference of ``detect`` is seen in 80 of 100 evaluations (p < 0.05).

        ``n = (z(1 - α/2) + z(power))² deviation² / detect² + z(1 - α/2)² / 2``, the last term being Guenther's for a
        variance that is estimated (The American Statistician 35, 1981).

        Raises:
            ValueError: ``detect`` is not above zero.
        """
        if not 0 < detect < math.inf:
            raise ValueError(f"detect is {detect}: it must be a difference above 0, in tokens per target pass")
        level, power = NormalDist().inv_cdf(1 - ALPHA / 2), NormalDist().inv_cdf(POWER)
        return max(FEWEST, math.ceil(((level + power) * self.deviation / detect) ** 2 + level**2 / 2))


def paired_comparison(sums_P4: Array, seed: int = SEED, resamples: int = RESAMPLES) -> Comparison:
    """Paired comparison of A and B, which answered the same prompts.

    Intervals draw prompts, the same for A and B. The p-value is of the permutation test that swaps A and B on some of
    the prompts: on all 2**P choices where these are few, else on so many drawn ones, what was found among them.

    Args:
        sums_P4: of every prompt, what A committed and its passes, and the same of B, all above zero.

    Raises:
        ValueError: there are fewer than two prompts.
    """
    if len(sums_P4) < 2:
        raise ValueError(f"{len(sums_P4)} prompts came to a target pass in both: a comparison takes at least 2")
    total_4 = sums_P4.sum(0)
    difference = interval(sums_P4, _difference, seed, resamples)
    relative = interval(sums_P4, lambda sums: ratio(sums[..., 2:]) / ratio(sums[..., :2]), seed, resamples)
    assert difference is not None and relative is not None
    of_a, of_b = float(ratio(total_4[:2])), float(ratio(total_4[2:]))
    prompts = len(sums_P4)
    # what each prompt adds to the difference, to first order: the passes of A and B weigh it as they weigh the ratios
    added_P = (sums_P4[:, 2] - of_b * sums_P4[:, 3]) / total_4[3] - (sums_P4[:, 0] - of_a * sums_P4[:, 1]) / total_4[1]
    deviation = float(prompts * added_P.std(ddof=1))
    return Comparison(prompts, of_a, of_b, difference, relative, _p_value(sums_P4, seed, resamples), deviation)


def _difference(sums: Array) -> Array:
    return ratio(sums[..., 2:]) - ratio(sums[..., :2])


def _p_value(sums_P4: Array, seed: int, resamples: int) -> float:
    prompts = len(sums_P4)
    exact = 2**prompts <= resamples
    if exact:
        swaps_RP = (np.arange(2**prompts)[:, None] >> np.arange(prompts) & 1).astype(np.float64)
    else:
        swaps_RP = np.random.default_rng(seed).integers(2, size=(resamples, prompts)).astype(np.float64)
    swapped_P4 = sums_P4[:, [2, 3, 0, 1]]
    relabelled_R = _difference(sums_P4.sum(0) + swaps_RP @ (swapped_P4 - sums_P4))
    found = abs(float(_difference(sums_P4.sum(0))))
    reached = int((np.abs(relabelled_R) >= found - 1e-12 * max(1.0, found)).sum())
    return reached / len(swaps_RP) if exact else (1 + reached) / (1 + len(swaps_RP))
