import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.evaluation import metrics
from specdec.evaluation.answer_metric import AnswerMetric
from specdec.evaluation.metrics import decoding_metrics
from specdec.evaluation.record import Answer
from tests.evaluation.made import answer, answer_lists, clustered


def computed(kind: type[AnswerMetric], found: list[Answer], **options: Any) -> Any:
    metric = kind(**{"resamples": 200} | options)
    metric.update(found)
    return metric.compute()


def test_acceptance_length_pools_passes_and_counts_the_bonus_token() -> None:
    # 3 + 1 tokens in 2 passes, 2 in 1 pass, 1 in 1 pass: a mean over prompts would be 5 / 3, over answers 1.625
    found = [answer("a", (2, 0)), answer("b", (1,)), answer("b", (0,))]
    assert computed(metrics.AcceptanceLength, found).mean == 7 / 4
    assert computed(metrics.AcceptedDrafts, found).mean == 3 / 4
    assert computed(metrics.DraftAcceptanceRate, found).mean == 3 / 12


def test_positions_by_hand() -> None:
    positions = computed(metrics.AcceptedPerPosition, [answer("a", (3, 0, 1)), answer("b", (1,))])
    assert positions.joint == [0.75, 0.25, 0.25]
    assert positions.conditional == [0.75, 1 / 3, 1.0]


def test_a_position_nobody_came_to_has_no_conditional_rate() -> None:
    positions = computed(metrics.AcceptedPerPosition, [answer("a", (1, 0), depth=4)])
    assert positions.joint == [0.5, 0.0, 0.0, 0.0]
    assert positions.conditional == [0.5, 0.0, None, None]


def test_passes_without_a_draft_count() -> None:
    found = [answer("a", (2, 0), drafted=(2, 0))]
    assert computed(metrics.AcceptanceLength, found).mean == 2.0
    assert computed(metrics.AcceptedPerPosition, found).joint == [0.5, 0.5]
    nothing_drafted = [answer("a", (0,), depth=0)]
    assert computed(metrics.AcceptedPerPosition, nothing_drafted) == ([], [])
    assert computed(metrics.AcceptedHistogram, nothing_drafted) == [1]
    assert computed(metrics.DraftAcceptanceRate, nothing_drafted) is None
    assert computed(metrics.DraftAcceptanceRate, [*nothing_drafted, answer("b", (1,))]) == (1 / 3, None, None)


def test_the_histogram_reaches_the_deepest_draft() -> None:
    found = computed(metrics.AcceptedHistogram, [answer("a", (0, 2, 2), depth=4)])
    assert found == [1, 0, 2, 0, 0] and all(type(count) is int for count in found)


@given(answer_lists())
def test_identities(found: list[Answer]) -> None:
    """Acceptance length is 1 + Σ joint; joint is the product of the conditionals; the histogram adds up."""
    collection = decoding_metrics(only=("acceptance_length", "accepted_drafts", "accepted_per_position", "histogram"))
    collection.update(found)
    got = collection.compute()
    length, (joint, conditional) = got["acceptance_length"].mean, got["accepted_per_position"]
    assert math.isclose(length, 1 + sum(joint), rel_tol=1e-12)
    assert math.isclose(length, 1 + got["accepted_drafts"].mean, rel_tol=1e-12)
    product = 1.0
    for together, given_before in zip(joint, conditional, strict=True):
        product *= 0.0 if given_before is None else given_before
        assert math.isclose(product, together, rel_tol=1e-12)
    passes = [count for one in found for count in one.accepted]
    assert sum(got["histogram"]) == len(passes)
    assert math.isclose(sum(k * n for k, n in enumerate(got["histogram"])) / len(passes) + 1, length, rel_tol=1e-12)


@given(answer_lists())
def test_positions_are_what_their_names_say(found: list[Answer]) -> None:
    accepted = [count for one in found for count in one.accepted]
    positions = computed(metrics.AcceptedPerPosition, found)
    assert len(positions.joint) == len(positions.conditional) == max(max(one.drafted) for one in found)
    for k, (joint, conditional) in enumerate(zip(*positions, strict=True), start=1):
        reached = sum(count >= k for count in accepted)
        before = sum(count >= k - 1 for count in accepted)
        assert joint == reached / len(accepted)
        assert conditional == (reached / before if before else None)


@settings(max_examples=40)
@given(answer_lists(), st.integers(0, 5))
def test_the_interval_is_seeded_and_within_the_prompts_own_means(found: list[Answer], seed: int) -> None:
    interval = computed(metrics.AcceptanceLength, found, seed=seed)
    assert interval == computed(metrics.AcceptanceLength, found[::-1], seed=seed)
    names = {one.prompt_id for one in found}
    means = [computed(metrics.AcceptanceLength, [one for one in found if one.prompt_id == name]).mean for name in names]
    if len(names) == 1:
        assert interval[1:] == (None, None)
    else:
        assert min(means) - 1e-12 <= interval.low <= interval.high <= max(means) + 1e-12


def test_one_prompt_with_two_turns_is_still_one_prompt() -> None:
    assert computed(metrics.AcceptanceLength, [answer("a", (0, 1)), answer("a", (3, 3))]) == (11 / 4, None, None)


def test_the_bootstrap_resamples_prompts_not_passes() -> None:
    found = [answer(str(index), (3,) * 50 if index % 2 else (0,) * 50) for index in range(8)]
    low, high = computed(metrics.AcceptanceLength, found)[1:]
    assert high - low > 1.5  # 400 passes taken as independent would give about 0.3


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """40 prompts, each with its own acceptance rate; the true pooled mean is known."""
    generator, truth, covered, trials = np.random.default_rng(0), 1 + 5 * 0.6, 0, 300
    for trial in range(trials):
        low, high = computed(metrics.AcceptanceLength, clustered(generator, 40)[0], seed=trial, resamples=500)[1:]
        covered += low <= truth <= high
    assert 0.90 <= covered / trials <= 0.98


