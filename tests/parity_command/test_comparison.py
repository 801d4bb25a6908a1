"""Differences and their verdicts."""

import math

import pytest
import torch

from specdec.parity.comparison import TOLERANCE, Row, compare, merged, rounding
from specdec.parity.said import Said

A, K, H, V = 3, 2, 4, 6


def said(seed: int = 0) -> Said:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(A, K, H, generator=generator, dtype=torch.float64)
    laws = torch.randn(A, K, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    laws[..., 2] = -math.inf
    return Said(features, laws)


def test_a_thing_is_equal_to_itself() -> None:
    for row in compare("pair", "place", said(), said()):
        assert (row.gap, row.share, row.feature_share) == (0, 0, 0)
        assert row.agree == row.anchors == A and row.equal and row.verdict == "equal"


@pytest.mark.parametrize(("factor", "equal"), [(0.5, True), (2.0, False)])
def test_a_difference_is_measured_by_the_range(factor: float, equal: bool) -> None:
    one, two = said(), said()
    known = one.log_probs_AKV[:, 1].isfinite()
    spread = one.log_probs_AKV[:, 1][known].max() - one.log_probs_AKV[:, 1][known].min()
    step = factor * TOLERANCE[torch.float64] * float(spread)
    two.log_probs_AKV[1, 1, 3] += step
    first, second = compare("pair", "place", one, two)
    assert first.equal and second.equal is equal
    assert second.gap == pytest.approx(step, rel=1e-5) and second.share == pytest.approx(factor * 1e-9, rel=1e-5)


def test_verdicts_say_where() -> None:
    one = said()
    for k, place in enumerate(("the target's states, or how they are fused", "what the step before handed on")):
        two = Said(*(x.clone() for x in one))
        two.features_AKH[0, k, 0] += 1e-3
        assert compare("pair", "place", one, two)[k].verdict == "equal"  # what matters is what is said
        two.log_probs_AKV[0, k, 0] += 1e-3
        assert compare("pair", "place", one, two)[k].verdict == f"DIFFERENT: {place}"
    two = Said(one.features_AKH, one.log_probs_AKV.clone())
    two.log_probs_AKV[0, 0, 0] += 1e-3
    assert compare("pair", "place", one, two)[0].verdict == "DIFFERENT: the layer, its positions or the head"


def test_other_tokens_and_no_numbers_are_no_match() -> None:
    one = said()
    two = Said(one.features_AKH, one.log_probs_AKV.roll(1, dims=-1))
    assert compare("pair", "place", one, two)[0].verdict == "DIFFERENT: the tokens that the head knows"
    spoilt = Said(one.features_AKH * math.nan, one.log_probs_AKV * math.nan)
    for pair in ((one, spoilt), (spoilt, one), (spoilt, spoilt)):
        row = compare("pair", "place", *pair)[0]
        assert row.gap == row.share == math.inf and not row.equal


def test_rows_of_several_texts_are_one() -> None:
    one, two = said(), said(1)
    rows = [*compare("a", "x", one, one), *compare("b", "x", one, one), *compare("a", "x", one, two)]
    found = merged(rows)
    assert [row[:3] for row in found] == [("a", "x", 0), ("a", "x", 1), ("b", "x", 0), ("b", "x", 1)]
    assert (found[0].anchors, found[0].gap, found[0].share) == (2 * A, rows[4].gap, rows[4].share)
    assert found[0].agree == A + rows[4].agree and found[0].feature_share == rows[4].feature_share > 0
    assert not found[0].equal and found[2].equal


@pytest.mark.parametrize(
    ("dtype", "seen", "allowed"),
    [
        (torch.bfloat16, 4e-3, 1.6e-2),
        (torch.bfloat16, 1e-4, 1e-2),
        (torch.bfloat16, 0.5, 5e-2),
        (torch.float16, 1e-3, 4e-3),
        (torch.float32, 1e-7, 1e-4),
        (torch.float64, 1e-3, 1e-9),
    ],
)
def test_another_implementation_rounds_as_our_own_two_do(dtype: torch.dtype, seen: float, allowed: float) -> None:
    rows = [Row("p", "q", 0, 1, 1, 0.0, share, 0.0, 1.0) for share in (0.0, seen, seen / 2)]
    assert rounding(rows, dtype) == pytest.approx(allowed)
    wide = [row._replace(share=0.0, feature_share=seen) for row in rows]
    assert rounding(wide, dtype) == pytest.approx(allowed)
