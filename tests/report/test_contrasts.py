"""Intervals, p-values, corrections, power and effects: against closed forms, and against studies of a known truth."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.coverage import MODELS, difference, figures, study, truth
from specdec.report.contrasts import (
    Estimate,
    Linear,
    add_verdicts,
    contrast,
    contrasted,
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
HALVES = [-0.5, -0.5, 0.5, 0.5]


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
    A, S, P = 4, 5, 5
    draw = np.random.default_rng(4)
    values_AS = draw.normal(size=(A, S)) + 2 * draw.normal(size=(1, S))
    arms = grown(np.repeat(values_AS[..., None], P, axis=2))
    error = seed_error(arms, HALVES)
    assert error is not None and error.arms == 4
    at_A, at_S = np.indices((A, S)).reshape(2, -1)
    design = np.column_stack([np.eye(A)[at_A], np.eye(S)[at_S][:, 1:]])
    fitted, squares, *_ = np.linalg.lstsq(design, values_AS.reshape(-1), rcond=None)
    found = contrasted(arms, HALVES)
    assert found.value == pytest.approx((fitted[2:4].sum() - fitted[:2].sum()) / 2)
    rest_AS = values_AS - values_AS.mean(0) - values_AS.mean(1, keepdims=True) + values_AS.mean()
    # unequal variances of a two-way table: Ehrenberg, Biometrika 37, 1950
    square_A = (rest_AS**2).sum(1) / (S - 1)
    own_A = A / (A - 2) * (square_A - square_A.sum() / (A * (A - 1)))
    own_A = np.maximum(own_A, 0)
    df = (S - 1) * (A - 1) / A * own_A.sum() ** 2 / (own_A**2).sum()
    known = np.sqrt(squares[0] / ((A - 1) * (S - 1)) / S)
    assert (found.error, found.df, found.pooled) == (pytest.approx(known), pytest.approx(df), 4)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(found.value) / known, df))


@given(st.integers(2, 8), st.integers(2, 6), st.integers(0, 2**32 - 1), st.floats(1, 100))
def test_seeds_have_their_own_degrees_of_freedom_unless_arms_are_pooled(
    arms: int, seeds: int, number: int, noisy: float
) -> None:
    """S - 1 of the contrast alone; pooled never fewer, and never more than arms and seeds have."""
    draw = np.random.default_rng(number)
    values = draw.normal(size=(arms, seeds, 4))
    values[: arms // 2] *= noisy
    weights = [-1.0, *np.full(arms - 1, 1 / (arms - 1))]
    error = seed_error(grown(values), weights)
    assert error is not None
    if error.arms:
        assert arms > 2 and seeds - 1 <= error.df <= (arms - 1) * (seeds - 1) + 1e-9
    else:
        alone = estimate(weighted(grown(values), weights))
        assert error.df == seeds - 1 == alone.df
        assert contrasted(grown(values), weights).error == pytest.approx(alone.error)


def test_an_arm_without_weight_is_in_no_contrast() -> None:
    arms = grown(np.random.default_rng(0).normal(size=(4, 3, 5)))
    with pytest.raises(ValueError, match="leave it out"):
        seed_error(arms, [-1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("seeds", [3, 5])
def test_one_noisy_arm_gives_no_more_false_verdicts_than_promised(seeds: int) -> None:
    """4,000 null studies of four arms of which one varies ten times as much; the arms' squares alone gave 1.2 %."""
    draw = np.random.default_rng(11)
    noise_A = np.array([10.0, 1.0, 1.0, 1.0])[:, None, None]
    level = 0.05 / 8  # Holm's first step of eight contrasts
    false = 0
    for _ in range(4000):
        values_ASP = np.repeat(noise_A * draw.normal(size=(4, seeds, 1)), 2, axis=2)
        found = contrasted(grown(values_ASP), HALVES)
        assert found.p_value is not None
        false += found.p_value < level
    assert false / 4000 <= level + 3 * np.sqrt(level / 4000)


