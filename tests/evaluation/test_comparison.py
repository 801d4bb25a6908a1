import itertools
import math

import numpy as np
import pytest

from specdec.evaluation import metrics
from specdec.evaluation.comparison import compare
from specdec.evaluation.record import Answer
from tests.evaluation.made import answer, clustered

A = [answer("p", (1, 0)), answer("q", (2,)), answer("r", (0, 0, 1)), answer("q", (3, 0))]
B = [answer("q", (3, 3)), answer("p", (1, 1)), answer("r", (1, 0)), answer("q", (0,))]


def length(answers: list[Answer]) -> float:
    return 1 + sum(sum(one.accepted) for one in answers) / sum(len(one.accepted) for one in answers)


def test_by_hand() -> None:
    found = compare(A, B)
    assert (found.prompts, found.a, found.b) == (3, length(A), length(B))
    assert found.difference.mean == pytest.approx(length(B) - length(A))
    assert found.ratio.mean == pytest.approx(length(B) / length(A))
    metric = metrics.AcceptanceLength()
    metric.update(A)
    assert metric.compute().mean == found.a


def test_the_p_value_is_that_of_every_relabelling() -> None:
    observed, reached = abs(length(B) - length(A)), 0
    for swapped in itertools.product((False, True), repeat=3):
        of = dict(zip("pqr", swapped, strict=True))
        one = [x for x in A if not of[x.prompt_id]] + [x for x in B if of[x.prompt_id]]
        two = [x for x in B if not of[x.prompt_id]] + [x for x in A if of[x.prompt_id]]
        reached += abs(length(two) - length(one)) >= observed - 1e-12
    assert compare(A, B).p_value == reached / 8


def test_it_is_symmetrical() -> None:
    one, two = clustered(np.random.default_rng(3), 40, better=0.05)
    there, back = compare(one, two), compare(two, one)
    assert there.p_value == back.p_value and there.deviation == pytest.approx(back.deviation)
    assert there.difference.mean == pytest.approx(-back.difference.mean)
    assert (there.difference.low, there.difference.high) == pytest.approx((-back.difference.high, -back.difference.low))
    assert there.ratio.mean == pytest.approx(1 / back.ratio.mean)


def test_the_same_answers_do_not_differ() -> None:
    one, _ = clustered(np.random.default_rng(0), 20)
    found = compare(one, one[::-1])
    assert found.difference == (0.0, 0.0, 0.0) and found.p_value == 1.0 and found.deviation == 0
    assert found.prompts_needed(0.1) == 6


def test_pairing_sees_what_unpaired_intervals_do_not() -> None:
    """Prompts differ by far more than the drafters do."""
    one, two = clustered(np.random.default_rng(5), 60, better=0.06)
    found = compare(one, two)
    assert 0 < found.difference.low < 0.3 < found.difference.high and found.p_value < 0.01
    intervals = []
    for answers in (one, two):
        metric = metrics.AcceptanceLength()
        metric.update(answers)
        intervals.append(metric.compute())
    assert intervals[0].high > intervals[1].low


def test_without_a_difference_it_is_seen_as_seldom_as_promised() -> None:
    generator, trials = np.random.default_rng(0), 300
    found = [compare(*clustered(generator, 20), seed=trial, resamples=400) for trial in range(trials)]
    assert 0.02 <= sum(each.p_value < 0.05 for each in found) / trials <= 0.09
    assert 0.89 <= sum(each.difference.low <= 0 <= each.difference.high for each in found) / trials <= 0.98


@pytest.mark.parametrize("better", [0.06, 0.12])
def test_the_prompts_needed_give_the_power_promised(better: float) -> None:
    """The deviation from one large pilot; then evaluations with as many prompts as the formula says."""
    generator, trials = np.random.default_rng(1), 200
    pilot = compare(*clustered(generator, 1500, better), resamples=50)
    needed = pilot.prompts_needed(pilot.difference.mean)
    assert 6 < needed < 120
    seen = [compare(*clustered(generator, needed, better), resamples=300).p_value < 0.05 for _ in range(trials)]
    assert 0.70 <= sum(seen) / trials <= 0.90


def test_the_formula() -> None:
    found = compare(A, B)._replace(deviation=0.5)
    wanted = (1.959964 + 0.841621) ** 2 * 0.25 / 0.01 + 1.959964**2 / 2
    assert found.prompts_needed(0.1) == math.ceil(wanted) == 199
    for bad in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="detect is"):
            found.prompts_needed(bad)


def test_a_prompt_without_a_pass_is_no_pair() -> None:
    assert compare([*A, answer("s", ())], [*B, answer("s", ())]).prompts == 3
    for other in ([], B[:1]):
        with pytest.raises(ValueError, match="takes at least 2"):
            compare(A, other)
