"""Speed-up predicted from acceptance and costs, the best shapes, and the batch from which drafting does not pay."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specdec.evaluation.tuning.costs import Costs
from specdec.evaluation.tuning.shape import Shape, shapes

REACH = 4  # how many times the largest measured batch the break-even is sought


class Prediction(NamedTuple):
    """Of one shape at one batch size; costs are in plain passes."""

    shape: Shape
    acceptance_length: float
    verify: float  # v(N)
    drafting: float  # d * c
    rest: float  # o

    @property
    def speedup(self) -> float:
        """S = tau / (v(N) + d * c + o)."""
        return self.acceptance_length / (self.verify + self.drafting + self.rest)


class BreakEven(NamedTuple):
    """The smallest batch at which no shape is predicted to be faster than plain decoding."""

    batch: int
    how: str  # measured, interpolated or extrapolated


def predict(costs: Costs, widths: tuple[int, ...], length: Callable[[Shape], float]) -> list[Prediction]:
    """All candidates within what was measured, the fastest first; of equals the smaller one.

    Args:
        widths: of the candidates, between the measured ones.
        length: acceptance length of a shape.
    """
    found = [
        Prediction(shape, length(shape), costs.v(shape.nodes + 1), costs.drafting(shape), costs.rest)
        for shape in shapes(widths, costs.most_nodes)
    ]
    return sorted(found, key=lambda one: (-one.speedup, one.shape.nodes, one.shape))


def break_even(best: Mapping[int, float]) -> BreakEven | None:
    """Where the best predicted speed-up falls to one, over the logarithm of the batch size.

    Between two measured batches, and up to ``REACH`` times the largest, the line through two of them counts.

    Args:
        best: the best predicted speed-up by batch size.

    Returns:
        None if there is no such batch within reach.
    """
    known = sorted(best)
    if best[known[0]] <= 1:
        return BreakEven(known[0], "measured")
    for left, right in itertools.pairwise(known):
        if best[right] <= 1:
            batch = min(right, _crossing(left, best[left], right, best[right]))
            return BreakEven(batch, "measured" if batch == right else "interpolated")
    if len(known) < 2 or best[known[-1]] >= best[known[-2]]:
        return None
    left, right = known[-2:]
    if _log_crossing(left, best[left], right, best[right]) > math.log2(REACH * right):
        return None
    return BreakEven(_crossing(left, best[left], right, best[right]), "extrapolated")


def _log_crossing(left: int, before: float, right: int, after: float) -> float:
    return math.log2(left) + (before - 1) / (before - after) * math.log2(right / left)


def _crossing(left: int, before: float, right: int, after: float) -> int:
    return max(left + 1, math.ceil(2 ** _log_crossing(left, before, right, after) - 1e-9))