def test_arms_that_share_a_seed_s_luck_are_not_pooled() -> None:
    """Each half of the arms has the luck of its own: only the contrast's seeds show how the halves differ."""
    draw = np.random.default_rng(1)
    luck = np.repeat(draw.normal(size=(2, 5, 1)), 2, axis=0)
    arms = grown(luck + 0.1 * draw.normal(size=(4, 5, 6)))
    across, within = contrasted(arms, HALVES), contrasted(arms, [-0.5, 0.5, -0.5, 0.5])
    assert (across.pooled, across.df) == (0, 4) and within.pooled == 4
    assert across.error == pytest.approx(estimate(weighted(arms, HALVES)).error)


def test_seeds_and_prompts_have_a_part_each_in_the_p_value() -> None:
    values = drawn(of_prompts=3.0)
    found, three = estimate(figure(values, 1.0), null=0.0), spread(values)
    assert three.of_prompts > three.of_rest
    variance = three.of_seeds + three.of_prompts - three.of_rest
    share, size = three.of_seeds / variance, 1 / np.sqrt(variance / 30)
    known = share * 2 * stats.t.sf(size, 2) + (1 - share) * 2 * stats.t.sf(size, 9)
    assert found.error == pytest.approx(np.sqrt(variance / 30))
    assert found.p_value == pytest.approx(known)
    # the interval ends where the p-value is 0.05
    assert found.low is not None
    assert estimate(figure(values, 1.0), found.low).p_value == pytest.approx(0.05)


def test_seeds_that_lie_close_together_by_chance_do_not_make_a_difference_sure() -> None:
    """Satterthwaite's degrees of freedom would be nearly those of the prompts."""
    values = drawn(of_seeds=0.0, of_prompts=3.0)
    found = estimate(figure(values, 1.0), null=0.0)
    assert found.error is not None and found.p_value is not None and found.seeds_part is not None
    least = found.seeds_part * 2 * stats.t.sf(1 / found.error, 2)
    assert found.df == 2 and found.p_value > least > 0
    single = estimate(figure(values[:1], 1.0), null=0.0)
    assert single.parts == [(1.0, 9.0)]  # one seed: over prompts alone


def test_no_spread_at_all() -> None:
    shifted = estimate(Linear(0.5, np.zeros((3, 8))), null=0.0)
    assert shifted.p_value == 2.0**-2  # as the seeds' signs have it
    assert shifted.low is None and shifted.high is None and detectable(shifted) is None
    assert estimate(Linear(0.5, np.zeros((1, 8))), null=0.0).p_value == 2.0**-7
    alone = estimate(Linear(0.5, np.zeros((1, 1))), null=0.0)
    assert alone.low is None and alone.p_value is None and detectable(alone) is None


def test_a_seed_without_data_leaves_no_figure() -> None:
    counts = np.array([[3.0, 2.0], [0.0, 4.0]])
    assert pooled(counts, counts) is not None
    counts[1] = 0.0
    assert pooled(counts, counts) is None
    nothing = Linear(0.0, np.zeros((2, 2)))
    assert Linear(1.0, np.zeros((2, 2))).over(nothing) is None


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_shares_and_their_differences_stay_where_they_can_be(
    seeds: int, prompts: int, number: int, chance: float
) -> None:
    """However few passes there are."""
    draw = np.random.default_rng(number)
    passes = draw.integers(0, 3, size=(2, seeds, prompts)).astype(float)
    arms = [pooled(draw.binomial(own.astype(int), chance).astype(float), own) for own in passes]
    shares = [arm for arm in arms if arm is not None]
    found = [(estimate(arm, bounds=SHARE), 0.0) for arm in shares]
    if len(shares) == 2:
        found.append((contrasted(shares, [1.0, -1.0], SHARE), -1.0))
    for each, least in found:
        assert (each.low is None) == (each.high is None)
        assert each.low is None or (
            each.error and least <= each.low <= each.value <= each.high <= 1
        )


def test_figures_are_differentiated_right() -> None:
    draw = np.random.default_rng(2)
    top, bottom, other = (draw.uniform(1, 2, size=(3, 4)) for _ in range(3))
    step = 1e-6

    def of(top: np.ndarray) -> Linear:
        one, two = pooled(top, bottom), pooled(other, bottom)
        assert one is not None and two is not None
        ratio = one.over(two)
        assert ratio is not None
        return weighted([ratio, one.minus(two)], [1.0, 0.5])

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
        found = Estimate(0.0, -1.0, 1.0, 1.0, 0.5, 1.0, df, 0, 3, 4)
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
