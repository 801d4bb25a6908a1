"""Losses of the next-token distribution other than EAGLE-3's cross-entropy: divergences, and what raises acceptance
itself.

q is the drafter's distribution on the draft vocabulary, p the target's. With p over its whole vocabulary,
``alpha = Σ min(p, q)`` is the chance that a draft sampled from q is accepted (https://arxiv.org/abs/2211.17192). The
losses that recipes use have their gradient in closed form.

Legend: R supervised rows, D draft vocabulary, K tokens kept.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.training.losses import DistributionLoss, LossRows, inner
from specdec.utils.numbers import Count, NonNegative, Share, check_numbers

LOG_ZERO = -1e5
"""Stands for the logarithm of nothing, in nats: an infinity times a probability of zero would be no number."""


def log_target(log_p_RD: Tensor) -> Tensor:
    """A new, finite copy of the target's log-probabilities: a masked token has ``LOG_ZERO``."""
    return log_p_RD.clamp(min=LOG_ZERO)


@dataclass(frozen=True)
class ForwardKL(DistributionLoss):
    """``KL(p || q)`` in nats: the soft cross entropy less the entropy of p, with the same gradient."""

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    def __call__(self, rows: LossRows) -> Tensor:
        return inner(rows.p_RD, log_target(rows.log_p_RD) - rows.draft_RD.log_softmax(-1))

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """The gradient is ``q - p``."""
        log_q_RD = rows.draft_RD.log_softmax(-1)
        loss_R = log_target(rows.log_p_RD).sub_(log_q_RD).mul_(rows.p_RD).sum(-1)
        rows.draft_RD.copy_(log_q_RD.exp_().sub_(rows.p_RD).mul_(weight_R[:, None]))
        return loss_R


@dataclass(frozen=True)
class ReverseKL(DistributionLoss):
    """``KL(q || p)`` in nats, on the draft vocabulary (https://arxiv.org/abs/2306.13649)."""

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    def __call__(self, rows: LossRows) -> Tensor:
        log_q_RD = rows.draft_RD.log_softmax(-1)
        return inner(log_q_RD.exp(), log_q_RD - log_target(rows.log_p_RD))


