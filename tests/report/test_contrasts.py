"""Intervals, p-values, corrections, power and effects: against closed forms, and against studies of a known truth."""

import itertools

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import MODELS, difference, figures, study, truth
from specdec.report.contrasts import (
    Estimate,
    Linear,
    add_verdicts,
    contrast,
    detectable,
    effects,
    estimate,
    holm,
    pooled,
    seed_error,
    spread,
    weighted,
)
from specdec.report.statistics import SHARE

STUDIES = 200
AXES = {"a": ["0", "1"], "b": ["0", "1"], "c": ["0", "1"]}
BASE = {"a": "0", "b": "0", "c": "0"}


def figure(added_SP: np.ndarray, value: float = 0.0) -> Linear:
    return Linear(value, added_SP - added_SP.mean())


def drawn(
    seeds: int = 3, prompts: int = 10, of_seeds: float = 1.0, of_prompts: float = 1.0
) -> np.ndarray:
    draw = np.random.default_rng(1)
    rows, columns = (
        of_seeds * draw.normal(size=(seeds, 1)),
        of_prompts * draw.normal(size=(1, prompts)),
    )
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
    assert found.df == 2
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


def grown(values_ASP: np.ndarray) -> list[Linear]:
    """Figures of arms: the mean of each."""
    return [Linear(float(own.mean()), own - own.mean()) for own in values_ASP]


def test_a_pooled_error_is_that_of_an_analysis_of_variance_with_seeds_as_blocks() -> None:
    """Against least squares on dummy variables of arms and seeds, prompts apart."""
    A, S, P = 4, 3, 5
    draw = np.random.default_rng(3)
    values_AS = draw.normal(size=(A, S)) + 2 * draw.normal(size=(1, S))
    arms = grown(np.repeat(values_AS[..., None], P, axis=2))
    error = seed_error(arms)
    assert error is not None and error.equal and (error.df, error.arms) == (6, 4)
    at_A, at_S = np.indices((A, S)).reshape(2, -1)
    design = np.column_stack([np.eye(A)[at_A], np.eye(S)[at_S][:, 1:]])
    fitted, squares, *_ = np.linalg.lstsq(design, values_AS.reshape(-1), rcond=None)
    found = estimate(arms[1].minus(arms[0]), 0.0, seeds=error, squares=2.0)
    known = np.sqrt(squares[0] / 6 * 2 / S)
    assert (found.error, found.df, found.pooled) == (pytest.approx(known), 6, 4)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(fitted[1] - fitted[0]) / known, 6))


def test_two_arms_and_an_arm_under_two_names_pool_nothing_more() -> None:
    arms = grown(np.random.default_rng(0).normal(size=(3, 3, 4)))
    one, two = seed_error([*arms, arms[0]]), seed_error(arms)
    assert (
        one == two
        and seed_error(arms[:2]) is None
        and seed_error([arms[0], arms[1], arms[0]]) is None
    )


def test_arms_that_vary_unequally_are_not_pooled() -> None:
    values = np.random.default_rng(1).normal(size=(6, 3, 1)) + np.zeros((6, 3, 5))
    values[:3] *= 30
    arms = grown(values)
    error = seed_error(arms)
    assert error is not None and not error.equal
    found = estimate(arms[1].minus(arms[0]), 0.0, seeds=error, squares=2.0)
    assert found == estimate(arms[1].minus(arms[0]), 0.0) and found.pooled == 0 and found.df == 2


def test_prompts_add_to_the_error_by_satterthwaite() -> None:
    values = drawn(of_prompts=3.0)
    found, three = estimate(figure(values)), spread(values)
    assert three.of_prompts > three.of_rest
    variance = three.of_seeds + three.of_prompts - three.of_rest
    parts = three.of_seeds**2 / 2 + three.of_prompts**2 / 9 + three.of_rest**2 / 18
    assert found.error == pytest.approx(np.sqrt(variance / 30)) and found.df == pytest.approx(
        variance**2 / parts
    )


def test_no_spread_at_all() -> None:
    shifted = estimate(Linear(0.5, np.zeros((3, 8))), null=0.0)
    assert shifted.p_value == 2.0**-7
    alone = estimate(Linear(0.5, np.zeros((1, 1))), null=0.0)
    assert alone.low is None and alone.p_value is None and detectable(alone) is None


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
    rows = [
        {"value": -1, "p_value": 0.01},
        {"value": 1, "p_value": None},
        {"value": 1, "p_value": 0.06},
    ]
    add_verdicts(rows)
    assert [row["p_holm"] for row in rows] == [pytest.approx(0.02), None, pytest.approx(0.06)]
    assert [row["verdict"] for row in rows] == ["lower", "not tested", "not significant"]
    same = {"quantity": "chain of 5", "value": 0.2, "p_value": 0.01}
    rows = [same, {**same, "p_value": 0.04}, dict(same), {**same, "quantity": "static"}]
    add_verdicts(rows)  # the first and the third are one training under two names
    assert [row["p_holm"] for row in rows] == pytest.approx([0.03, 0.04, 0.03, 0.03])


