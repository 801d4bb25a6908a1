"""Predictions on machines and drafters made up for it."""

import pytest

from specdec.evaluation.tuning.costs import Costs
from specdec.evaluation.tuning.model import REACH, BreakEven, break_even, predict
from specdec.evaluation.tuning.shape import WIDTHS, Shape

POINTS = (1, 2, 4, 8, 16, 32, 49)


def machine(slope: float, step: float = 0.1, rest: float = 0.05) -> Costs:
    """Verification that grows by ``slope`` for each node, and draft steps that cost the same at any width."""
    return Costs(1, 1.0, {n: 1 + slope * (n - 1) for n in POINTS}, dict.fromkeys(WIDTHS, step), rest, 0.0)


def chances(alpha: float, gain: float = 0.0) -> object:
    """Acceptance length of a drafter whose every guess is right with ``alpha``, and more of them with more nodes."""

    def length(shape: Shape) -> float:
        hit = 1 - (1 - alpha) ** (1 + gain * (shape.nodes - shape.depth) / shape.depth)
        return sum(hit**k for k in range(shape.depth + 1))

    return length


def best(costs: Costs, alpha: float, gain: float = 0.0) -> Shape:
    return predict(costs, WIDTHS, chances(alpha, gain))[0].shape  # type: ignore[arg-type]


def test_the_prediction_is_the_formula_s() -> None:
    found = {one.shape: one for one in predict(machine(0.02), WIDTHS, chances(0.6))}  # type: ignore[arg-type]
    one = found[Shape(1, 3, 3)]
    assert one.acceptance_length == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert one.speedup == pytest.approx(one.acceptance_length / (1.06 + 0.3 + 0.05))
    assert found[Shape(4, 3, 12)].verify == pytest.approx(1.24)


def test_the_optimum_is_found() -> None:
    assert best(machine(0.0, step=0.0), 0.9) == Shape(1, 7, 7)  # all is free: the deepest, and of equals the smallest
    assert best(machine(0.5), 0.5) == Shape(1, 1, 1)  # every node costs half a pass
    by_hand = {d: sum(0.7**k for k in range(d + 1)) / (1 + 0.02 * d + 0.1 * d + 0.05) for d in range(1, 8)}
    assert best(machine(0.02), 0.7) == Shape(1, (d := max(by_hand, key=by_hand.__getitem__)), d)
    assert 1 < d < 7
    wide = best(machine(0.0), 0.5, gain=1.0)  # verification is free, steps are not: a bushy tree
    assert wide.top_k > 1 and wide.nodes == 48


def test_the_fastest_come_first() -> None:
    found = predict(machine(0.05), WIDTHS, chances(0.7, 0.3))  # type: ignore[arg-type]
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)


def test_only_what_was_measured_is_predicted() -> None:
    costs = Costs(1, 1.0, {1: 1.0, 17: 1.5}, {1: 0.1, 4: 0.2}, 0.0, 0.0)
    shapes = [one.shape for one in predict(costs, (1, 2, 4), chances(0.7))]  # type: ignore[arg-type]
    assert max(shape.nodes for shape in shapes) == 16 and {shape.top_k for shape in shapes} == {1, 2, 4}
    with pytest.raises(ValueError, match="8 lies outside what was measured, 1 to 4"):
        predict(costs, WIDTHS, chances(0.7))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: 0.9, 4: 0.8}, BreakEven(1, "measured")),
        ({1: 1.5, 4: 1.0}, BreakEven(4, "measured")),
        ({1: 1.5, 4: 1.2, 16: 0.8}, BreakEven(8, "interpolated")),
        ({1: 1.2, 2: 0.8}, BreakEven(2, "measured")),  # nothing lies between
        ({4: 1.4, 8: 1.2}, BreakEven(16, "extrapolated")),
        ({1: 9.0, 4: 1.4, 8: 1.2}, BreakEven(16, "extrapolated")),  # the last two count
        ({4: 1.6, 8: 1.2}, BreakEven(12, "extrapolated")),  # 8 * 2 ** 0.5, upwards
        ({4: 1.4, 8: 1.35}, None),  # beyond reach
        ({1: 1.2, 4: 1.4}, None),
        ({1: 1.2, 4: 1.2}, None),
        ({1: 1.2}, None),
    ],
)
def test_the_break_even_batch(speedups: dict[int, float], expected: BreakEven | None) -> None:
    assert break_even(speedups) == expected


def test_the_reach_of_the_extrapolation() -> None:
    assert break_even({1: 3.0, 2: 2.0}) == BreakEven(4, "extrapolated")
    assert break_even({1: 4.0, 2: 3.0}) == BreakEven(2 * REACH, "extrapolated")
    assert break_even({1: 4.1, 2: 3.1}) is None
