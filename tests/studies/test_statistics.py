"""Intervals, p-values, corrections, power and effects: against closed forms, and against studies of a known truth."""

import itertools

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import MODELS, figures, study, truth
from specdec.studies.statistics import (
    SHARE,
    Estimate,
    Linear,
    add_verdicts,
    detectable,
    effects,
    estimate,
    holm,
    pooled,
    spread,
    weighted,
)

STUDIES = 200
AXES = {"a": ["0", "1"], "b": ["0", "1"], "c": ["0", "1"]}
BASE = {"a": "0", "b": "0", "c": "0"}


def figure(added_SP: np.ndarray, value: float = 0.0) -> Linear:
    return Linear(value, added_SP - added_SP.mean())


def drawn(seeds: int = 3, prompts: int = 10, of_seeds: float = 1.0, of_prompts: float = 1.0) -> np.ndarray:
    draw = np.random.default_rng(1)
    rows, columns = of_seeds * draw.normal(size=(seeds, 1)), of_prompts * draw.normal(size=(1, prompts))
    return rows + columns + draw.normal(size=(seeds, prompts))


def test_mean_squares_are_those_of_a_two_way_table() -> None:
    values = drawn()
    found = spread(values)
    squares = (found.of_seeds * 2, found.of_prompts * 9, found.of_rest * 18)
    assert sum(squares) == pytest.approx(((values - values.mean()) ** 2).sum())
    assert found.of_seeds == pytest.approx(10 * values.mean(1).var(ddof=1))
    assert found.of_prompts == pytest.approx(3 * values.mean(0).var(ddof=1))


def test_where_prompts_do_not_matter_it_is_the_t_test_over_seeds() -> None:
    values = 5 * drawn(of_prompts=0.0)
    values[1:] += [[20.0], [45.0]]
    found = estimate(figure(values, value=float(values.mean())), null=0.0)
    assert found.spread.beyond == 0
    known = stats.ttest_1samp(values.mean(1), 0.0)
    low, high = known.confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p_value == pytest.approx(known.pvalue)


def test_one_seed_is_the_t_test_over_prompts() -> None:
    values = drawn(seeds=1) + 0.7
    found = estimate(figure(values, value=float(values.mean())), null=0.0)
    known = stats.ttest_1samp(values[0], 0.0)
    assert found.low == pytest.approx(known.confidence_interval(0.95).low)
    assert found.p_value == pytest.approx(known.pvalue)


def test_seeds_that_agree_by_chance_do_not_make_it_vanish() -> None:
    values = drawn()
    values -= values.mean(1, keepdims=True)  # the seeds' own means are equal
    found = estimate(figure(values, value=0.1), null=0.0)
    alone = estimate(figure(values.reshape(1, -1), value=0.1))
    assert width(found) > 0.7 * width(alone)
    assert found.p_value is not None and found.p_value > 0.05


def width(found: Estimate) -> float:
    assert found.low is not None and found.high is not None
    return found.high - found.low


def test_the_p_value_is_the_level_at_which_the_interval_ends_at_the_null() -> None:
    found = estimate(figure(drawn(), value=0.8), null=0.0)
    assert found.p_value is not None
    assert found.spread.half_width(found.p_value) == pytest.approx(0.8, rel=1e-6)
    assert (found.p_value < 0.05) == (found.low is not None and found.low > 0)


def test_no_difference_and_no_spread() -> None:
    same = estimate(figure(np.zeros((3, 8))), null=0.0)
    assert same.p_value == 1.0 and same.low == same.high == 0.0
    shifted = estimate(Linear(0.5, np.zeros((3, 8))), null=0.0)
    assert shifted.p_value == 2.0**-7
    alone = estimate(Linear(0.5, np.zeros((1, 1))), null=0.0)
    assert alone.low is None and alone.p_value is None


