"""Contrasts, intervals, p-values and power where every seed has answered every prompt.

A figure is a ratio of sums over seeds and prompts, or made of such ratios. To first order it is the mean of one number
for each seed and prompt (its influence function), and so is a contrast, a weighted sum of the figures of arms.

Seeds and prompts are both drawn at random. A contrast varies with its seeds by the mean square of arms by seeds, seeds
being blocks that all arms share: pooled over all A arms of the study it has (A - 1) (S - 1) degrees of freedom, of the
contrast alone S - 1. Pooling takes arms to be equally variable; where they do not look so, it is not done. What prompts
add is of the contrast alone. The sum of both has Satterthwaite's degrees of freedom.

Legend: A arms, S seeds, P prompts.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.optimize import brentq
from scipy.stats import bartlett, chi2, nct
from scipy.stats import t as student

from specdec.report.statistics import ALPHA, ANY, POWER, Array, Range, bounded

METHOD = (
    "95 % intervals over seeds and prompts, crossed: Student's t on Satterthwaite's degrees of freedom; of contrasts "
    "the variance of seeds is that of all arms (seeds as blocks), unless arms differ in it (Bartlett's p < 0.1)"
)
UNEQUAL = 0.1  # p-value of Bartlett's test below which arms are not pooled
_LEAST = 1e-100  # no p-value is below this


class Linear(NamedTuple):
    """A figure, and what each seed and prompt adds to it: the mean of ``added_SP`` is zero."""

    value: float
    added_SP: Array

    def minus(self, other: Self) -> "Linear":
        """The difference of two figures of the same seeds and prompts."""
        return Linear(self.value - other.value, self.added_SP - other.added_SP)

    def over(self, other: Self) -> "Linear":
        """The ratio of two figures of the same seeds and prompts."""
        value = self.value / other.value
        return Linear(value, (self.added_SP - value * other.added_SP) / other.value)


def pooled(top_SP: Array, bottom_SP: Array) -> Linear | None:
    """The ratio of two sums over all seeds and prompts; None where the lower one is zero."""
    total = float(bottom_SP.sum())
    if not total:
        return None
    value = float(top_SP.sum()) / total
    return Linear(value, top_SP.size * (top_SP - value * bottom_SP) / total)


def weighted(figures: Sequence[Linear], weights: Sequence[float]) -> Linear:
    """A sum of figures of the same seeds and prompts, each times its weight."""
    pairs = list(zip(figures, weights, strict=True))
    added_SP = sum((weight * figure.added_SP for figure, weight in pairs), np.zeros(()))
    return Linear(sum(weight * figure.value for figure, weight in pairs), added_SP)


# intervals


class SeedError(NamedTuple):
    """The variance over seeds of a contrast whose squared weights sum to 1, from ``arms`` arms."""

    mean_square: float
    df: int
    arms: int
    equal: bool  # whether arms look equally variable


def seed_error(figures: Sequence[Linear]) -> SeedError | None:
    """The mean square pooled over arms of the same seeds and prompts; None from one seed or fewer than three arms.

    An arm under two names counts once. Whether arms are equally variable is judged by Bartlett's test of their own
    figures over seeds (Proceedings of the Royal Society A 160, 1937).
    """
    added = {
        (figure.value, figure.added_SP.tobytes()): figure.added_SP for figure in figures
    }.values()
    rows_AS = np.array([added_SP.mean(1) for added_SP in added])
    arms, seeds = rows_AS.shape
    if seeds < 2 or arms < 3:  # two arms vary as their difference does
        return None
    df = (arms - 1) * (seeds - 1)
    squares = ((rows_AS - rows_AS.mean(0)) ** 2).sum()  # of every row the mean is zero
    variances = rows_AS.var(1)
    equal = not variances.any() or (
        bool(variances.all()) and float(bartlett(*rows_AS).pvalue) >= UNEQUAL
    )
    return SeedError(float(figures[0].added_SP.shape[1] * squares / df), df, arms, equal)


class Estimate(NamedTuple):
    """A figure with its 95 % interval if there is one, and the p-value of ``null`` if that was given.

    ``error`` is the standard error, with this many degrees of freedom; ``pooled`` arms are in the variance of seeds,
    0 if it is of this figure alone.
    """

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    error: float | None
    df: float | None
    pooled: int
    seeds: int
    prompts: int


class Spread(NamedTuple):
    """Mean squares of a two-way table: of its S rows, of its P columns, and of what is left."""

    of_seeds: float
    of_prompts: float
    of_rest: float


def spread(added_SP: Array) -> Spread:
    """The mean squares; those without a degree of freedom are 0."""
    S, P = added_SP.shape
    mean = added_SP.mean()
    row_S = added_SP.mean(1)
    column_P = added_SP.mean(0)
    rest_SP = added_SP - row_S[:, None] - column_P + mean
    of_seeds = float(P * ((row_S - mean) ** 2).sum() / (S - 1)) if S > 1 else 0.0
    of_prompts = float(S * ((column_P - mean) ** 2).sum() / (P - 1)) if P > 1 else 0.0
    of_rest = float((rest_SP**2).sum() / ((S - 1) * (P - 1))) if S > 1 and P > 1 else 0.0
    return Spread(of_seeds, of_prompts, of_rest)


def _error(added_SP: Array, seeds: SeedError | None, squares: float) -> tuple[float, float]:
    """The standard error of a figure and its degrees of freedom.

    Satterthwaite, Biometrics Bulletin 2, 1946. What prompts vary beyond the rest is not taken for less than nothing.
    """
    S, P = added_SP.shape
    mean_squares = spread(added_SP)
    if S < 2:
        return math.sqrt(mean_squares.of_prompts / P), P - 1
    if seeds is None:
        of_seeds, df = mean_squares.of_seeds, S - 1
    else:
        of_seeds, df = squares * seeds.mean_square, seeds.df
    variance = of_seeds + max(0.0, mean_squares.of_prompts - mean_squares.of_rest)
    error = math.sqrt(variance / (S * P))
    if variance <= of_seeds:
        return error, df
    parts = (
        of_seeds**2 / df
        + mean_squares.of_prompts**2 / (P - 1)
        + mean_squares.of_rest**2 / ((S - 1) * (P - 1))
    )
    return error, max(variance**2 / parts, min(df, P - 1))


def estimate(
    figure: Linear,
    null: float | None = None,
    bounds: Range = ANY,
    seeds: SeedError | None = None,
    squares: float = 1.0,
) -> Estimate:
    """The figure with its interval, and the p-value of ``null`` if one is named.

    Args:
        seeds: of the arms of which the figure is a contrast, if they are equally variable.
        squares: the sum of the squares of the contrast's weights.
    """
    S, P = figure.added_SP.shape
    if S < 2 and P < 2:
        return Estimate(figure.value, None, None, None, None, None, 0, S, P)
    seeds = seeds if seeds and seeds.equal else None
    error, df = _error(figure.added_SP, seeds, squares)
    _, low, high = bounded(figure.value, float(student.isf(ALPHA / 2, df)) * error, bounds)
    p_value = None if null is None else _p_value(abs(figure.value - null), error, df, P)
    return Estimate(figure.value, low, high, p_value, error, df, seeds.arms if seeds else 0, S, P)


def _p_value(distance: float, error: float, df: float, prompts: int) -> float:
    if distance <= 1e-12 * max(1.0, distance):
        return 1.0
    if error <= 1e-12 * distance:
        return max(_LEAST, 2.0 ** (1 - prompts))  # no spread at all: as the sign test has it
    return max(_LEAST, float(2 * student.sf(distance / error, df)))


# many comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: below 0.05, the chance of a single false find in the family is at most 5 %.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order_N = np.argsort(p_values, kind="stable")
    stepped_N = np.array(p_values)[order_N] * np.arange(len(p_values), 0, -1)
    rising_N = np.minimum(1.0, np.maximum.accumulate(stepped_N))
    return list(rising_N[np.argsort(order_N)].tolist())


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows together that agree in what was measured and in every digit: one training under two names is one test."""
    same: dict[Any, list[Any]] = {}
    for row in rows:
        known = tuple(row.get(key) for key in ("quantity", "value", "low", "high", "p_value"))
        same.setdefault(known, []).append(row)
    return list(same.values())


