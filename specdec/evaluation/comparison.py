"""Two evaluations of the same prompts: by how much they differ, and whether that could be chance.

Legend: P prompts, R resamples or relabellings.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import RESAMPLES, SEED, Array, Interval, interval, ratio
from specdec.evaluation.table import Passes, per_prompt, tabulate

ALPHA, POWER = 0.05, 0.8
FEWEST = (
    6  # prompts: of fewer, even the rarest of the 2**n relabellings is not below ALPHA, and its mirror image counts
)


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
    """Chance of a difference at least so large if A and B were exchangeable on every prompt."""
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


def compare(a: Sequence[Answer], b: Sequence[Answer], seed: int = SEED, resamples: int = RESAMPLES) -> Comparison:
    """Paired comparison; both hold answers to the same prompts.

    Intervals draw prompts, the same for A and B. The p-value is of the permutation test that swaps A and B on some of
    the prompts: on all 2**P choices where these are few, else on so many drawn ones, what was found among them.

    Raises:
        ValueError: fewer than two prompts came to a target pass.
    """
    sums_P4 = np.concatenate([_committed(a, b), _committed(b, a)], axis=1)
    sums_P4 = sums_P4[(sums_P4 > 0).all(1)]
    if len(sums_P4) < 2:
        raise ValueError(f"{len(sums_P4)} prompts came to a target pass in both: a comparison takes at least 2")
    total_4 = sums_P4.sum(0)
    difference = interval(sums_P4, _difference, seed, resamples)
    relative = interval(sums_P4, _relative, seed, resamples)
    assert difference is not None and relative is not None
    of_a, of_b = float(ratio(total_4[:2])), float(ratio(total_4[2:]))
    prompts = len(sums_P4)
    # what each prompt adds to the difference, to first order: the passes of A and B weigh it as they weigh the ratios
    added_P = (sums_P4[:, 2] - of_b * sums_P4[:, 3]) / total_4[3] - (sums_P4[:, 0] - of_a * sums_P4[:, 1]) / total_4[1]
    deviation = float(prompts * added_P.std(ddof=1))
    return Comparison(prompts, of_a, of_b, difference, relative, _p_value(sums_P4, seed, resamples), deviation)


def _committed(answers: Sequence[Answer], others: Sequence[Answer]) -> Array:
    """Committed tokens and passes of every prompt that either answers, in one order."""
    rows, more = (Passes(*tabulate(some)[0].T) for some in (answers, others))
    nothing = np.zeros_like(more.prompt)
    return per_prompt(
        np.concatenate([rows.prompt, more.prompt]),
        np.concatenate([rows.accepted + 1, nothing]),
        np.concatenate([np.ones_like(rows.prompt), nothing]),
    )


def _difference(sums: Array) -> Array:
    return ratio(sums[..., 2:]) - ratio(sums[..., :2])


def _relative(sums: Array) -> Array:
    return ratio(sums[..., 2:]) / ratio(sums[..., :2])


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
