"""The test of a fall keeps its promise on drawn windows, and sees falls; a fault in it is seen, too."""

import math

import numpy as np
import pytest

from specdec.report.sequential import TOTAL, FallTest, variance_per_pass

LOW = 1.2  # accepted drafts a pass
SPREAD = 8.0  # variance of a window's mean times its passes
PASSES = 250


def windows(
    random: np.random.Generator, mean: float, number: int, passes: int = PASSES
) -> np.ndarray:
    """Means of windows, drawn with a long upper tail."""
    variance = SPREAD / passes
    return random.gamma(mean**2 / variance, variance / mean, number)


def first_verdict(test: FallTest, means: np.ndarray, passes: int = PASSES) -> int | None:
    for index, mean in enumerate(means):
        test.add(passes, passes * mean)
        if test.has_fallen:
            return index
    return None


def test_false_verdicts_are_rare_at_the_edge_of_what_is_promised() -> None:
    random = np.random.default_rng(0)

    def false(spread: float, number: int, passes: int) -> int:
        drawn = [windows(random, LOW, number, passes) for _ in range(60)]
        tests = [first_verdict(FallTest(LOW, spread), means, passes) for means in drawn]
        return sum(verdict is not None for verdict in tests)

    assert false(SPREAD, 90, PASSES) <= 3
    assert false(SPREAD, 90, 25) <= 3
    # planted: a variance that takes alike passes for independent; seven windows are too few to notice
    assert false(SPREAD / 1000, 7, 25) > 12


@pytest.mark.parametrize(("mean", "most"), [(0.02, 12), (0.6, 25), (1.0, 300)])
def test_a_fall_is_seen_after_an_hour_and_dated(mean: float, most: int) -> None:
    random = np.random.default_rng(1)
    test = FallTest(LOW, SPREAD)
    assert first_verdict(test, windows(random, 1.3, 720)) is None
    index = first_verdict(test, windows(random, mean, 2000))
    assert index is not None and index < most
    assert abs(test.begin - 720) <= (3 if mean < 0.7 else 60)


def test_a_restart_forgets_the_evidence() -> None:
    test = FallTest(LOW, SPREAD)
    assert first_verdict(test, np.full(40, 0.5)) is not None
    seen = test.windows
    test.restart()
    assert test.log_evidence == -math.inf and test.begin == test.windows == seen


def test_weights_sum_to_less_than_one() -> None:
    start = np.arange(2, 10**6)
    rest = 1 / math.log(10**6)  # the integral of 1 / (s log(s)^2) from there on, nearly
    total = float((1 / (start * np.log(start) ** 2)).sum()) + rest
    assert 0.999 < total / TOTAL <= 1


def test_variance_sees_answers_that_span_windows() -> None:
    random = np.random.default_rng(2)
    level = np.repeat(random.normal(1.3, 0.2, 100), 8)  # of eight windows at a time
    means = level + random.normal(0, 0.05, 800)
    windows_W2 = np.stack([np.full(800, PASSES), PASSES * means], axis=1)
    # of neighbors alone it would be 0.05**2 * PASSES and an eighth of the levels' part
    assert variance_per_pass(windows_W2) > 0.8 * 8 * 0.2**2 * PASSES
    assert variance_per_pass(windows_W2[:7]) == 0


def test_windows_without_variance_are_no_division_by_zero() -> None:
    test = FallTest(LOW, 0.0)
    assert first_verdict(test, np.full(20, LOW)) is None and math.isfinite(test.log_evidence)
