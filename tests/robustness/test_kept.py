"""What is kept, by hand and with its intervals."""

import numpy as np
import pytest

from specdec.evaluation.comparison import compare
from specdec.robustness.kept import (
    Counts,
    counts,
    difference,
    drafts_share,
    kept,
    length_share,
    mean_difference,
    mean_kept,
    together,
)
from tests.evaluation.made import answer, clustered

CLEAN: Counts = {"a": (30, 10), "b": (20, 10), "c": (7, 1)}


def test_counts_are_of_all_turns() -> None:
    answers = [answer("a", (2, 0)), answer("b", ()), answer("a", (3,))]
    assert counts(answers) == {"a": (8, 3), "b": (0, 0)}


def test_shares_by_hand_on_the_prompts_of_both() -> None:
    under: Counts = {"a": (20, 10), "b": (10, 10), "c": (0, 0), "d": (9, 1)}
    found = kept(under, CLEAN)
    assert found.prompts == 2 and found.acceptance_length is not None
    assert found.acceptance_length.mean == 1.5  # 30 tokens in 20 passes
    assert found.length_kept is not None and found.length_kept.mean == pytest.approx(1.5 / 2.5)
    assert found.drafts_kept is not None and found.drafts_kept.mean == pytest.approx(0.5 / 1.5)


def test_a_drafter_that_is_never_right_keeps_no_drafts_but_some_length() -> None:
    found = kept({"a": (10, 10), "b": (10, 10)}, CLEAN)
    assert found.length_kept is not None and found.length_kept.mean == pytest.approx(1 / 2.5)
    assert found.drafts_kept is not None and tuple(found.drafts_kept) == (0.0, 0.0, 0.0)


def test_the_clean_run_keeps_all_of_itself() -> None:
    found = kept(CLEAN, CLEAN)
    assert found.length_kept is not None and tuple(found.length_kept) == (1.0, 1.0, 1.0)
    assert found.drafts_kept is not None and tuple(found.drafts_kept) == (1.0, 1.0, 1.0)


def test_the_intervals_are_those_of_compare() -> None:
    clean, under = clustered(np.random.default_rng(0), 20, better=0.1)
    found = kept(counts(under), counts(clean)).length_kept
    assert found is not None and tuple(found) == pytest.approx(tuple(compare(clean, under).ratio), abs=2e-3)


def test_what_has_no_value_has_none() -> None:
    none = {"a": (10, 10), "b": (10, 10)}
    found = kept(none, none)
    assert found.drafts_kept is None and found.length_kept is not None
    assert kept({}, CLEAN) == (0, None, None, None)
    lonely = kept({"a": (20, 10), "b": (10, 10)}, {"a": (30, 10), "b": (10, 10)})
    assert lonely.drafts_kept is not None and lonely.drafts_kept.low is None  # without a there is nothing to keep


def test_a_resample_without_a_value_leaves_no_bounds() -> None:
    clean: Counts = {"a": (30, 10), "b": (30, 10)} | {f"z{n}": (10, 10) for n in range(4)}
    found = kept(dict.fromkeys(clean, (10, 10)), clean)
    assert found.drafts_kept is not None and tuple(found.drafts_kept) == (0.0, None, None)


def test_differences_are_paired() -> None:
    chance = np.random.default_rng(0)
    clean: Counts = {str(n): (int(c), 10) for n, c in enumerate(chance.integers(15, 60, 12))}
    half: Counts = {name: (10 + (c - 10) // 2, 10) for name, (c, _) in clean.items()}
    third: Counts = {name: (10 + (c - 10) // 3, 10) for name, (c, _) in clean.items()}
    alone = kept(half, clean).drafts_kept
    paired = difference((half, clean), (third, clean), drafts_share)
    assert alone is not None and paired is not None and None not in (alone.low, alone.high, paired.low, paired.high)
    assert paired.mean == pytest.approx(-1 / 6, abs=0.01) and paired.high < 0  # type: ignore[operator]
    reverse = difference((third, clean), (half, clean), drafts_share)
    assert reverse is not None and reverse.mean == pytest.approx(-paired.mean)
    none = difference((half, clean), (half, clean), length_share)
    assert none is not None and tuple(none) == (0.0, 0.0, 0.0)


def test_means_are_of_conditions_alike() -> None:
    one: Counts = {"a": (20, 10), "b": (10, 10)}
    two: Counts = {"a": (25, 10), "b": (15, 10), "c": (5, 1)}
    shares = [kept({n: c[n] for n in ("a", "b")}, CLEAN).drafts_kept for c in (one, two)]
    mean = mean_kept([one, two], CLEAN, drafts_share)
    assert mean is not None and mean.mean == pytest.approx(sum(s.mean for s in shares if s) / 2)
    apart = mean_difference([(one, two), (two, two)], (CLEAN, CLEAN), drafts_share)
    assert apart is not None and shares[0] is not None and shares[1] is not None
    assert apart.mean == pytest.approx((shares[1].mean - shares[0].mean) / 2)
    assert together([one, two]).tolist() == [[20, 10, 25, 10], [10, 10, 15, 10]]