def add_verdicts(rows: Sequence[dict[str, Any]]) -> None:
    """Give each primary contrast ``p_holm``, corrected over all :func:`distinct` tested ones, and a ``verdict``.

    The verdict is ``higher``, ``lower`` or ``not significant``, by Holm's p-value, or ``not tested``.
    """
    for row in rows:
        row |= {"p_holm": None, "verdict": "not tested"}
    tests = distinct([row for row in rows if row["p_value"] is not None])
    corrected = holm([same[0]["p_value"] for same in tests])
    for same, p_holm in zip(tests, corrected, strict=True):
        verdict = "higher" if same[0]["value"] > 0 else "lower"
        if p_holm >= ALPHA:
            verdict = "not significant"
        for row in same:
            row |= {"p_holm": p_holm, "verdict": verdict}


# power


def detectable(contrast_estimate: Estimate, tests: int = 1) -> tuple[float, float, float] | None:
    """The difference that 80 of 100 such studies tell apart from none, and the range of it; None without an error.

    The error of a study is itself estimated: the range is that of the error, 95 %, from the chi-square distribution.

    Args:
        tests: how many tests share the error of 0.05, as in the first step of Holm's correction.
    """
    error = contrast_estimate.error
    df = contrast_estimate.df
    if error is None or df is None:
        return None
    size = error * _noncentral(df, ALPHA / tests)
    low, high = (math.sqrt(df / float(chi2.isf(tail, df))) for tail in (ALPHA / 2, 1 - ALPHA / 2))
    return size, size * low, size * high


