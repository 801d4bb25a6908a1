"""The LK losses, which raise the acceptance rate itself (https://arxiv.org/abs/2602.23881).

The acceptance rate of a row is ``alpha = Σ min(p, q)``, p the target's law over its whole vocabulary: the chance that a
draft sampled from q is accepted.

Legend: R supervised rows, D draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.training.losses.base import Graded, LawLoss, Rows
from specdec.training.losses.distributions import ForwardKL, TotalVariation


@dataclass(frozen=True)
class LKAlpha(LawLoss):
    """``-log alpha`` (https://arxiv.org/abs/2602.23881).

    Of every row by itself, so that the objective is the mean of the logarithms; others take the logarithm of the mean
    ``alpha`` of a batch, which depends on what else is in the batch. Worked out in logarithms: laws that do not
    overlap at all still have a finite loss and a gradient of ordinary size.
    """

    def __call__(self, rows: Rows) -> Tensor:
        """(R,), in nats."""
        log_p_RD = rows.log_p_RD + rows.log_mass_R[:, None]
        return -torch.minimum(log_p_RD, rows.draft_RD.log_softmax(-1)).logsumexp(-1)

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """By log q it is the share in alpha of every token where q is the smaller; an equal one counts half."""
        log_q_RD, gap_RD = rows.draft_RD.log_softmax(-1), rows.log_p_RD + rows.log_mass_R[:, None]
        share_RD = torch.minimum(gap_RD, log_q_RD)
        log_alpha_R = share_RD.logsumexp(-1)
        share_RD.sub_(log_alpha_R[:, None]).exp_()
        grad_RD = gap_RD.sub_(log_q_RD).sign_().add_(1).mul_(share_RD)
        grad_RD.addcmul_(log_q_RD.exp_(), grad_RD.sum(-1, keepdim=True), value=-1)
        scale_R = -0.5 * weight_R / share_RD.sum(-1)  # one, but for the rounding of a large log_alpha
        return Graded(-log_alpha_R, grad_RD.mul_(scale_R[:, None]))


@dataclass(frozen=True)
class LKLambda(LawLoss):
    """``w KL(p || q) + (1 - w)(1 - alpha)``, ``w = scale exp(-decay alpha)`` (https://arxiv.org/abs/2602.23881).

    KL, of p renormalised on the draft vocabulary, leads while drafts are poor, where total variation has hardly a
    gradient. ``w`` is each row's own and a constant for the gradient.

    Args:
        scale: ``w`` at no acceptance, in [0, 1]; 0 is ``TotalVariation``.
        decay: how fast ``w`` falls, at least 0; with 0 the blend is fixed.
    """

    scale: float = 1.0
    decay: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.scale <= 1:
            raise ValueError(f"LKLambda.scale must lie in [0, 1], not {self.scale}")
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"LKLambda.decay must be at least 0 and finite, not {self.decay}")

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        rejected_R = TotalVariation()(rows)
        w_R = self._weight(rejected_R.detach())
        return w_R * ForwardKL()(rows) + (1 - w_R) * rejected_R

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """The blend of the two gradients."""
        rejection = TotalVariation().grade(rows, weight_R)
        w_R = self._weight(rejection.loss_R)
        kl = ForwardKL().grade(rows, weight_R * w_R)
        loss_R = w_R * kl.loss_R + (1 - w_R) * rejection.loss_R
        return Graded(loss_R, kl.grad_RD.addcmul_(rejection.grad_RD, (1 - w_R)[:, None]))

    def _weight(self, rejected_R: Tensor) -> Tensor:
        return self.scale * torch.exp(-self.decay * (1 - rejected_R))