def test_what_is_detectable_is_found_in_four_of_five_studies() -> None:
    """By the noncentral t: 5.65 standard errors with 2 degrees of freedom, 2.80 with many."""
    for df, errors in ((2, 5.653), (6, 3.367), (10_000, 2.802)):
        found = Estimate(0.0, -1.0, 1.0, 1.0, 0.5, df, 0, 3, 4)
        size = detectable(found)
        assert (
            size is not None
            and size[0] == pytest.approx(0.5 * errors, rel=2e-3)
            and size[1] < size[0] < size[2]
        )
        drawn_t = stats.nct.rvs(df, size[0] / 0.5, size=20_000, random_state=0)
        assert (drawn_t > stats.t.isf(0.025, df)).mean() == pytest.approx(0.8, abs=0.01)
    one, many = detectable(found), detectable(found, tests=10)
    assert one is not None and many is not None and many[0] > one[0]


def test_an_interval_ends_where_the_figure_cannot_be() -> None:
    one = Linear(0.9, np.array([[-0.4, 0.3], [0.3, -0.2], [0.2, -0.2]]))
    free, share = estimate(one, 0.5), estimate(one, 0.5, SHARE)
    assert free.high is not None and free.high > 1 and share.high == 1
    assert (share.low, share.p_value) == (max(0.0, free.low or 0), free.p_value)


def grid(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())]


def worth(arms: list[dict[str, str]], of: dict[str, float]) -> dict[str, float]:
    """The effects where an arm is worth the sum of the named levels, ``a*b`` being that of both."""

    def value(arm: frozenset[tuple[str, str]]) -> float:
        up = {axis for axis, level in arm if level == "1"}
        return sum(each for names, each in of.items() if set(names.split("*")) <= up)

    found = effects(AXES, BASE, [frozenset(arm.items()) for arm in arms])
    return {
        name: sum(weight * value(arm) for arm, weight in weights.items()) for name, weights in found
    }


def test_a_contrast_takes_what_it_names_and_averages_the_rest() -> None:
    arms = [frozenset(arm.items()) for arm in grid(AXES)]
    two = contrast(arms, [({"a": "1", "b": "1"}, {"a": "0", "b": "0"})])
    assert sorted(two.values()) == [-0.5, -0.5, 0.5, 0.5]
    assert {weight for arm, weight in two.items() if ("a", "1") in arm} == {0.5}
    assert contrast(arms[:1], [({"a": "1"}, {"a": "0"})]) == {}


def test_a_grid_gives_every_effect_by_itself() -> None:
    told = {
        "a=1": 0.5625,
        "b=1": 0.3125,
        "c=1": 0,
        "a=1 x b=1": 0.125,
        "a=1 x c=1": 0,
        "b=1 x c=1": 0,
    }
    assert worth(grid(AXES), {"a": 0.5, "b": 0.25, "a*b": 0.125}) == pytest.approx(told)


def test_a_missing_arm_takes_with_it_only_what_needs_it() -> None:
    arms = [BASE, BASE | {"a": "1"}, BASE | {"b": "1"}]
    assert list(worth(arms, {})) == ["a=1", "b=1"]
    most = [arm for arm in grid(AXES) if arm != {"a": "1", "b": "1", "c": "1"}]
    of = {"a": 0.5, "a*b": 0.25, "a*c": 0.125}
    found = worth(most, of)
    assert found["a=1 x b=1"] == 0.25  # at c=0 alone
    assert found["a=1"] == pytest.approx((0.5 + 0.75 + 0.625) / 3)


def resampled(model: int, better: float, arms: int = 2) -> list[Estimate]:
    """The paired difference in 200 studies of three seeds and 40 prompts, drawn anew in each."""
    draw = np.random.default_rng([model, arms])
    return [
        difference(figures(*study(MODELS[model], arms, 3, 40, better, draw)))
        for _ in range(STUDIES)
    ]


@pytest.mark.parametrize(("model", "arms"), [(0, 2), (3, 2), (3, 6)])
def test_two_copies_of_a_drafter_are_not_told_apart(model: int, arms: int) -> None:
    held = sum((each.p_value or 0) >= 0.05 for each in resampled(model, 0.0, arms))
    assert 0.91 * STUDIES <= held <= 0.99 * STUDIES  # 95 % within what 200 studies can say


def test_a_drafter_made_worse_by_a_known_amount_is_found() -> None:
    worse = -0.4
    _, known = truth(MODELS[3], worse)
    assert known < -0.3
    found = resampled(3, worse, arms=6)
    assert sum((each.p_value or 1) < 0.05 and each.value < 0 for each in found) >= 0.9 * STUDIES
    held = sum((each.low or 0) <= known <= (each.high or 0) for each in found)
    assert held >= 0.91 * STUDIES