@functools.lru_cache(maxsize=4096)
def _noncentral(df: float, alpha: float) -> float:
    """A true difference, in standard errors, that a two-sided t-test finds in 80 of 100 studies: 5.65 where df is 2."""
    least = float(student.isf(alpha / 2, df))
    # on its own side
    return float(brentq(lambda size: nct.sf(least, df, size) - POWER, 0.0, 2 * least + 3))


# contrasts

Arm = frozenset[tuple[str, str]]  # its axes and levels
Weights = dict[Arm, float]
Levels = Mapping[str, str]


def contrast(arms: Collection[Arm], terms: Sequence[tuple[Levels, Levels]]) -> Weights:
    """The weights of arms in what levels do against others of the same axes; of two such terms, in their interaction.

    It is averaged over the levels of the other axes at which every arm that it needs is among ``arms``; empty if there
    are none. An interaction is a difference of differences.
    """
    places = []
    for arm in arms:
        if all(arm.issuperset(new.items()) for new, _ in terms):
            corners: Weights = {}
            for sides in itertools.product((0, 1), repeat=len(terms)):
                levels = dict(arm)
                for term, side in zip(terms, sides, strict=True):
                    levels |= term[side]
                corners[frozenset(levels.items())] = (-1.0) ** sum(sides)
            if corners.keys() <= set(arms):
                places.append(corners)
    needed = set().union(*places)
    return {
        arm: sum(corners.get(arm, 0.0) for corners in places) / len(places)
        for arm in arms
        if arm in needed
    }


def effects(
    axes: Mapping[str, Sequence[str]], baseline: Levels, arms: Collection[Arm]
) -> Iterator[tuple[str, Weights]]:
    """All main effects (``norm=on``, against the level in the baseline) and two-way interactions (``norm=on x K=4``)
    that these arms support."""
    changes = [
        (axis, level)
        for axis, levels in axes.items()
        for level in levels
        if level != baseline[axis]
    ]
    for terms in [*itertools.combinations(changes, 1), *itertools.combinations(changes, 2)]:
        if len({axis for axis, _ in terms}) == len(terms):
            pairs = [({axis: level}, {axis: baseline[axis]}) for axis, level in terms]
            if weights := contrast(arms, pairs):
                yield " x ".join(f"{axis}={level}" for axis, level in terms), weights
