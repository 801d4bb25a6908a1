import numpy as np
import pytest

from specdec.evaluation import statistics
from specdec.evaluation.statistics import Array, interval, measured, ratio


def test_the_interval_of_a_mean_is_what_theory_says() -> None:
    values = np.random.default_rng(1).normal(size=400)
    found = interval(np.stack([values, np.ones(400)], axis=1))
    assert found is not None and found.mean == pytest.approx(values.mean())
    error = values.std() / 20
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.01
    )


def percentiles(sums_PF: Array, seed: int, resamples: int) -> list[float]:
    """The plain bootstrap's interval."""
    drawn_RP = np.random.default_rng(seed).integers(len(sums_PF), size=(resamples, len(sums_PF)))
    return list(np.quantile(ratio(sums_PF[drawn_RP].sum(1)), [0.025, 0.975]))


def test_a_skewed_sample_moves_the_interval_up() -> None:
    """Of BCa: the long tail to the right makes the upper end the farther one, by more than percentiles make it."""
    values = np.random.default_rng(0).lognormal(sigma=1.0, size=40)
    sums_P2 = np.stack([values, np.ones(40)], axis=1)
    found = interval(sums_P2)
    low, high = percentiles(sums_P2, statistics.SEED, statistics.RESAMPLES)
    assert found is not None and found.low > low + 0.01 and found.high > high + 0.05


def test_no_interval_from_one_prompt_and_nothing_from_none() -> None:
    assert interval(np.array([[3.0, 2.0]])) == (1.5, None, None)
    assert interval(np.zeros((0, 2))) is None


def test_prompts_that_all_say_the_same_have_an_interval_of_no_width() -> None:
    assert interval(np.full((4, 2), 3.0)) == (1.0, 1.0, 1.0)


def test_what_is_not_defined_is_not_told() -> None:
    none = {"mean": None, "low": None, "high": None}
    assert measured(np.zeros((3, 2))) == none == measured(np.zeros((0, 2)))
    assert measured(np.array([[3.0, 4], [0, 0]])) == {"mean": 0.75, "low": None, "high": None}
    pair = np.array([[1.0, 2, 1, 2], [1, 2, 0, 0], [1, 2, 0, 0]])  # all of the second pair is one prompt's
    assert measured(pair, lambda x: x[..., 2] / x[..., 3]) == {"mean": 0.5, "low": None, "high": None}


def test_it_is_seeded_and_does_not_depend_on_the_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sums_P2 = np.random.default_rng(0).integers(1, 9, size=(13, 2)).astype(float)
    monkeypatch.setattr(statistics, "RESAMPLES", 501)
    at_once = interval(sums_P2)
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 13 * 7)
    assert interval(sums_P2) == at_once
    monkeypatch.setattr(statistics, "SEED", 1)
    assert interval(sums_P2) != at_once


@pytest.mark.parametrize(("prompts", "least"), [(10, 0.89), (18, 0.91)])
def test_it_holds_the_truth_more_often_than_percentiles_do(
    prompts: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 128 tokens, chains of 5, rates of acceptance with a long tail; docs/evaluate.md quotes this."""
    generator, truth, trials = np.random.default_rng(0), 0.0, 600
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)

    def drawn(count: int) -> Array:
        rate_P = generator.beta(1.2, 2.5, size=count) * 0.98
        committed_PQ = np.minimum(generator.geometric(1 - rate_P[:, None], size=(count, 128)), 6).cumsum(1)
        passes_P = (committed_PQ < 128).sum(1) + 1
        return np.stack([committed_PQ[np.arange(count), passes_P - 1], passes_P], axis=1).astype(float)

    truth, held = float(ratio(drawn(100_000).sum(0))), np.zeros(2)
    for seed in range(trials):
        sums_P2 = drawn(prompts)
        monkeypatch.setattr(statistics, "SEED", seed)
        found = interval(sums_P2)
        low, high = percentiles(sums_P2, seed, 1000)
        assert found is not None
        held += [found.low <= truth <= found.high, low <= truth <= high]
    bca, plain = held / trials
    assert 0.97 > bca > max(least, plain), (bca, plain)
