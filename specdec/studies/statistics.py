"""Effects, intervals, p-values and power where every seed has answered every prompt.

A figure is a ratio of sums over seeds and prompts, or made of such ratios. To first order it is the mean of one number
for each seed and prompt (its influence function), and so is a difference of two figures: pair by pair where both are of
the same seeds and prompts.

Seeds and prompts are both drawn at random. A bootstrap that redraws three seeds holds the truth in 70 to 88 of 100
studies where trainings differ. Here the spread over seeds is judged by Student's t with as many degrees of freedom as
there are seeds less one, and what prompts add beyond it by a t of their own. Few seeds may agree by chance; what is
left when seeds and prompts are taken out is then the least that seeds must vary.

Legend: S seeds, P prompts.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.optimize import brentq
from scipy.stats import t as student

from specdec.evaluation.statistics import ALPHA, POWER, Array

METHOD = (
    "95 % intervals over seeds and prompts, crossed: the variance of the seeds' own figures with Student's t of "
    "S - 1 degrees of freedom, plus what prompts add beyond it with a t of P - 1; never narrower than if trainings did "
    "not differ"
)
ANY, SHARE, POSITIVE = (-math.inf, math.inf), (0.0, 1.0), (0.0, math.inf)
_LEAST = 1e-100  # p-values below are this; its t-quantile squared is still a float


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
    added_SP = sum((weight * figure.added_SP for figure, weight in pairs[1:]), pairs[0][1] * pairs[0][0].added_SP)
    return Linear(sum(weight * figure.value for figure, weight in pairs), added_SP)


# intervals


class Spread(NamedTuple):
    """Mean squares of a two-way table: of its S rows, of its P columns, and of what is left."""

    seeds: int
    prompts: int
    of_seeds: float
    of_prompts: float
    of_rest: float

    @property
    def beyond(self) -> float:
        """What prompts vary beyond the rest; with one seed all that they vary."""
        return max(0.0, self.of_prompts - self.of_rest)

    def half_width(self, alpha: float) -> float | None:
        """Of the interval that misses the truth in a share ``alpha`` of studies; None from one prompt and one seed."""
        S, P = self.seeds, self.prompts
        if S < 2 and P < 2:
            return None
        seeds = max(_square(self.of_seeds, S - 1, alpha), _square(self.of_rest, (S - 1) * (P - 1), alpha))
        return math.sqrt((seeds + _square(self.beyond, P - 1, alpha)) / (S * P))


def _square(mean_square: float, df: int, alpha: float) -> float:
    """Of what a variance with so many degrees of freedom may bring; 0 where there are none."""
    return mean_square * float(student.isf(alpha / 2, df)) ** 2 if df and mean_square else 0.0


class Estimate(NamedTuple):
    """A figure with its 95 % interval if there is one, and the p-value of ``null`` if that was given."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    spread: Spread

    def to_json(self) -> dict[str, Any]:
        """Value, interval, p-value, counts and mean squares."""
        return {name: getattr(self, name) for name in self._fields[:4]} | self.spread._asdict()


def spread(added_SP: Array) -> Spread:
    """The mean squares; those without a degree of freedom are 0."""
    S, P = added_SP.shape
    mean, row_S, column_P = added_SP.mean(), added_SP.mean(1), added_SP.mean(0)
    rest_SP = added_SP - row_S[:, None] - column_P + mean
    of_seeds = float(P * ((row_S - mean) ** 2).sum() / (S - 1)) if S > 1 else 0.0
    of_prompts = float(S * ((column_P - mean) ** 2).sum() / (P - 1)) if P > 1 else 0.0
    of_rest = float((rest_SP**2).sum() / ((S - 1) * (P - 1))) if S > 1 and P > 1 else 0.0
    return Spread(S, P, of_seeds, of_prompts, of_rest)


def estimate(figure: Linear, null: float | None = None, possible: tuple[float, float] = ANY) -> Estimate:
    """The figure with its interval, and the p-value of ``null`` if one is named.

    Args:
        possible: the least and the most that the figure can be; an interval ends there, or at the figure itself
            where rounding has put it beyond.
    """
    found = spread(figure.added_SP)
    half = found.half_width(ALPHA)
    if half is None:
        return Estimate(figure.value, None, None, None, found)
    p_value = None if null is None else _p_value(abs(figure.value - null), found)
    low = min(max(figure.value - half, possible[0]), figure.value)
    high = max(min(figure.value + half, possible[1]), figure.value)
    return Estimate(figure.value, low, high, p_value, found)


