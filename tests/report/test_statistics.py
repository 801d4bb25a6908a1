"""Intervals over prompts: against closed forms, and against prompts of a known truth."""

import numpy as np
import pytest
from scipy import stats

from specdec.report.statistics import LENGTH, SHARE, Array, interval, measured, ratio


def test_the_interval_of_a_mean_is_student_s_t() -> None:
    values = np.random.default_rng(1).normal(size=7)
    found = interval(np.stack([values, np.ones(7)], axis=1))
    known = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found == (
        pytest.approx(values.mean()),
        pytest.approx(known.low),
        pytest.approx(known.high),
    )


def test_the_interval_of_a_ratio_is_that_of_its_residuals() -> None:
    """Of many prompts, the linearised ratio's (Cochran, Sampling Techniques, 6.4)."""
    draw = np.random.default_rng(0)
    below_P = draw.uniform(5, 60, size=400)
    above_P = below_P * draw.lognormal(sigma=0.5, size=400)
    found, value = interval(np.stack([above_P, below_P], axis=1)), above_P.sum() / below_P.sum()
    error = np.std(above_P - value * below_P, ddof=1) / below_P.mean() / 20
    half = stats.t.ppf(0.975, 399) * error
    assert found is not None and found.high is not None
    assert found.mean == pytest.approx(value) and found.high - found.mean == pytest.approx(
        half, rel=0.01
    )


def test_no_interval_from_one_prompt_and_nothing_from_none() -> None:
    assert interval(np.array([[3.0, 2.0]])) == (1.5, None, None)
    assert interval(np.zeros((0, 2))) is None


def test_prompts_that_all_say_the_same_have_an_interval_of_no_width() -> None:
    assert interval(np.full((4, 2), 3.0)) == (1.0, 1.0, 1.0)


def test_an_interval_ends_at_the_range_of_its_statistic() -> None:
    found = interval(np.array([[1.0, 1], [1, 1], [0, 1]]), bounds=SHARE)
    assert found == (pytest.approx(2 / 3), 0.0, 1.0)
    found = interval(np.array([[5.0, 1], [1, 1]]), bounds=LENGTH)
    assert found is not None and found.low == 1.0 and found.high is not None and found.high > 5


def test_what_is_not_defined_is_not_told() -> None:
    none = {"mean": None, "low": None, "high": None}
    assert measured(np.zeros((3, 2))) == none == measured(np.zeros((0, 2)))
    assert measured(np.array([[3.0, 4], [0, 0]])) == {"mean": 0.75, "low": None, "high": None}
    # all of the second pair is one prompt's
    pair = np.array([[1.0, 2, 1, 2], [1, 2, 0, 0], [1, 2, 0, 0]])
    assert measured(pair, lambda x: x[..., 2] / x[..., 3]) == {
        "mean": 0.5,
        "low": None,
        "high": None,
    }


@pytest.mark.parametrize(("prompts", "least"), [(6, 0.91), (18, 0.93), (40, 0.93)])
def test_an_interval_holds_the_truth_as_often_as_it_says(prompts: int, least: float) -> None:
    """Prompts of 128 tokens, chains of 5, rates of acceptance with a long tail."""
    generator, trials = np.random.default_rng(0), 2000

    def drawn(*count: int) -> Array:
        rate = generator.beta(1.2, 2.5, size=count) * 0.98
        committed = np.minimum(
            generator.geometric(1 - rate[..., None], size=(*count, 128)), 6
        ).cumsum(-1)
        passes = (committed < 128).sum(-1) + 1
        last = np.take_along_axis(committed, passes[..., None] - 1, -1)[..., 0]
        return np.stack([last, passes], axis=-1).astype(float)

    truth, held = float(ratio(drawn(100_000).sum(0))), 0
    for sums_P2 in drawn(trials, prompts):
        found = interval(sums_P2)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert 0.97 > held / trials > least
