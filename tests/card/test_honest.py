"""The study's test says no difference where there is none, and finds one that is known."""

import numpy as np
import pytest

from benchmarks.coverage import MODELS, figures, study, truth
from specdec.card.crossed import Estimate, estimate
from specdec.card.linear import pooled

STUDIES = 200


def resampled(model: int, better: float, seeds: int = 3, prompts: int = 40) -> list[Estimate]:
    """The paired difference in 200 studies, seeds and prompts drawn anew in each."""
    draw = np.random.default_rng([model, seeds])
    counts = (study(MODELS[model], seeds, prompts, better, draw) for _ in range(STUDIES))
    return [estimate(figures(*each)[1], null=0.0) for each in counts]


@pytest.mark.parametrize("model", [0, 3])
def test_two_copies_of_a_drafter_are_not_told_apart(model: int) -> None:
    found = resampled(model, 0.0)
    assert sum((each.p_value or 0) >= 0.05 for each in found) >= 0.95 * STUDIES
    assert sum((each.low or 0) <= 0 <= (each.high or 0) for each in found) >= 0.95 * STUDIES


def test_a_drafter_made_worse_by_a_known_amount_is_found() -> None:
    worse = -0.4
    _, known = truth(MODELS[3], worse, np.random.default_rng(0))
    assert known < -0.3
    found = resampled(3, worse)
    assert sum((each.p_value or 1) < 0.05 and each.value < 0 for each in found) >= 0.9 * STUDIES
    held = sum((each.low or 0) <= known <= (each.high or 0) for each in found)
    assert held >= 0.93 * STUDIES  # 95 % within what 200 studies can say


def test_resamplings_of_one_drafter_s_answers_do_not_differ() -> None:
    """The same answers under two names: whichever seeds and prompts are drawn, the difference is none."""
    draw = np.random.default_rng(3)
    committed, passes = study(MODELS[4], 3, 40, 0.0, draw)
    for _ in range(20):
        at = np.ix_(draw.integers(3, size=3), draw.integers(40, size=40))
        one, two = (pooled(committed[0][at], passes[0][at]) for _ in range(2))
        assert one is not None and two is not None
        assert estimate(two.minus(one), null=0.0).p_value == 1.0