def _p_value(distance: float, found: Spread) -> float:
    """The largest ``alpha`` whose interval holds the truth that is tested."""

    def excess(log_alpha: float) -> float:
        half = found.half_width(math.exp(log_alpha))
        assert half is not None
        return half - distance

    if distance <= 1e-12 * max(1.0, abs(distance)):
        return 1.0
    if excess(math.log(_LEAST)) <= 0:
        return max(_LEAST, 2.0 ** (1 - found.prompts))  # no spread at all: as the sign test has it
    return math.exp(brentq(excess, math.log(_LEAST), 0.0, xtol=1e-10))


# many comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: below 0.05, the chance of a single false find in the family is at most 5 %.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order_N = np.argsort(p_values, kind="stable")
    stepped_N = np.array(p_values, dtype=np.float64)[order_N] * np.arange(len(p_values), 0, -1)
    out_N = np.empty(len(p_values))
    out_N[order_N] = np.minimum(1.0, np.maximum.accumulate(stepped_N))
    return [float(each) for each in out_N]


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows together that agree in what was measured and in every digit: one training under two names is one test."""
    same: dict[Any, list[Any]] = {}
    for row in rows:
        known = tuple(row.get(key) for key in ("quantity", "value", "low", "high", "p_value"))
        same.setdefault(known, []).append(row)
    return list(same.values())


def add_verdicts(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row ``p_holm``, corrected over all :func:`distinct` tested rows, and a ``verdict``.

    The verdict is ``higher``, ``lower`` or ``not told apart``, by Holm's p-value, or ``not tested``.
    """
    for row in rows:
        row |= {"p_holm": None, "verdict": "not tested"}
    tested = distinct([row for row in rows if row["p_value"] is not None])
    for same, corrected in zip(tested, holm([each[0]["p_value"] for each in tested]), strict=True):
        for row in same:
            verdict = ("higher" if row["value"] > 0 else "lower") if corrected < ALPHA else "not told apart"
            row |= {"p_holm": corrected, "verdict": verdict}


# power


def detectable(found: Spread) -> float | None:
    """The difference that 80 of 100 such studies tell apart from none (p < 0.05, before any correction).

    ``half width of the interval + t(power, df) * standard error``, df being the seeds less one, of one seed the
    prompts less one.
    """
    half = found.half_width(ALPHA)
    if half is None:
        return None
    df = found.seeds - 1 or found.prompts - 1
    error = math.sqrt((max(found.of_seeds, found.of_rest) + found.beyond) / (found.seeds * found.prompts))
    return half + float(student.ppf(POWER, df)) * error


# effects of a full factorial


def effects(
    axes: Mapping[str, Sequence[str]], baseline: Mapping[str, str], figures: Mapping[frozenset[tuple[str, str]], Linear]
) -> dict[str, Linear]:
    """All main effects (``norm=on``) and two-way interactions (``norm=on x K=4``) that these arms support.

    The effect of a level is its figure less that of the axis' level in the baseline, averaged over the other axes. An
    interaction of two levels is a difference of differences: what both together do beyond the sum of what each does.
    Where arms are missing, an effect is averaged over those levels of the other axes at which all that it needs is
    there.

    Args:
        figures: by the axes and levels of an arm, of the same seeds and prompts.
    """
    changes = [(axis, level) for axis, levels in axes.items() for level in levels if level != baseline[axis]]
    out = {}
    for terms in [*itertools.combinations(changes, 1), *itertools.combinations(changes, 2)]:
        if len({axis for axis, _ in terms}) < len(terms):
            continue
        signs = {reset: (-1.0) ** len(reset) for size in range(3) for reset in itertools.combinations(terms, size)}
        places: list[Linear] = []
        for arm in (each for each in figures if each.issuperset(terms)):
            # the arm, and with one or both of the terms at the baseline's level
            corners = [arm.difference(reset) | {(axis, baseline[axis]) for axis, _ in reset} for reset in signs]
            if all(corner in figures for corner in corners):
                places.append(weighted([figures[corner] for corner in corners], list(signs.values())))
        if places:
            name = " x ".join(f"{axis}={level}" for axis, level in terms)
            out[name] = weighted(places, [1 / len(places)] * len(places))
    return out
