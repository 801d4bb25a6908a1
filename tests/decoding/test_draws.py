"""Draws have the laws they should, and races are exact.

Legend: V vocabulary, M draws.
"""

import pytest
import torch

from specdec.decoding.draws import draw, draw_distinct, draw_repeatedly
from specdec.decoding.rules import OneHot, WithoutReplacement, WithReplacement
from tests.decoding.rules.test_statistics import p_value

LAW = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25])
M = 400_000


def race(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed))


def test_a_draw_has_the_law() -> None:
    counts = torch.bincount(draw(LAW, race(M, 5)), minlength=5)
    assert counts[2] == 0 and p_value(counts.double(), M * LAW.double()) > 1e-6
    assert torch.equal(draw(7 * LAW, race(9, 5)), draw(LAW, race(9, 5)))


def test_the_earliest_at_its_own_pace_wins() -> None:
    """0.4 / t against 0.3 / 1: the winner changes at t = 4/3."""
    for time, winner in ((1.333, 1), (1.334, 3)):
        assert draw(LAW, torch.tensor([9.0, time, 1e-9, 1.0, 9.0])) == winner


def test_a_time_of_zero_makes_no_nan() -> None:
    assert draw(LAW, torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])) == 3


def test_distinct_draws_are_sequential_draws_from_what_is_left() -> None:
    pairs = draw_distinct(LAW, race(M, 5), 2)
    law = LAW.double()
    wanted = law[:, None] * law / (1 - law)[:, None]
    wanted.fill_diagonal_(0)
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).double()
    assert counts[wanted.flatten() == 0].sum() == 0
    assert p_value(counts, M * wanted.flatten()) > 1e-6


def test_after_the_support_come_tokens_of_no_probability() -> None:
    few = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    drawn = draw_distinct(few, race(1000, 5), 4)
    assert {1, 3} == set(drawn[:, :2].flatten().tolist())
    assert set(drawn[:, 2:].flatten().tolist()) <= {0, 2, 4}


def test_repeated_draws_are_independent() -> None:
    pairs = draw_repeatedly(LAW, race(M, 2, 5))
    law = LAW.double()
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).double()
    assert p_value(counts, M * (law[:, None] * law).flatten()) > 1e-6


@pytest.mark.parametrize("width", [1, 3])
def test_rules_draw_their_own_children(width: int) -> None:
    law = LAW.expand(6, 5)
    races = race(6, 3, 5)
    assert OneHot().races(width) == 0 and WithReplacement().races(width) == width
    assert WithoutReplacement().races(width) == 1
    assert torch.equal(OneHot().children(law, width, races[:, :0]), torch.tensor([[1, 3, 4][:width]] * 6))
    assert torch.equal(WithReplacement().children(law, width, races), draw_repeatedly(law, races[:, :width]))
    assert torch.equal(WithoutReplacement().children(law, width, races), draw_distinct(law, races[:, 0], width))
