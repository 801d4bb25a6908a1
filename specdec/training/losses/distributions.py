"""Distances between the drafter's next-token law q and the target's p.

Legend: R supervised rows, D draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.nn.pointwise import pointwise
from specdec.training.losses.base import Graded, LawLoss, Rows
from specdec.training.losses.law import by_logits_, inner, log_target


def _graded(draft_RD: Tensor, p_RD: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    wide_RD = draft_RD.to(p_RD.dtype)
    below_RD = wide_RD - wide_RD.amax(-1, keepdim=True)
    e_RD = below_RD.exp()
    total_R1 = e_RD.sum(-1, keepdim=True)
    loss_R = total_R1.log().squeeze(-1) * p_RD.sum(-1) - (p_RD * below_RD).sum(-1)  # neither term is below zero
    return loss_R, ((e_RD * (1 / total_R1) - p_RD) * weight_R[:, None]).to(draft_RD.dtype)


@pointwise
def _soft_cross_entropy(draft_RD: Tensor, p_RD: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    return _graded(draft_RD, p_RD, weight_R)


@pointwise
def _soft_cross_entropy_(draft_RD: Tensor, p_RD: Tensor, weight_R: Tensor) -> Tensor:
    loss_R, grad_RD = _graded(draft_RD, p_RD, weight_R)
    draft_RD.copy_(grad_RD)
    return loss_R


@dataclass(frozen=True)
class SoftCrossEntropy(LawLoss):
    """``-Σ p log q``, EAGLE-3's loss (https://arxiv.org/abs/2503.01840), in nats; its floor is the entropy of p."""

    reads: ClassVar[frozenset[str]] = frozenset()
    widens: ClassVar[bool] = True

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        return -inner(rows.p_RD, rows.draft_RD.log_softmax(-1))

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """The gradient is ``q - p``."""
        return Graded(*_soft_cross_entropy(rows.draft_RD, rows.p_RD, weight_R.to(rows.p_RD.dtype)))

    @torch.no_grad()
    def grade_(self, rows: Rows, weight_R: Tensor) -> Tensor:
        """In one pass that writes nothing else."""
        return _soft_cross_entropy_(rows.draft_RD, rows.p_RD, weight_R.to(rows.p_RD.dtype))


@dataclass(frozen=True)
class ForwardKL(LawLoss):
    """``KL(p || q)`` in nats: the soft cross entropy less the entropy of p, with the same gradient."""

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        return inner(rows.p_RD, log_target(rows.log_p_RD) - rows.draft_RD.log_softmax(-1))

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """The gradient is ``q - p``."""
        log_q_RD = rows.draft_RD.log_softmax(-1)
        loss_R = log_target(rows.log_p_RD).sub_(log_q_RD).mul_(rows.p_RD).sum(-1)
        return Graded(loss_R, log_q_RD.exp_().sub_(rows.p_RD).mul_(weight_R[:, None]))


