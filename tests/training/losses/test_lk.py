import math

import pytest
import torch

from specdec.training.losses import ForwardKL, LawLoss, LKAlpha, LKLambda, Rows, TotalVariation
from tests.training.losses.law_rows import random_rows, slope

ROWS = random_rows()
ONES = torch.ones(5, dtype=torch.float64)


def alphas(rows: Rows) -> list[float]:
    """Acceptance rates, in plain Python."""
    out = []
    for p, mass, z in zip(rows.p_RD.tolist(), rows.log_mass_R.exp().tolist(), rows.draft_RD.tolist(), strict=True):
        total = sum(math.exp(x) for x in z)
        out.append(sum(min(mass * x, math.exp(y) / total) for x, y in zip(p, z, strict=True)))
    return out


def test_alpha_is_its_definition() -> None:
    assert LKAlpha()(ROWS).tolist() == pytest.approx([-math.log(x) for x in alphas(ROWS)], rel=1e-12)


def test_alphas_gradient_is_total_variations_over_alpha() -> None:
    rejection = TotalVariation().grade(ROWS, ONES)
    want_RD = rejection.grad_RD / (1 - rejection.loss_R)[:, None]
    torch.testing.assert_close(LKAlpha().grade(ROWS, ONES).grad_RD, want_RD, rtol=1e-11, atol=1e-14)


def test_laws_apart_still_pull() -> None:
    """Where alpha is too small for any float, total variation is flat and its logarithm is not."""
    draft_RD = torch.tensor([[2000.0, 0.0]])
    log_p_RD = torch.tensor([[0.0, 2000.0]]).log_softmax(-1)
    rows = Rows(draft_RD, log_p_RD.exp(), log_p_RD, torch.zeros(1), torch.tensor([1]))
    graded = LKAlpha().grade(rows, torch.ones(1))
    assert float(graded.loss_R) == pytest.approx(2000 - math.log(2), rel=1e-6)
    torch.testing.assert_close(graded.grad_RD, torch.tensor([[0.5, -0.5]]))
    assert not TotalVariation().grade(rows, torch.ones(1)).grad_RD.any()


def test_a_tie_counts_half() -> None:
    """As autograd's minimum has it; the two tokens beside it pull one way or the other."""
    log_q_RD = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().log_softmax(-1)
    log_p_RD = log_q_RD + torch.tensor([[0.0, 0.2, -0.4]], dtype=torch.float64)
    nothing_R = torch.zeros(1, dtype=torch.float64)
    rows = Rows(log_q_RD, log_p_RD.exp(), log_p_RD, nothing_R, torch.tensor([0]))
    assert torch.equal(rows.draft_RD.log_softmax(-1)[:, 0], log_p_RD[:, 0])
    share, alpha = torch.tensor([0.25, 0.3, 0.0], dtype=torch.float64), 0.5 + 0.3 + 0.2 * math.exp(-0.4)
    want_RD = (0.55 * log_q_RD.exp() - share) / alpha
    torch.testing.assert_close(LKAlpha().grade(rows, nothing_R + 1).grad_RD, want_RD, rtol=1e-12, atol=0)
    torch.testing.assert_close(LawLoss.grade(LKAlpha(), rows, nothing_R + 1).grad_RD, want_RD, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("scale", "decay"), [(1.0, 3.0), (0.4, 0.7)])
def test_lambda_is_its_definition(scale: float, decay: float) -> None:
    kl_R, got_R = ForwardKL()(ROWS).tolist(), LKLambda(scale, decay)(ROWS).tolist()
    for r, alpha in enumerate(alphas(ROWS)):
        w = scale * math.exp(-decay * alpha)
        assert got_R[r] == pytest.approx(w * kl_R[r] + (1 - w) * (1 - alpha), rel=1e-12)


def test_lambdas_weight_is_a_constant_for_the_gradient() -> None:
    w_R = (-3 * (1 - TotalVariation()(ROWS))).exp()

    def held(draft_RD: torch.Tensor) -> torch.Tensor:
        rows = ROWS._replace(draft_RD=draft_RD)
        return (w_R * ForwardKL()(rows) + (1 - w_R) * TotalVariation()(rows)).sum()

    torch.testing.assert_close(LKLambda().grade(ROWS, ONES).grad_RD, slope(held, ROWS.draft_RD), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "limit"),
    [
        (LKLambda(decay=0.0), ForwardKL()),
        (LKLambda(scale=0.0), TotalVariation()),
        (LKLambda(decay=1e5), TotalVariation()),
    ],
    ids=str,
)
def test_lambdas_limits(loss: LawLoss, limit: LawLoss) -> None:
    got, want = loss.grade(ROWS, ONES), limit.grade(ROWS, ONES)
    torch.testing.assert_close(got.loss_R, want.loss_R, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.grad_RD, want.grad_RD, rtol=1e-12, atol=1e-14)


def test_lambda_turns_from_kl_to_total_variation_as_drafts_get_better() -> None:
    draft_RD = torch.tensor([[9.0, 0.0], [0.0, 9.0]], dtype=torch.float64)  # hopeless, good
    log_p_RD = torch.tensor([[0.0, 8.0], [0.0, 8.0]], dtype=torch.float64).log_softmax(-1)
    rows = Rows(draft_RD, log_p_RD.exp(), log_p_RD, torch.zeros(2, dtype=torch.float64), torch.tensor([1, 1]))
    loss_R, kl_R, tv_R = (loss(rows) for loss in (LKLambda(), ForwardKL(), TotalVariation()))
    w_R = (loss_R - tv_R) / (kl_R - tv_R)
    assert w_R.tolist() == pytest.approx([1.0, math.exp(-3)], rel=1e-2)


@pytest.mark.parametrize("scale", [-0.1, 1.1, math.nan, math.inf])
def test_scale_is_a_share(scale: float) -> None:
    with pytest.raises(ValueError, match=r"LKLambda\.scale must lie in \[0, 1\]"):
        LKLambda(scale=scale)


@pytest.mark.parametrize("decay", [-1.0, math.nan, math.inf])
def test_decay_does_not_grow(decay: float) -> None:
    with pytest.raises(ValueError, match=r"LKLambda\.decay must be at least 0 and finite"):
        LKLambda(decay=decay)
