"""Every loss against its definition, its gradient in closed form against autograd's, and what a loss may not be."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec.drafter import Concat, LastLayer, Norms
from specdec.training.divergences import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    LKAlpha,
    LKLambda,
    ReverseKL,
    TopKCrossEntropy,
    TotalVariation,
)
from specdec.training.losses import (
    DistributionLoss,
    LossRows,
    SmoothL1,
    SoftCrossEntropy,
    Term,
    WeightedSum,
)
from tests.tiny import presets

LAW_LOSSES: list[DistributionLoss] = [
    SoftCrossEntropy(),
    ForwardKL(),
    ReverseKL(),
    JensenShannon(),
    JensenShannon(0.2),
    TotalVariation(),
    HardCrossEntropy(),
    TopKCrossEntropy(3),
    LKAlpha(),
    LKLambda(),
    LKLambda(0.6, 1.5),
]


def rows_of(draft_RD: Tensor, target_RV: Tensor) -> LossRows:
    """The draft vocabulary is the first D target tokens."""
    kept_RD = target_RV[:, : draft_RD.shape[-1]]
    log_p_RD = kept_RD.log_softmax(-1)
    log_mass_R = kept_RD.logsumexp(-1) - target_RV.logsumexp(-1)
    return LossRows(draft_RD, log_p_RD.exp(), log_p_RD, log_mass_R, kept_RD.argmax(-1))


def random_rows(seed: int = 0, rows: int = 5, draft: int = 7, vocab: int = 11) -> LossRows:
    """Float64, laws neither flat nor sharp."""
    generator = torch.Generator().manual_seed(seed)
    draft_RD = 2 * torch.randn(rows, draft, dtype=torch.float64, generator=generator)
    return rows_of(draft_RD, 2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator))


def alike(rows: LossRows) -> LossRows:
    """The same target, met exactly on the draft vocabulary, up to a shift of the logits."""
    return rows._replace(draft_RD=rows.log_p_RD + 5.0)


def slope(function: Callable[[Tensor], Tensor], at_RD: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient of a scalar function by central differences."""
    slope_RD = torch.zeros_like(at_RD)
    for index in range(at_RD.numel()):
        nudge_RD = torch.zeros_like(at_RD)
        nudge_RD.view(-1)[index] = step
        slope_RD.view(-1)[index] = (function(at_RD + nudge_RD) - function(at_RD - nudge_RD)) / (
            2 * step
        )
    return slope_RD


every_loss = pytest.mark.parametrize("loss", LAW_LOSSES, ids=str)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.1], dtype=torch.float64)


Grade = Callable[[LossRows, Tensor], Tensor]