TWO = [
    answer("a", (1,), tokens=30, seconds=1.0, plain_tokens=30, plain_seconds=3.0),
    answer("b", (1,), tokens=10, seconds=3.0, plain_tokens=12, plain_seconds=4.0),
]


def test_rates_pool_tokens_over_seconds_and_prompts_have_ratios_of_their_own() -> None:
    assert computed(metrics.TokensPerSecond, TWO) == pytest.approx((10.0, 6.0))
    pooled, per_prompt = computed(metrics.Speedup, TWO), computed(metrics.SpeedupPerPrompt, TWO)
    assert pooled.mean == pytest.approx(10 / 6)
    assert per_prompt.mean == pytest.approx((3 + 10 / 9) / 2)
    for found in (pooled, per_prompt):
        assert 10 / 9 - 1e-9 <= found.low < found.mean < found.high <= 3 + 1e-9


def test_turns_of_a_prompt_share_one_speedup() -> None:
    found = [answer("a", (1,), tokens=10, plain_tokens=10, plain_seconds=seconds) for seconds in (1.0, 3.0)]
    assert computed(metrics.SpeedupPerPrompt, found) == computed(metrics.Speedup, found) == (2.0, None, None)


def test_nothing_is_made_up_where_nothing_was_measured() -> None:
    found = [answer("a", (1,), plain_seconds=0.0, plain_tokens=0)]
    assert computed(metrics.TokensPerSecond, found) == (2.0, None)
    assert computed(metrics.Speedup, found) is computed(metrics.SpeedupPerPrompt, found) is None
    assert computed(metrics.PassTime, found) == (None, None)
    assert computed(metrics.ByContext, found) == computed(metrics.ByCategory, found) == []
    for kind in (metrics.AcceptanceLength, metrics.AcceptedDrafts, metrics.DraftAcceptanceRate):
        assert computed(kind, []) is computed(kind, [answer("b", ())]) is None
    assert computed(metrics.AcceptedPerPosition, []) == ([], [])
    assert computed(metrics.TokensPerSecond, []) == (None, None)
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert metrics.AcceptanceLength().compute() is None


def test_prompts_without_a_pass_do_not_enter() -> None:
    assert computed(metrics.AcceptanceLength, [answer("a", (1,)), answer("b", ())]) == (2.0, None, None)


def test_times_are_means_over_the_passes_that_have_them() -> None:
    found = [
        answer("a", (1, 0), draft_ms=(1.0, 2.0), verify_ms=(5.0, 6.0)),
        answer("b", (1,), draft_ms=(6.0,)),
        answer("c", (1,)),
    ]
    draft, verify = computed(metrics.PassTime, found)
    assert draft.mean == 3.0 and 1.5 <= draft.low < draft.high <= 6.0
    assert verify == (5.5, None, None)


def test_categories_stand_apart() -> None:
    found = [
        answer("a", (3, 1), category="math", tokens=10, plain_tokens=10),
        answer("b", (0,), category="math", tokens=10, plain_tokens=10, plain_seconds=4.0),
        answer("c", (), category="code", tokens=0, plain_tokens=0),
        answer("d", (2,)),
    ]
    code, math_ = computed(metrics.ByCategory, found, categories=["code", "law", "math"])
    assert code == ("code", 1, 0, None, None)
    assert math_[:3] == ("math", 2, 3)
    assert math_.acceptance_length == computed(metrics.AcceptanceLength, found[:2])
    assert math_.acceptance_length.mean == 7 / 3 and math_.speedup.mean == 3.0
    with pytest.raises(ValueError, match="category 'math' is none of law"):
        computed(metrics.ByCategory, found, categories=["law"])


def test_context_is_told_apart_by_doublings() -> None:
    found = [
        answer("a", (3, 1, 0), context=(100, 127, 128)),
        answer("b", (2, 0), context=(250, 256)),
        answer("c", (1,), context=(2**17,)),
        answer("d", (3,)),
    ]
    groups = computed(metrics.ByContext, found)
    assert [group[:3] for group in groups] == [
        ("0-127", 1, 2), ("128-255", 2, 2), ("256-511", 1, 1), ("131072 and more", 1, 1),
    ]  # fmt: skip
    assert [group.acceptance_length.mean for group in groups] == [3.0, 2.0, 1.0, 2.0]


def test_the_collection_is_every_metric_over_one_state() -> None:
    found = [*TWO, answer("c", (2, 0), category="x", context=(5, 8), draft_ms=(1.0, 1.0))]
    collection = decoding_metrics(["x"])
    for one in found:
        collection.update([one])
    got = collection.compute()
    for name, kind in metrics.METRICS.items():
        assert got[name] == computed(kind, found, categories=["x"], resamples=10_000), name
    collection.update(TWO)  # after a compute, still together
    assert len({id(metric.passes) for metric in collection.values(copy_state=False)}) == 1
    assert sum(collection.compute()["histogram"]) == 6
    collection.reset()
    collection.update(TWO)
    assert collection.compute()["accepted_per_position"] == computed(metrics.AcceptedPerPosition, TWO)


def test_counts_survive_a_module_of_16_bits() -> None:
    """As Lightning's bf16-true makes it."""
    (metric,) = torch.nn.ModuleList([metrics.TokensPerSecond()]).to(torch.bfloat16)
    metric.update([answer("a", (1,), tokens=1001, seconds=1.0)])
    metric.to(torch.bfloat16)
    assert metric.compute().speculative == 1001.0