def test_figures_are_differentiated_right() -> None:
    draw = np.random.default_rng(2)
    top, bottom, other = (draw.uniform(1, 2, size=(3, 4)) for _ in range(3))
    step = 1e-6

    def of(top: np.ndarray) -> Linear:
        one, two = pooled(top, bottom), pooled(other, bottom)
        assert one is not None and two is not None
        return weighted([one.over(two), one.minus(two)], [1.0, 0.5])

    more = top.copy()
    more[1, 2] += step
    slope = (of(more).value - of(top).value) / step
    added = of(top).added_SP
    assert added.mean() == pytest.approx(0, abs=1e-12)
    one, two = pooled(top, bottom), pooled(other, bottom)
    assert one is not None and two is not None
    # of the ratio and of half the difference by this prompt's top
    assert slope == pytest.approx((1 / two.value + 0.5) / bottom.sum(), rel=1e-4)
    assert pooled(top, np.zeros_like(bottom)) is None


def test_corrections_are_those_of_statsmodels() -> None:
    """``statsmodels.stats.multitest.multipletests`` 0.14, method ``holm``."""
    found = [0.01, 0.04, 0.03, 0.005, 0.6]
    assert holm(found) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.6])
    assert holm([]) == []
    rows = [{"value": -1, "p_value": 0.01}, {"value": 1, "p_value": None}, {"value": 1, "p_value": 0.06}]
    add_verdicts(rows)
    assert [row["p_holm"] for row in rows] == [pytest.approx(0.02), None, pytest.approx(0.06)]
    assert [row["verdict"] for row in rows] == ["lower", "not tested", "not told apart"]
    same = {"quantity": "chain of 5", "value": 0.2, "p_value": 0.01}
    rows = [same, {**same, "p_value": 0.04}, dict(same), {**same, "quantity": "static"}]
    add_verdicts(rows)  # the first and the third are one training under two names
    assert [row["p_holm"] for row in rows] == pytest.approx([0.03, 0.04, 0.03, 0.03])


def test_more_prompts_see_less() -> None:
    few, many = (detectable(spread(drawn(1, prompts))) for prompts in (10, 200))
    assert few is not None and many is not None and few > many
    assert detectable(spread(np.zeros((1, 1)))) is None


def test_an_interval_ends_where_the_figure_cannot_be() -> None:
    one = Linear(0.9, np.array([[-0.4, 0.3], [0.3, -0.2], [0.2, -0.2]]))
    free, share = estimate(one, 0.5), estimate(one, 0.5, SHARE)
    assert free.high is not None and free.high > 1 and share.high == 1
    assert (share.low, share.p_value) == (max(0.0, free.low or 0), free.p_value)


def grid(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]


def worth(arms: list[dict[str, str]], of: dict[str, float]) -> dict[str, float]:
    """The effects where an arm is worth the sum of the named levels, ``a*b`` being that of both."""

    def value(arm: dict[str, str]) -> float:
        up = {axis for axis, level in arm.items() if level == "1"}
        return sum(each for names, each in of.items() if set(names.split("*")) <= up)

    figures = {frozenset(arm.items()): Linear(value(arm), np.zeros((3, 4))) for arm in arms}
    return {name: figure.value for name, figure in effects(AXES, BASE, figures).items()}


def test_a_grid_gives_every_effect_by_itself() -> None:
    told = {"a=1": 0.5625, "b=1": 0.3125, "c=1": 0, "a=1 x b=1": 0.125, "a=1 x c=1": 0, "b=1 x c=1": 0}
    assert worth(grid(AXES), {"a": 0.5, "b": 0.25, "a*b": 0.125}) == pytest.approx(told)


def test_a_missing_arm_takes_with_it_only_what_needs_it() -> None:
    arms = [BASE, BASE | {"a": "1"}, BASE | {"b": "1"}]
    assert list(worth(arms, {})) == ["a=1", "b=1"]
    most = [arm for arm in grid(AXES) if arm != {"a": "1", "b": "1", "c": "1"}]
    of = {"a": 0.5, "a*b": 0.25, "a*c": 0.125}
    found = worth(most, of)
    assert found["a=1 x b=1"] == 0.25  # at c=0 alone
    assert found["a=1"] == pytest.approx((0.5 + 0.75 + 0.625) / 3)


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
