import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.evaluation import statistics
from specdec.evaluation.record import Answer


def answer(prompt_id: str, accepted: tuple[int, ...], depth: int = 3, **changes: object) -> Answer:
    tokens = sum(accepted) + len(accepted)
    base = Answer(prompt_id, None, tokens, accepted, (depth,) * len(accepted), 1.0, 2.0, tokens, True)
    return base._replace(**changes)


@st.composite
def answer_lists(draw: st.DrawFn) -> list[Answer]:
    found = []
    for prompt in range(draw(st.integers(1, 6))):
        depths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
        accepted = tuple(draw(st.integers(0, depth)) for depth in depths)
        found.append(answer(str(prompt), accepted, drafted=tuple(depths)))
    return found


def test_acceptance_length_pools_passes_and_counts_the_bonus_token() -> None:
    # 3 + 1 tokens in 2 passes, 2 in 1 pass, 1 in 1 pass: a mean over prompts would be 5 / 3, over answers 1.625
    found = [answer("a", (2, 0)), answer("b", (1,)), answer("b", (0,))]
    assert statistics.acceptance_length(found).mean == 7 / 4


def test_positions_by_hand() -> None:
    positions = statistics.accepted_per_position([answer("a", (3, 0, 1)), answer("b", (1,))])
    assert positions.joint == [0.75, 0.25, 0.25]
    assert positions.conditional == [0.75, 1 / 3, 1.0]


def test_a_position_nobody_came_to_has_no_conditional_rate() -> None:
    positions = statistics.accepted_per_position([answer("a", (1, 0), depth=4)])
    assert positions.joint == [0.5, 0.0, 0.0, 0.0]
    assert positions.conditional == [0.5, 0.0, None, None]


def test_passes_without_a_draft_count() -> None:
    found = [answer("a", (2, 0), drafted=(2, 0))]
    assert statistics.acceptance_length(found).mean == 2.0
    assert statistics.accepted_per_position(found).joint == [0.5, 0.5]
    nothing_drafted = [answer("a", (0,), depth=0)]
    assert statistics.accepted_per_position(nothing_drafted) == ([], [])
    assert statistics.histogram(nothing_drafted) == [1]


def test_histogram_reaches_the_deepest_draft() -> None:
    assert statistics.histogram([answer("a", (0, 2, 2), depth=4)]) == [1, 0, 2, 0, 0]
    assert all(type(count) is int for count in statistics.histogram([answer("a", (1,))]))


@given(answer_lists())
def test_acceptance_length_is_one_plus_the_sum_of_joint_rates(found: list[Answer]) -> None:
    mean = statistics.acceptance_length(found, resamples=10).mean
    assert math.isclose(mean, 1 + sum(statistics.accepted_per_position(found).joint), rel_tol=1e-12)


@given(answer_lists())
def test_positions_are_what_their_names_say(found: list[Answer]) -> None:
    accepted = [count for one in found for count in one.accepted]
    positions = statistics.accepted_per_position(found)
    assert len(positions.joint) == len(positions.conditional) == max(max(one.drafted) for one in found)
    for k, (joint, conditional) in enumerate(zip(*positions, strict=True), start=1):
        reached = sum(count >= k for count in accepted)
        before = sum(count >= k - 1 for count in accepted)
        assert joint == reached / len(accepted)
        assert conditional == (reached / before if before else None)
    counts = statistics.histogram(found)
    assert counts == [accepted.count(k) for k in range(len(positions.joint) + 1)]


@settings(max_examples=40)
@given(answer_lists(), st.integers(0, 5))
def test_the_interval_is_seeded_and_within_the_prompts_own_means(found: list[Answer], seed: int) -> None:
    interval = statistics.acceptance_length(found, seed, resamples=200)
    assert interval == statistics.acceptance_length(found, seed, resamples=200)
    means = [statistics.acceptance_length([one]).mean for one in found]
    if len(found) == 1:
        assert interval[1:] == (None, None)
    else:
        assert min(means) - 1e-12 <= interval.low <= interval.high <= max(means) + 1e-12


