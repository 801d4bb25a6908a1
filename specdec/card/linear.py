"""Figures of a study with what every seed and prompt adds to them: differences of pairs come out by themselves.

A figure is a ratio of sums, or made of such. To first order it is the mean of one number for each seed and prompt
(the influence function), and so is a difference of two figures: that of the same seeds and prompts, pair by pair.

Legend: S seeds, P prompts.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from specdec.evaluation.statistics import Array


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
    whole = float(bottom_SP.sum())
    if not whole:
        return None
    value = float(top_SP.sum()) / whole
    return Linear(value, top_SP.size * (top_SP - value * bottom_SP) / whole)


def weighted(figures: Sequence[Linear], weights: Sequence[float]) -> Linear:
    """A sum of figures of the same seeds and prompts, each times its weight."""
    pairs = list(zip(figures, weights, strict=True))
    added_SP = sum((weight * figure.added_SP for figure, weight in pairs[1:]), pairs[0][1] * pairs[0][0].added_SP)
    return Linear(sum(weight * figure.value for figure, weight in pairs), added_SP)
