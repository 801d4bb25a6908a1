"""Intervals and p-values where every seed has answered every prompt, so that both are drawn at random.

A bootstrap that draws three seeds anew holds the truth in 70 to 88 of 100 studies where trainings differ. Here the
spread over seeds is judged by Student's t with as many degrees of freedom as there are seeds less one, and what
prompts add beyond it by a t of their own. Few seeds may agree by chance; what is left when seeds and prompts are taken
out is then the least that seeds must vary. ``benchmarks/coverage.py`` simulates how often that holds the truth.

Legend: S seeds, P prompts.
"""

import math
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.stats import t as student

from specdec.card.linear import Linear
from specdec.evaluation.comparison import ALPHA
from specdec.evaluation.statistics import Array

METHOD = (
    "95 % intervals over seeds and prompts, crossed: the variance of the seeds' own figures with Student's t of "
    "S - 1 degrees of freedom, plus what prompts add beyond it with a t of P - 1; never narrower than if trainings did "
    "not differ"
)
ANY, SHARE, COSINE, POSITIVE = (-math.inf, math.inf), (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)
_LEAST = 1e-100  # p-values below are this; its t-quantile squared is still a float


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
        if self.seeds < 2 and self.prompts < 2:
            return None
        S, P = self.seeds, self.prompts
        seeds = max(_square(self.of_seeds, S - 1, alpha), _square(self.of_rest, (S - 1) * (P - 1), alpha))
        return math.sqrt((seeds + _square(self.beyond, P - 1, alpha)) / (S * P))


def _square(mean_square: float, df: int, alpha: float) -> float:
    """Of what a variance with so many degrees of freedom may bring; 0 where there are none."""
    return mean_square * float(student.isf(alpha / 2, df)) ** 2 if df and mean_square else 0.0


class Estimate(NamedTuple):
    """A figure with its 95 % interval, and the chance of one so far from ``null`` if that were the truth."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    """None where no truth to test was named, or there is no interval."""
    spread: Spread

    @property
    def over(self) -> str | None:
        """What the interval is over."""
        names = [name for name, count in zip(("seeds", "prompts"), self.spread[:2], strict=True) if count > 1]
        return " and ".join(names) or None

    def to_json(self) -> dict[str, Any]:
        """Value, interval, p-value, counts and mean squares."""
        ends = {"value": self.value, "low": self.low, "high": self.high, "p_value": self.p_value}
        return ends | {"over": self.over} | self.spread._asdict()


def spread(added_SP: Array) -> Spread:
    """The mean squares; those without a degree of freedom are 0."""
    S, P = added_SP.shape
    mean = added_SP.mean()
    row_S, column_P = added_SP.mean(1), added_SP.mean(0)
    rest_SP = added_SP - row_S[:, None] - column_P + mean
    return Spread(
        S, P,
        float(P * ((row_S - mean) ** 2).sum() / (S - 1)) if S > 1 else 0.0,
        float(S * ((column_P - mean) ** 2).sum() / (P - 1)) if P > 1 else 0.0,
        float((rest_SP**2).sum() / ((S - 1) * (P - 1))) if S > 1 and P > 1 else 0.0,
    )  # fmt: skip


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