def test_one_prompt_with_two_turns_is_still_one_prompt() -> None:
    found = [answer("a", (0, 1)), answer("a", (3, 3))]
    assert statistics.acceptance_length(found) == (11 / 4, None, None)


def test_the_bootstrap_resamples_prompts_not_passes() -> None:
    found = [answer(str(index), (3,) * 50 if index % 2 else (0,) * 50) for index in range(8)]
    low, high = statistics.acceptance_length(found)[1:]
    # 400 passes taken as independent would give an interval of about 0.3
    assert high - low > 1.5


def test_the_interval_does_not_depend_on_the_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [answer(str(index), (index % 4, 1)) for index in range(12)]
    at_once = statistics.acceptance_length(found, resamples=500)
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 12 * 7)
    assert statistics.acceptance_length(found, resamples=500) == at_once


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """40 prompts, each with its own acceptance rate; the true pooled mean is known. Normally 92 to 95 %."""
    generator = np.random.default_rng(0)
    truth, covered, trials = 1 + 5 * 0.6, 0, 300
    for trial in range(trials):
        found = []
        for prompt in range(40):
            rate = generator.beta(6, 4)  # mean 0.6, and it differs by prompt
            accepted = tuple(generator.binomial(5, rate, size=10).tolist())
            found.append(answer(str(prompt), accepted, depth=5))
        low, high = statistics.acceptance_length(found, seed=trial, resamples=500)[1:]
        covered += low <= truth <= high
    assert 0.89 <= covered / trials <= 0.98


def test_rates_pool_tokens_over_seconds() -> None:
    found = [
        answer("a", (1,), tokens=30, seconds=1.0, plain_tokens=30, plain_seconds=3.0),
        answer("b", (1,), tokens=10, seconds=3.0, plain_tokens=12, plain_seconds=4.0),
    ]
    rates = statistics.tokens_per_second(found)
    assert rates == (10.0, 6.0)
    assert rates.speedup == 10 / 6
    per_prompt = statistics.speedup_per_prompt(found)
    assert per_prompt.mean == pytest.approx((3 + 10 / 9) / 2)
    assert 10 / 9 <= per_prompt.low < per_prompt.high <= 3


def test_turns_of_a_prompt_share_one_speedup() -> None:
    found = [
        answer("a", (1,), tokens=10, seconds=1.0, plain_tokens=10, plain_seconds=1.0),
        answer("a", (1,), tokens=10, seconds=1.0, plain_tokens=10, plain_seconds=3.0),
    ]
    assert statistics.speedup_per_prompt(found) == (2.0, None, None)


def test_nothing_is_made_up_where_plain_decoding_was_not_measured() -> None:
    found = [answer("a", (1,), plain_seconds=0.0, plain_tokens=0)]
    rates = statistics.tokens_per_second(found)
    assert rates == (2.0, None)
    assert rates.speedup is None
    assert statistics.speedup_per_prompt(found) is None
    assert statistics.tokens_per_second([]) == (None, None)
    assert statistics.Rates(3.0, 0.0).speedup is None


def test_prompts_without_a_pass_do_not_enter() -> None:
    found = [answer("a", (1,)), answer("b", ())]
    assert statistics.acceptance_length(found) == (2.0, None, None)
    for bad in ([], [answer("b", ())]):
        with pytest.raises(ValueError, match="no target pass"):
            statistics.acceptance_length(bad)
        with pytest.raises(ValueError, match="no target pass"):
            statistics.accepted_per_position(bad)


@pytest.mark.parametrize("drafted", [(2,), (2, 0)])
def test_impossible_records_are_caught(drafted: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        statistics.acceptance_length([answer("a", (1, 1), drafted=drafted)])