def graded(loss_and_grad_: Grade, rows: LossRows, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient that was left where the logits stood."""
    rows = rows._replace(draft_RD=rows.draft_RD.detach().clone())
    return loss_and_grad_(rows, weight_R), rows.draft_RD


def assert_graded(
    loss: DistributionLoss, rows: LossRows, weight_R: Tensor, rtol: float = 1e-10
) -> None:
    """Closed form and autograd agree, to within the greatest entry of a row, and are finite."""
    loss_R, grad_RD = graded(loss.loss_and_grad_, rows, weight_R)
    wanted_R, wanted_RD = graded(partial(DistributionLoss.loss_and_grad_, loss), rows, weight_R)
    assert loss_R.dtype == grad_RD.dtype == rows.draft_RD.dtype and not loss_R.requires_grad
    assert bool(wanted_R.isfinite().all()) and bool(wanted_RD.isfinite().all())
    torch.testing.assert_close(loss_R, wanted_R, rtol=rtol, atol=rtol)
    size_R1 = wanted_RD.abs().amax(-1, keepdim=True) if len(wanted_RD) else wanted_RD
    assert bool(((grad_RD - wanted_RD).abs() <= rtol * size_R1 + rtol * 1e-3).all())


@every_loss
def test_the_closed_gradient_is_autograds(loss: DistributionLoss) -> None:
    for seed in range(5):
        rows = random_rows(seed)
        assert_graded(loss, rows, WEIGHTS)


@pytest.mark.parametrize(
    "loss", [loss for loss in LAW_LOSSES if not isinstance(loss, LKLambda)], ids=str
)
def test_the_gradient_is_the_slope(loss: DistributionLoss) -> None:
    """Not of LKLambda, whose weight is held: ``test_lk`` does that."""
    rows = random_rows(3)
    slope_RD = slope(
        lambda draft_RD: (loss(rows._replace(draft_RD=draft_RD)) * WEIGHTS).sum(), rows.draft_RD
    )
    torch.testing.assert_close(
        graded(loss.loss_and_grad_, rows, WEIGHTS)[1], slope_RD, rtol=1e-6, atol=1e-8
    )


def extreme(dtype: torch.dtype) -> dict[str, LossRows]:
    far, zero = 1e4, 0.0
    masked_p_RD = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    draft_RD = torch.tensor([[far, -far, zero], [-far, far, zero], [zero, zero, zero]], dtype=dtype)
    nothing_R = torch.zeros(3, dtype=dtype)
    return {
        "opposed": rows_of(draft_RD, -draft_RD.roll(1, 0)),
        "equal": rows_of(draft_RD, draft_RD),
        "hardly any mass": rows_of(draft_RD, torch.cat([draft_RD, draft_RD + 50], -1)),
        "masked": LossRows(
            draft_RD, masked_p_RD, masked_p_RD.log(), nothing_R, masked_p_RD.argmax(-1)
        ),
        "one token": rows_of(draft_RD[:, :1], draft_RD[:, :1]),
        "one of two tokens": rows_of(draft_RD[:, :1], draft_RD[:, :2]),
        "no rows": rows_of(draft_RD[:0], draft_RD[:0]),
    }


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", extreme(torch.float64))
def test_extreme_rows_stay_finite(loss: DistributionLoss, dtype: torch.dtype, case: str) -> None:
    rows = extreme(dtype)[case]
    assert_graded(
        loss,
        rows,
        torch.ones(len(rows.draft_RD), dtype=dtype),
        1e-10 if dtype == torch.float64 else 1e-4,
    )


TargetProbs = list[float]
D_ROWS = random_rows()


def laws(rows: LossRows, r: int) -> tuple[TargetProbs, TargetProbs]:
    """p and q of a row, in plain Python."""
    odds = [math.exp(x) for x in rows.draft_RD[r].tolist()]
    return rows.p_RD[r].tolist(), [x / sum(odds) for x in odds]


def kl(a: TargetProbs, b: TargetProbs) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def jsd(p: TargetProbs, q: TargetProbs, beta: float) -> float:
    middle = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, middle) + (1 - beta) * kl(q, middle)


@pytest.mark.parametrize(
    ("loss", "definition"),
    [
        (SoftCrossEntropy(), lambda p, q: -sum(x * math.log(y) for x, y in zip(p, q, strict=True))),
        (ForwardKL(), kl),
        (ReverseKL(), lambda p, q: kl(q, p)),
        (JensenShannon(), lambda p, q: jsd(p, q, 0.5)),
        (JensenShannon(0.2), lambda p, q: jsd(p, q, 0.2)),
        (HardCrossEntropy(), lambda p, q: -math.log(q[p.index(max(p))])),
    ],
    ids=lambda each: str(each) if isinstance(each, DistributionLoss) else "",
)
def test_it_is_its_definition(
    loss: DistributionLoss, definition: Callable[[TargetProbs, TargetProbs], float]
) -> None:
    got_R = loss(D_ROWS)
    assert got_R.shape == (5,)
    for r in range(5):
        assert float(got_R[r]) == pytest.approx(definition(*laws(D_ROWS, r)), rel=1e-12)


ROWS = random_rows()
ONES = torch.ones(5, dtype=torch.float64)


def alphas(rows: LossRows) -> list[float]:
    """Acceptance rates, in plain Python."""
    out = []
    for p, mass, z in zip(
        rows.p_RD.tolist(), rows.log_mass_R.exp().tolist(), rows.draft_RD.tolist(), strict=True
    ):
        total = sum(math.exp(x) for x in z)
        out.append(sum(min(mass * x, math.exp(y) / total) for x, y in zip(p, z, strict=True)))
    return out


@pytest.mark.parametrize(("scale", "decay"), [(1.0, 3.0), (0.4, 0.7)])
def test_lambda_is_its_definition(scale: float, decay: float) -> None:
    kl_R, got_R = ForwardKL()(ROWS).tolist(), LKLambda(scale, decay)(ROWS).tolist()
    for r, alpha in enumerate(alphas(ROWS)):
        w = scale * math.exp(-decay * alpha)
        assert got_R[r] == pytest.approx(w * kl_R[r] + (1 - w) * (1 - alpha), rel=1e-12)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_is_its_definition(k: int) -> None:
    """Neither law is renormalized over the tokens kept."""
    got_R = TopKCrossEntropy(k)(ROWS)
    log_q_RD = ROWS.draft_RD.log_softmax(-1)
    for r in range(5):
        p, log_q = ROWS.p_RD[r].tolist(), log_q_RD[r].tolist()
        kept = sorted(range(7), key=lambda d: -p[d])[:k]
        assert float(got_R[r]) == pytest.approx(-sum(p[d] * log_q[d] for d in kept), rel=1e-12)


EAGLE1 = presets()["eagle1"]


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_smooth_l1_is_its_definition(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state_RH, target_RH = (
        2 * torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    got_R = SmoothL1(beta)(state_RH, target_RH)
    gaps_RH = (state_RH - target_RH).abs()
    assert gaps_RH.min() < beta < gaps_RH.max()  # both branches
    for r in range(4):
        gaps = [
            abs(a - b) for a, b in zip(state_RH[r].tolist(), target_RH[r].tolist(), strict=True)
        ]
        want = sum(x * x / (2 * beta) if x < beta else x - beta / 2 for x in gaps) / 6
        assert float(got_R[r]) == pytest.approx(want, rel=1e-12)


class Tapped(LastLayer):
    """One state as it is, but before the target's final norm."""

    final_norm = False


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"fusion": Concat()}, "set fusion LastLayer"),
        ({"fusion": Tapped()}, "set fusion LastLayer"),
        ({"norms": Norms(embed=False, hidden=False, output=True)}, "set norms.output=false"),
        ({"head": "own"}, "set head=target"),
    ],
)
def test_a_space_of_its_own_is_refused_with_what_to_change(
    changes: dict[str, object], advice: str
) -> None:
    with pytest.raises(ValueError, match="another space") as error:
        SmoothL1().check(dataclasses.replace(EAGLE1, **changes))
    message = str(error.value)
    assert advice in message and message.count("set ") == 1 and "\n" not in message


EAGLE1_SUM = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightedSum([]), "trains nothing"),
        (lambda: WeightedSum([Term(LKAlpha(), 0.0), Term(SmoothL1(), 0.0)]), "trains nothing"),
        (lambda: Term(EAGLE1_SUM), "no sum itself"),
        (
            lambda: Term(LKAlpha(), math.nan),
            "WeightedSum: LKAlpha's weight must be at least 0, not nan",
        ),
        (lambda: LKLambda(scale=1.1), r"LKLambda\.scale must be at most 1, not 1\.1"),
        (lambda: LKLambda(decay=-1.0), r"LKLambda\.decay must be at least 0, not -1"),
        (lambda: TopKCrossEntropy(0), r"TopKCrossEntropy\.k must be at least 1"),
        (lambda: SmoothL1(0.0), r"SmoothL1\.beta must be above 0, not 0"),
        (lambda: JensenShannon(1.0), r"JensenShannon\.beta must lie between 0 and 1"),
    ],
)
def test_losses_without_meaning(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