@dataclass(frozen=True)
class JensenShannon(DistributionLoss):
    """``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q`` (https://arxiv.org/abs/2306.13649).

    In nats, at most ``log 2``; symmetric at one half.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(
                f"JensenShannon.beta must lie between 0 and 1, not {self.beta}: at the ends use ForwardKL or ReverseKL"
            )

    def __call__(self, rows: LossRows) -> Tensor:
        log_p_RD = log_target(rows.log_p_RD)
        log_q_RD = rows.draft_RD.log_softmax(-1)
        log_m_RD = torch.logaddexp(
            log_p_RD + math.log(self.beta), log_q_RD + math.log1p(-self.beta)
        )
        of_p_R = inner(rows.p_RD, log_p_RD - log_m_RD)
        return self.beta * of_p_R + (1 - self.beta) * inner(log_q_RD.exp(), log_q_RD - log_m_RD)


@dataclass(frozen=True)
class TotalVariation(DistributionLoss):
    """``1 - Σ min(p, q)`` over the target's whole vocabulary: the chance that a draft sampled from q is rejected
    (https://arxiv.org/abs/2211.17192)."""

    def __call__(self, rows: LossRows) -> Tensor:
        """(R,), as half the sum of ``|p - q|``, where alike distributions do not cancel."""
        return self._half_distance(
            rows, rows.p_RD * rows.log_mass_R.exp()[:, None] - rows.draft_RD.softmax(-1)
        )

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """By q it is half the sign of ``q - p``."""
        q_RD = rows.draft_RD.softmax(-1)
        gap_RD = (rows.p_RD * rows.log_mass_R.exp()[:, None]).sub_(q_RD)
        loss_R = self._half_distance(rows, gap_RD)
        # from a gradient by q to one by its logits: q times the slope less its mean under q
        slope_RD = gap_RD.sign_().mul_(q_RD)
        slope_RD.addcmul_(q_RD, slope_RD.sum(-1, keepdim=True), value=-1)
        rows.draft_RD.copy_(slope_RD.mul_(-0.5 * weight_R[:, None]))
        return loss_R

    def _half_distance(self, rows: LossRows, gap_RD: Tensor) -> Tensor:
        beyond_R = -torch.expm1(rows.log_mass_R)
        return 0.5 * (torch.linalg.vector_norm(gap_RD, 1, dim=-1) + beyond_R)


@dataclass(frozen=True)
class HardCrossEntropy(DistributionLoss):
    """``-log q`` of the target's most likely token within the draft vocabulary, in nats."""

    reads: ClassVar[frozenset[str]] = frozenset({"token_R"})

    def __call__(self, rows: LossRows) -> Tensor:
        log_q_RD = rows.draft_RD.log_softmax(-1)
        return -log_q_RD.gather(-1, rows.token_R[:, None]).squeeze(-1)


@dataclass(frozen=True)
class TopKCrossEntropy(DistributionLoss):
    """HASS's ``-Σ p log q`` over the target's ``k`` most likely tokens (https://arxiv.org/abs/2408.15766), of which
    neither p nor q is renormalized: a row weighs as much as the target's top k hold."""

    reads: ClassVar[frozenset[str]] = frozenset()

    k: Count = 10

    def __post_init__(self) -> None:
        check_numbers(TopKCrossEntropy, vars(self), "TopKCrossEntropy.")

    def __call__(self, rows: LossRows) -> Tensor:
        p_RK, ids_RK = self._top(rows)
        return -(p_RK * rows.draft_RD.log_softmax(-1).gather(-1, ids_RK)).sum(-1)

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """The gradient is q times the mass kept, less the p kept."""
        p_RK, ids_RK = self._top(rows)
        log_q_RD = rows.draft_RD.log_softmax(-1)
        loss_R = -(p_RK * log_q_RD.gather(-1, ids_RK)).sum(-1)
        weighted_RK = p_RK * weight_R[:, None].to(p_RK.dtype)
        grad_RD = log_q_RD.exp_().mul_(weighted_RK.sum(-1, keepdim=True))
        rows.draft_RD.copy_(grad_RD.scatter_add_(-1, ids_RK, weighted_RK.neg_()))
        return loss_R

    def _top(self, rows: LossRows) -> tuple[Tensor, Tensor]:
        count = min(self.k, rows.p_RD.shape[-1])
        return rows.p_RD.topk(count, dim=-1, sorted=False)


@dataclass(frozen=True)
class LKAlpha(DistributionLoss):
    """``-log alpha`` of every row by itself (https://arxiv.org/abs/2602.23881), computed in logarithms: without any
    overlap it is still finite, with a gradient of ordinary size."""

    def __call__(self, rows: LossRows) -> Tensor:
        log_p_RD = rows.log_p_RD + rows.log_mass_R[:, None]
        return -torch.minimum(log_p_RD, rows.draft_RD.log_softmax(-1)).logsumexp(-1)

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """By log q it is the share in alpha of every token where q is the smaller; an equal one counts half."""
        log_q_RD = rows.draft_RD.log_softmax(-1)
        gap_RD = rows.log_p_RD + rows.log_mass_R[:, None]
        share_RD = torch.minimum(gap_RD, log_q_RD)
        log_alpha_R = share_RD.logsumexp(-1)
        share_RD.sub_(log_alpha_R[:, None]).exp_()
        grad_RD = gap_RD.sub_(log_q_RD).sign_().add_(1).mul_(share_RD)
        grad_RD.addcmul_(log_q_RD.exp_(), grad_RD.sum(-1, keepdim=True), value=-1)
        # one, but for the rounding of a large log_alpha
        scale_R = -0.5 * weight_R / share_RD.sum(-1)
        rows.draft_RD.copy_(grad_RD.mul_(scale_R[:, None]))
        return -log_alpha_R


@dataclass(frozen=True)
class LKLambda(DistributionLoss):
    """``w KL(p || q) + (1 - w)(1 - alpha)``, ``w = scale exp(-decay alpha)`` (https://arxiv.org/abs/2602.23881).

    KL, of p renormalized on the draft vocabulary, leads while drafts are poor, where total variation has almost no
    gradient. ``w`` is each row's own and a constant for the gradient.

    Args:
        scale: ``w`` at no acceptance, in [0, 1]; 0 is ``TotalVariation``.
        decay: how fast ``w`` falls, at least 0; with 0 the blend is fixed.
    """

    scale: Share = 1.0
    decay: NonNegative = 3.0

    def __post_init__(self) -> None:
        check_numbers(LKLambda, vars(self), "LKLambda.")

    def __call__(self, rows: LossRows) -> Tensor:
        rejected_R = TotalVariation()(rows)
        w_R = self._weight(rejected_R.detach())
        return w_R * ForwardKL()(rows) + (1 - w_R) * rejected_R

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """The blend of the two gradients."""
        divergent = rows._replace(draft_RD=rows.draft_RD.clone())
        rejected_R = TotalVariation().loss_and_grad_(rows, weight_R)
        w_R = self._weight(rejected_R)
        kl_R = ForwardKL().loss_and_grad_(divergent, weight_R * w_R)
        rows.draft_RD.copy_(divergent.draft_RD.addcmul_(rows.draft_RD, (1 - w_R)[:, None]))
        return w_R * kl_R + (1 - w_R) * rejected_R

    def _weight(self, rejected_R: Tensor) -> Tensor:
        return self.scale * torch.exp(-self.decay * (1 - rejected_R))
