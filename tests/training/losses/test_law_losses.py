"""What every loss of the law must keep, whatever it measures."""

import pytest
import torch

from specdec.training.losses import FeatureLoss, LawLoss, LKLambda, Rows
from tests.training.losses.law_rows import LAW_LOSSES, random_rows, rows_of, slope

every_loss = pytest.mark.parametrize("loss", LAW_LOSSES, ids=str)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.1], dtype=torch.float64)


def assert_graded(loss: LawLoss, rows: Rows, weight_R: torch.Tensor, rtol: float = 1e-10) -> None:
    """Closed form and autograd agree, to within the greatest entry of a row, and are finite."""
    got, want = loss.grade(rows, weight_R), LawLoss.grade(loss, rows, weight_R)
    assert got.loss_R.dtype == got.grad_RD.dtype == rows.draft_RD.dtype
    assert not got.loss_R.requires_grad and not got.grad_RD.requires_grad
    assert bool(want.loss_R.isfinite().all()) and bool(want.grad_RD.isfinite().all())
    torch.testing.assert_close(got.loss_R, want.loss_R, rtol=rtol, atol=rtol)
    size_R1 = want.grad_RD.abs().amax(-1, keepdim=True) if len(want.grad_RD) else want.grad_RD
    assert bool(((got.grad_RD - want.grad_RD).abs() <= rtol * size_R1 + rtol * 1e-3).all())


@every_loss
def test_the_closed_gradient_is_autograds(loss: LawLoss) -> None:
    for seed in range(5):
        rows = random_rows(seed)
        assert_graded(loss, rows._replace(draft_RD=rows.draft_RD.requires_grad_()), WEIGHTS)


@pytest.mark.parametrize("loss", [loss for loss in LAW_LOSSES if not isinstance(loss, LKLambda)], ids=str)
def test_the_gradient_is_the_slope(loss: LawLoss) -> None:
    """Not of LKLambda, whose weight is held: ``test_lk`` does that."""
    rows = random_rows(3)
    slope_RD = slope(lambda draft_RD: (loss(rows._replace(draft_RD=draft_RD)) * WEIGHTS).sum(), rows.draft_RD)
    torch.testing.assert_close(loss.grade(rows, WEIGHTS).grad_RD, slope_RD, rtol=1e-6, atol=1e-8)


@every_loss
def test_a_shift_of_the_logits_changes_nothing(loss: LawLoss) -> None:
    rows = random_rows(4)
    shifted = rows._replace(draft_RD=rows.draft_RD + 100.0)
    torch.testing.assert_close(loss(shifted), loss(rows), rtol=1e-12, atol=1e-12)
    assert float(loss.grade(rows, WEIGHTS).grad_RD.sum(-1).abs().max()) < 1e-14


@every_loss
def test_nothing_is_changed_in_place(loss: LawLoss) -> None:
    rows, weight_R = random_rows(0), WEIGHTS.clone()
    before = [x.clone() for x in rows]
    loss(rows)
    loss.grade(rows, weight_R)
    assert all(torch.equal(a, b) for a, b in zip([*rows, weight_R], [*before, WEIGHTS], strict=True))


def extreme(dtype: torch.dtype) -> dict[str, Rows]:
    far, zero = 1e4, 0.0
    masked_p_RD = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    draft_RD = torch.tensor([[far, -far, zero], [-far, far, zero], [zero, zero, zero]], dtype=dtype)
    nothing_R = torch.zeros(3, dtype=dtype)
    return {
        "opposed": rows_of(draft_RD, -draft_RD.roll(1, 0)),
        "equal": rows_of(draft_RD, draft_RD),
        "hardly any mass": rows_of(draft_RD, torch.cat([draft_RD, draft_RD + 50], -1)),
        "masked": Rows(draft_RD, masked_p_RD, masked_p_RD.log(), nothing_R, masked_p_RD.argmax(-1)),
        "one token": rows_of(draft_RD[:, :1], draft_RD[:, :1]),
        "one of two tokens": rows_of(draft_RD[:, :1], draft_RD[:, :2]),
        "no rows": rows_of(draft_RD[:0], draft_RD[:0]),
    }


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", extreme(torch.float64))
def test_extreme_rows_stay_finite(loss: LawLoss, dtype: torch.dtype, case: str) -> None:
    rows = extreme(dtype)[case]
    assert_graded(loss, rows, torch.ones(len(rows.draft_RD), dtype=dtype), 1e-10 if dtype == torch.float64 else 1e-4)


@every_loss
def test_rows_born_in_bfloat16(loss: LawLoss) -> None:
    """Computed in float32 they are what float64 makes of the same logits, also where logits tie; and so they are under
    autocast, which must not reach the loss."""
    generator = torch.Generator().manual_seed(0)
    draft_RD, target_RV = (torch.randn(5, n, generator=generator).bfloat16() for n in (200, 300))
    narrow, wide = (rows_of(draft_RD.to(x), target_RV.to(x)) for x in (torch.float32, torch.float64))
    weight_R, want = WEIGHTS.float(), loss.grade(wide, WEIGHTS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss.grade(narrow, weight_R)
        torch.testing.assert_close(loss(narrow).double(), want.loss_R, rtol=1e-5, atol=1e-6)
    for got in (cast, loss.grade(narrow, weight_R)):
        assert got.loss_R.dtype == got.grad_RD.dtype == torch.float32
        torch.testing.assert_close(got.loss_R.double(), want.loss_R, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.grad_RD.double(), want.grad_RD, rtol=1e-4, atol=1e-6)


def test_an_unfinished_loss_says_so() -> None:
    with pytest.raises(TypeError, match="LawLoss must say how"):
        LawLoss()(random_rows())
    with pytest.raises(TypeError, match="FeatureLoss must say how"):
        FeatureLoss()(torch.zeros(1, 2), torch.zeros(1, 2))
