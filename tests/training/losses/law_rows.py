"""Rows of laws, and the losses of a law, that these tests share."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.training.losses import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    LawLoss,
    LKAlpha,
    LKLambda,
    ReverseKL,
    Rows,
    SoftCrossEntropy,
    TopKCrossEntropy,
    TotalVariation,
)

LAW_LOSSES: list[LawLoss] = [
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


def rows_of(draft_RD: Tensor, target_RV: Tensor) -> Rows:
    """The draft vocabulary is the first D target tokens."""
    kept_RD = target_RV[:, : draft_RD.shape[-1]]
    log_p_RD = kept_RD.log_softmax(-1)
    log_mass_R = kept_RD.logsumexp(-1) - target_RV.logsumexp(-1)
    return Rows(draft_RD, log_p_RD.exp(), log_p_RD, log_mass_R, kept_RD.argmax(-1))


def random_rows(seed: int = 0, rows: int = 5, draft: int = 7, vocab: int = 11) -> Rows:
    """Float64, laws neither flat nor sharp."""
    generator = torch.Generator().manual_seed(seed)
    draft_RD = 2 * torch.randn(rows, draft, dtype=torch.float64, generator=generator)
    return rows_of(draft_RD, 2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator))


def alike(rows: Rows) -> Rows:
    """The same target, met exactly on the draft vocabulary, up to a shift of the logits."""
    return rows._replace(draft_RD=rows.log_p_RD + 5.0)


def slope(function: Callable[[Tensor], Tensor], at_RD: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient of a scalar function by central differences."""
    slope_RD = torch.zeros_like(at_RD)
    for index in range(at_RD.numel()):
        nudge_RD = torch.zeros_like(at_RD)
        nudge_RD.view(-1)[index] = step
        slope_RD.view(-1)[index] = (function(at_RD + nudge_RD) - function(at_RD - nudge_RD)) / (2 * step)
    return slope_RD