@dataclass(frozen=True)
class ReverseKL(LawLoss):
    """``KL(q || p)`` in nats, on the draft vocabulary (https://arxiv.org/abs/2306.13649).

    A token that the target masks counts as ``log p = -1e5``, as the true value would be infinite.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        log_q_RD = rows.draft_RD.log_softmax(-1)
        return inner(log_q_RD.exp(), log_q_RD - log_target(rows.log_p_RD))

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """By q it is ``log q - log p``, but for a constant, and its mean is the loss."""
        log_q_RD = rows.draft_RD.log_softmax(-1)
        slope_RD = log_target(rows.log_p_RD).neg_().add_(log_q_RD)
        grad_RD, loss_R = by_logits_(slope_RD, log_q_RD.exp_(), weight_R)
        return Graded(loss_R, grad_RD)


@dataclass(frozen=True)
class JensenShannon(LawLoss):
    """``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q`` (https://arxiv.org/abs/2306.13649).

    In nats, at most ``log 2``; symmetric at one half. Divided by ``beta`` it nears ``KL(p || q)`` as ``beta`` nears 0,
    and divided by ``1 - beta`` it nears ``KL(q || p)`` as ``beta`` nears 1.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD"})

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(
                f"JensenShannon.beta must lie between 0 and 1, not {self.beta}: at the ends use ForwardKL or ReverseKL"
            )

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        log_p_RD, log_q_RD = log_target(rows.log_p_RD), rows.draft_RD.log_softmax(-1)
        log_m_RD = self._log_mixture(log_p_RD, log_q_RD)
        of_p_R = inner(rows.p_RD, log_p_RD - log_m_RD)
        return self.beta * of_p_R + (1 - self.beta) * inner(log_q_RD.exp(), log_q_RD - log_m_RD)

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """By q it is ``(1 - beta) (log q - log m)``: what m adds is constant."""
        log_p_RD, log_q_RD = log_target(rows.log_p_RD), rows.draft_RD.log_softmax(-1)
        log_m_RD = self._log_mixture(log_p_RD, log_q_RD)
        of_p_R = log_p_RD.sub_(log_m_RD).mul_(rows.p_RD).sum(-1)
        slope_RD = log_m_RD.neg_().add_(log_q_RD)
        grad_RD, of_q_R = by_logits_(slope_RD, log_q_RD.exp_(), (1 - self.beta) * weight_R)
        return Graded(self.beta * of_p_R + (1 - self.beta) * of_q_R, grad_RD)

    def _log_mixture(self, log_p_RD: Tensor, log_q_RD: Tensor) -> Tensor:
        return torch.logaddexp(log_p_RD + math.log(self.beta), log_q_RD + math.log1p(-self.beta))


@dataclass(frozen=True)
class TotalVariation(LawLoss):
    """``1 - Σ min(p, q)`` over the target's whole vocabulary: the chance that a draft sampled from q is rejected
    (https://arxiv.org/abs/2211.17192).

    Outside the draft vocabulary q is nothing, so that ``1 - exp(log_mass)`` is its floor.
    """

    def __call__(self, rows: Rows) -> Tensor:
        """(R,), as half the sum of ``|p - q|``, where alike laws do not cancel."""
        return self._half_distance(rows, rows.p_RD * rows.log_mass_R.exp()[:, None] - rows.draft_RD.softmax(-1))

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """By q it is half the sign of ``q - p``."""
        q_RD = rows.draft_RD.softmax(-1)
        gap_RD = (rows.p_RD * rows.log_mass_R.exp()[:, None]).sub_(q_RD)
        loss_R = self._half_distance(rows, gap_RD)
        return Graded(loss_R, by_logits_(gap_RD.sign_(), q_RD, -0.5 * weight_R).grad_RD)

    def _half_distance(self, rows: Rows, gap_RD: Tensor) -> Tensor:
        beyond_R = -torch.expm1(rows.log_mass_R)
        return 0.5 * (torch.linalg.vector_norm(gap_RD, 1, dim=-1) + beyond_R)


@dataclass(frozen=True)
class HardCrossEntropy(LawLoss):
    """``-log q`` of the target's most likely token within the draft vocabulary, in nats."""

    reads: ClassVar[frozenset[str]] = frozenset({"token_R"})

    def __call__(self, rows: Rows) -> Tensor:
        """(R,)."""
        return -rows.draft_RD.log_softmax(-1).gather(-1, rows.token_R[:, None]).squeeze(-1)

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """The gradient is q less one at the token."""
        log_q_RD, token_R1 = rows.draft_RD.log_softmax(-1), rows.token_R[:, None]
        loss_R = -log_q_RD.gather(-1, token_R1).squeeze(-1)
        grad_RD = log_q_RD.exp_().mul_(weight_R[:, None])
        return Graded(loss_R, grad_RD.scatter_add_(-1, token_R1, -weight_R[:, None].to(grad_RD.dtype)))
