"""Every figure by hand and by its definition."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.evaluation import metrics
from specdec.evaluation.metrics import (
    LOOP_PART,
    LOOP_TOKENS,
    Answer,
    answer_warnings,
    loops,
    per_prompt,
    position_intervals,
    target_passes,
)
from tests.evaluation.made import answer, answer_lists


def computed(name: str, found: list[Answer]) -> Any:
    return getattr(metrics, name)(found)


def test_sums_per_prompt_do_not_depend_on_the_order() -> None:
    found = [answer("b", (1,)), answer("a", (2, 0)), answer("b", (3,))]
    sums = per_prompt(found, target_passes, lambda one: sum(one.accepted), prompts=["c"])
    assert sorted(map(tuple, sums.tolist())) == [(0, 0), (2, 2), (2, 4)]
    assert (
        sums.tolist()
        == per_prompt(
            found[::-1], target_passes, lambda one: sum(one.accepted), prompts=["c"]
        ).tolist()
    )


def test_acceptance_length_pools_passes_and_counts_the_bonus_token() -> None:
    # 3 + 1 tokens in 2 passes, 2 in 1 pass, 1 in 1 pass: a mean over prompts would be 5 / 3, over answers 1.625
    found = [answer("a", (2, 0)), answer("b", (1,)), answer("b", (0,))]
    assert computed("acceptance_length", found).mean == 7 / 4
    assert computed("draft_acceptance_rate", found).mean == 3 / 12


def test_drafts_that_the_target_refuses_and_answers_that_loop_are_both_reported() -> None:
    def lines(*answers: Answer) -> list[str]:
        length = {"mean": computed("acceptance_length", list(answers)).mean}
        return answer_warnings("chain", {"acceptance_length": length, **metrics.looping(answers)})

    nothing = (
        "chain: the target accepted no draft, so this says nothing about the drafter's quality "
        "(docs/troubleshooting.md)"
    )
    loop = "chain: 50% of the answers repeat themselves, which is easy to draft: acceptance length {}, without them {}"
    refused, refused_loop = answer("a", (0, 0)), answer("b", (0,), loops=True)
    assert lines(answer("a", (1,)), answer("b", (2,))) == []
    assert lines(refused) == [nothing]
    assert lines(answer("a", (1,)), answer("b", (3,), loops=True)) == [loop.format("3.00", "2.00")]
    assert lines(refused, refused_loop) == [nothing, loop.format("1.00", "1.00")]


def test_positions_and_histogram_by_hand() -> None:
    positions = computed("accepted_per_position", [answer("a", (3, 0, 1)), answer("b", (1,))])
    assert positions == {"joint": [0.75, 0.25, 0.25], "conditional": [0.75, 1 / 3, 1.0]}
    positions = computed("accepted_per_position", [answer("a", (1, 0), depth=4)])
    assert positions == {"joint": [0.5, 0.0, 0.0, 0.0], "conditional": [0.5, 0.0, None, None]}
    assert computed("histogram", [answer("a", (0, 2, 2), depth=4)]) == [1, 0, 2, 0, 0]


def test_passes_without_a_draft_count() -> None:
    found = [answer("a", (2, 0, 0), drafted=(2, 0, 1))]
    assert computed("acceptance_length", found).mean == 5 / 3
    assert computed("drafts_per_pass", found).mean == 1.0
    positions = computed("accepted_per_position", found)
    assert positions == {"joint": [1 / 3, 1 / 3], "conditional": [0.5, 1.0]}
    nothing_drafted = [answer("a", (0,), depth=0)]
    assert computed("accepted_per_position", nothing_drafted) == {"joint": [], "conditional": []}
    assert computed("draft_acceptance_rate", nothing_drafted) is None
    assert computed("draft_acceptance_rate", [*nothing_drafted, answer("b", (1,))]) == (
        1 / 3,
        None,
        None,
    )


@settings(deadline=None)
@given(answer_lists())
def test_acceptance_length_is_one_plus_the_joint_shares(found: list[Answer]) -> None:
    """Acceptance length is 1 + Σ joint; positions are what they say."""
    got = {
        name: computed(name, found)
        for name in ("acceptance_length", "accepted_per_position", "histogram")
    }
    length, (joint, conditional) = (
        got["acceptance_length"].mean,
        got["accepted_per_position"].values(),
    )
    assert math.isclose(length, 1 + sum(joint), rel_tol=1e-12)
    counts = [count for one in found for count in one.accepted]
    assert sum(got["histogram"]) == len(counts) and len(joint) == max(
        max(one.drafted) for one in found
    )
    passes = [pair for one in found for pair in zip(one.accepted, one.drafted, strict=True)]
    for k, (together, given_before) in enumerate(zip(joint, conditional, strict=True), start=1):
        judged = [count for count, depth in passes if count >= k - 1 and depth >= k]
        assert together == sum(count >= k for count in counts) / len(counts)
        right = sum(count >= k for count in judged)
        assert given_before == (right / len(judged) if judged else None)


@settings(deadline=None)
@given(answer_lists())
def test_the_figure_is_within_the_prompts_own_means(found: list[Answer]) -> None:
    interval = computed("acceptance_length", found)
    assert interval == computed("acceptance_length", found[::-1])
    names = {one.prompt_id for one in found}
    means = [
        computed("acceptance_length", [one for one in found if one.prompt_id == name]).mean
        for name in names
    ]
    if len(names) == 1:
        assert interval[1:] == (None, None)
    else:
        assert (
            min(means) - 1e-12 <= interval.mean <= max(means) + 1e-12
            and 1 <= interval.low <= interval.high
        )


def test_the_interval_is_over_prompts_not_passes() -> None:
    found = [answer(str(index), (3,) * 50 if index % 2 else (0,) * 50) for index in range(8)]
    low, high = computed("acceptance_length", found)[1:]
    assert high - low > 1.5  # 400 passes taken as independent would give about 0.3


TWO = [
    answer("a", (1,), tokens=30, seconds=1.0, plain_tokens=30, plain_seconds=3.0),
    answer("b", (1,), tokens=10, seconds=3.0, plain_tokens=12, plain_seconds=4.0),
]


def test_rates_pool_tokens_over_seconds() -> None:
    assert computed("tokens_per_second", TWO) == pytest.approx({"speculative": 10.0, "plain": 6.0})
    found = computed("speedup", TWO)
    assert found.mean == pytest.approx(10 / 6) and 0 <= found.low < found.mean < found.high
    turns = [
        answer("a", (1,), tokens=10, plain_tokens=10, plain_seconds=seconds)
        for seconds in (1.0, 3.0)
    ]
    assert computed("speedup", turns) == (2.0, None, None)


def test_nothing_is_made_up_where_nothing_was_measured() -> None:
    found = [answer("a", (1,), plain_seconds=0.0, plain_tokens=0)]
    assert computed("tokens_per_second", found) == {"speculative": 2.0, "plain": None}
    assert computed("speedup", found) is None
    assert computed("pass_time", found) == {"draft_ms": None, "verify_ms": None}
    for name in ("acceptance_length", "draft_acceptance_rate"):
        assert computed(name, []) is computed(name, [answer("b", ())]) is None
    assert computed("tokens_per_second", []) == {"speculative": None, "plain": None}
    assert computed("acceptance_length", [answer("a", (1,)), answer("b", ())]) == (2.0, None, None)


def test_times_are_means_over_the_passes_that_have_them() -> None:
    found = [
        answer("a", (1, 0), draft_ms=(1.0, 2.0), verify_ms=(5.0, 6.0)),
        answer("b", (1,), draft_ms=(6.0,)),
        answer("c", (1,)),
    ]
    times = computed("pass_time", found)
    assert times["draft_ms"].mean == 3.0 and 0 <= times["draft_ms"].low < 3 < times["draft_ms"].high
    assert times["verify_ms"] == (5.5, None, None)


def repeats(ids: list[int]) -> bool:
    """What :func:`loops` says, token by token."""
    for period in range(1, len(ids) // 3 + 1):
        same = 0
        for before, now in zip(ids, ids[period:], strict=False):
            same = same + 1 if now == before else 0
            if same >= max(LOOP_TOKENS, 2 * period, LOOP_PART * len(ids)):
                return True
        if same >= max(LOOP_TOKENS, 2 * period):
            return True
    return False


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=20), st.integers(0, 12),
    st.lists(st.integers(0, 3), max_size=20),
)  # fmt: skip
def test_loops_are_copies_of_what_stood_a_period_before(
    before: list[int], again: list[int], times: int, after: list[int]
) -> None:
    ids = before + times * again + after
    assert loops(ids) == repeats(ids)


def test_a_loop_has_two_periods_and_enough_tokens() -> None:
    assert loops([7] * (LOOP_TOKENS + 1)) and not loops([7] * LOOP_TOKENS)
    period = list(range(20))
    assert loops(3 * period) and not loops([*(3 * period)[:-1], 99])
    assert not loops([]) and not loops(list(range(500)))
    sum_of_fives = [*range(100, 150), *([5, 6] * 13)]  # 24 copies
    assert loops(sum_of_fives) and loops([*sum_of_fives, *range(200, 220)])  # at the end; a quarter
    assert not loops([*sum_of_fives, *range(200, 221)])


def test_intervals_of_shares_by_position_lie_between_0_and_1() -> None:
    answers = [answer("a", (3, 3, 3)), answer("b", (0, 0, 1)), answer("c", (3, 0, 0))]
    shares = computed("accepted_per_position", answers)
    intervals = position_intervals(answers)
    for kind in ("joint", "conditional"):
        for share, ends in zip(shares[kind], intervals[kind], strict=True):
            assert 0 <= ends["low"] <= share <= ends["high"] <= 1
    assert intervals["joint"][0] == {"low": 0.0, "high": 1.0}  # cut at both ends
    assert position_intervals([]) == {"joint": [], "conditional": []}
