"""Contrasts, intervals, p-values and power where every seed has answered every prompt.

A figure is a ratio of sums over seeds and prompts, or made of such ratios. To first order it is the mean of one number
for each seed and prompt (its influence function), and so is a contrast, a weighted sum of the figures of arms.

Seeds and prompts are both drawn at random, and each has its part of the variance and its own degrees of freedom: S - 1
of seeds, P - 1 of prompts. A p-value is the mean of the two that Student's t gives, weighted by the parts.
Satterthwaite's one number of degrees of freedom would be far above S - 1 where few seeds lie close together by chance.

The part of the seeds may be pooled over the arms of the contrast, and over no others (:func:`seed_error`).

Legend: A arms, S seeds, P prompts.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, fdtrc, nctdtr, stdtr

from specdec.report.statistics import ALPHA, ANY, POWER, Array, Range, bounded

METHOD = (
    "95 % intervals over seeds and prompts, crossed: Student's t, with S - 1 degrees of freedom for the part of the "
    "seeds and P - 1 for that of the prompts; a contrast of more than two arms pools the part of the seeds over these "
    "arms, unless it varies more than they do (F test, p < 0.25)"
)
UNLIKE = 0.25  # p-value of the F test below which arms are not pooled
_LEAST = 1e-100  # no p-value is below this
_ROUNDING = 1e-12  # relative: a smaller spread is taken for none


class Linear(NamedTuple):
    """A figure, and what each seed and prompt adds to it: the mean of ``added_SP`` is zero."""

    value: float
    added_SP: Array

    def minus(self, other: Self) -> "Linear":
        """The difference of two figures of the same seeds and prompts."""
        return Linear(self.value - other.value, self.added_SP - other.added_SP)

    def over(self, other: Self) -> "Linear | None":
        """The ratio of two figures of the same seeds and prompts; None where the lower one is zero."""
        if not other.value:
            return None
        value = self.value / other.value
        return Linear(value, (self.added_SP - value * other.added_SP) / other.value)


def pooled(top_SP: Array, bottom_SP: Array) -> Linear | None:
    """The ratio of two sums over all seeds and prompts; None where the lower one is zero with any seed."""
    total = float(bottom_SP.sum())
    if not total or not bottom_SP.any(1).all():
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
    """The mean square over seeds of a contrast, its degrees of freedom, and how many arms are pooled in it; 0: none."""

    mean_square: float
    df: float
    arms: int


def seed_error(figures: Sequence[Linear], weights: Sequence[float]) -> SeedError | None:
    """The mean square of a contrast over its seeds, with S - 1 degrees of freedom, or pooled; None from one seed.

    Seeds are blocks, which all arms share. Of equal weights the mean square that is pooled over the arms of a contrast
    is on average the contrast's own, however unequal the arms are: it is a sum of the arms' own variances, with
    Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946), from S - 1 to (A - 1) (S - 1). That holds if
    arms vary independently, and not where a seed's luck is that of all arms of one level. Then the contrast's own mean
    square is above that of all other contrasts of its arms: they are pooled only if an F test of the two has p >= 0.25
    (Bozivich, Bancroft and Hartley, Annals of Mathematical Statistics 27, 1956, on why such a test needs this level).
    """
    rows_AS = np.array([figure.added_SP.mean(1) for figure in figures])
    weight_A = np.array(weights)
    arms, seeds = rows_AS.shape
    if seeds < 2:
        return None
    if not weight_A.all():
        raise ValueError("an arm of weight 0 is not in the contrast: leave it out")
    prompts = figures[0].added_SP.shape[1]
    # of every row the mean is zero
    alone = float(prompts * ((weight_A @ rows_AS) ** 2).sum() / (seeds - 1))
    square_A = ((rows_AS - rows_AS.mean(0)) ** 2).sum(1)
    total = float(prompts * (weight_A**2).sum() * square_A.sum() / (seeds - 1))
    rest = total - alone  # of the arms' other contrasts, A - 2
    if arms < 3 or rest <= 0:
        return SeedError(alone, seeds - 1, 0)
    others = (arms - 2) * (seeds - 1)
    if fdtrc(seeds - 1, others, alone * (arms - 2) / rest) < UNLIKE:
        return SeedError(alone, seeds - 1, 0)
    # through the seeds' means an arm's square has a share of all others'; its own variance is without that (Ehrenberg,
    # Biometrika 37, 1950)
    shared = square_A.sum() / ((arms - 1) * (arms - 2))
    variance_A = (arms / (arms - 2) * square_A - shared).clip(min=0)
    df = (seeds - 1) * (arms - 1) / arms * float(variance_A.sum() ** 2 / (variance_A**2).sum())
    return SeedError(total / (arms - 1), max(df, seeds - 1), arms)


class Estimate(NamedTuple):
    """A figure with its 95 % interval if there is one, and the p-value of ``null`` if that was given.

    ``error`` is the standard error. Of its square ``seeds_part`` is the share that seeds make, with ``df`` degrees of
    freedom, in which ``pooled`` arms are, 0 if it is of this figure alone; prompts make the rest.
    """

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    error: float | None
    seeds_part: float | None
    df: float | None
    pooled: int
    seeds: int
    prompts: int

    @property
    def parts(self) -> list[tuple[float, float]]:
        """The parts of the variance, as shares, and the degrees of freedom of each."""
        of_seeds = self.seeds_part or 0.0
        both = [(of_seeds, self.df or 0.0), (1 - of_seeds, self.prompts - 1.0)]
        return [(share, df) for share, df in both if share > 0]


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


def estimate(
    figure: Linear,
    null: float | None = None,
    bounds: Range = ANY,
    seeds: SeedError | None = None,
) -> Estimate:
    """The figure with its interval, and the p-value of ``null`` if one is named.

    There is no interval where nothing varies: seeds and prompts that all say the same, as of a share that is 0 in the
    few passes that there are, do not make it certain. What prompts vary beyond the rest is not taken for less than
    nothing.

    Args:
        seeds: of the contrast that the figure is, if not its own.
    """
    S, P = figure.added_SP.shape
    without_error = Estimate(figure.value, None, None, None, None, None, None, 0, S, P)
    if S < 2 and P < 2:
        return without_error
    squares = spread(figure.added_SP)
    if S < 2:
        seeds = SeedError(0.0, 0, 0)
    elif seeds is None:
        seeds = SeedError(squares.of_seeds, S - 1, 0)
    variance = seeds.mean_square + max(0.0, squares.of_prompts - squares.of_rest)
    part = seeds.mean_square / variance if variance else float(S > 1)
    error = math.sqrt(variance / (S * P))
    if error <= _ROUNDING * max(1.0, abs(figure.value)):
        error = 0.0
    result = without_error._replace(error=error, seeds_part=part, df=seeds.df, pooled=seeds.arms)
    if null is not None:
        result = result._replace(p_value=_p_value(abs(figure.value - null), result))
    if not result.error:
        return result
    _, low, high = bounded(figure.value, _critical(result.parts, ALPHA) * result.error, bounds)
    return result._replace(low=low, high=high)


def contrasted(
    figures: Sequence[Linear], weights: Sequence[float], bounds: Range = ANY
) -> Estimate:
    """A contrast of arms: the sum of their figures, each within ``bounds``, times weights that sum to zero."""
    most = (bounds[1] - bounds[0]) * sum(map(abs, weights)) / 2
    figure = weighted(figures, weights)
    return estimate(figure, 0.0, (-most, most), seed_error(figures, weights))


def _tail(size: float, parts: Sequence[tuple[float, float]]) -> float:
    """The two-sided p-value of a difference of this many standard errors.

    The mean over the parts of the variance. Cochran (Biometrics 20, 1964) averages critical values so; the mean of
    p-values asks for more in the tail that Holm's correction reads. ``benchmarks/coverage.py`` has the error that is
    left.
    """
    return sum(2 * share * float(stdtr(df, -size)) for share, df in parts)


def _critical(parts: Sequence[tuple[float, float]], alpha: float) -> float:
    """The difference, in standard errors, whose p-value is alpha."""
    most = 2.0
    while _tail(most, parts) > alpha:
        most *= 2
    return float(brentq(lambda size: _tail(size, parts) - alpha, 0.0, most))


def _p_value(distance: float, figure: Estimate) -> float:
    error = figure.error or 0.0
    if distance <= _ROUNDING * max(1.0, distance):
        return 1.0
    if not error:  # no spread at all: as the sign test over seeds has it
        return max(_LEAST, 2.0 ** (1 - (figure.seeds if figure.seeds > 1 else figure.prompts)))
    return max(_LEAST, _tail(distance / error, figure.parts))


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

    By the noncentral t, of each part of the variance. The error of a study is itself estimated: the range is that of
    the error, 95 %, from the chi-square distribution with Satterthwaite's degrees of freedom.

    Args:
        tests: how many tests share the error of 0.05, as in the first step of Holm's correction.
    """
    if not contrast_estimate.error:
        return None
    parts = contrast_estimate.parts
    least = _critical(parts, ALPHA / tests)

    def missed(size: float) -> float:
        return sum(share * float(nctdtr(df, size, least)) for share, df in parts)

    size = contrast_estimate.error * float(
        brentq(lambda size: 1 - POWER - missed(size), 0.0, 2 * least + 3)
    )
    df = 1 / sum(share**2 / df for share, df in parts)
    low, high = (math.sqrt(df / float(chdtri(df, tail))) for tail in (ALPHA / 2, 1 - ALPHA / 2))
    return size, size * low, size * high


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
