"""A loss of the target's favourite tokens alone.

Legend: R supervised rows, D draft vocabulary, K tokens kept.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.training.losses.base import Graded, LawLoss, Rows


@dataclass(frozen=True)
class TopKCrossEntropy(LawLoss):
    """HASS's ``-Σ p log q`` over the target's ``k`` most likely tokens (https://arxiv.org/abs/2408.15766).

    As in HASS p is **not** renormalised over these tokens, nor is q: both are laws of the draft vocabulary. A row
    therefore weighs as much as the target's top k hold, and all of q is drawn to them. HASS adds it with weight 1 to
    EAGLE-1's sum.

    Args:
        k: tokens kept; a draft vocabulary with fewer keeps all, which is ``SoftCrossEntropy``.
    """

    reads: ClassVar[frozenset[str]] = frozenset()

    k: int = 10

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopKCrossEntropy.k must be at least 1, not {self.k}")

    def __call__(self, rows: Rows) -> Tensor:
        """(R,), in nats."""
        p_RK, ids_RK = self._top(rows)
        return -(p_RK * rows.draft_RD.log_softmax(-1).gather(-1, ids_RK)).sum(-1)

    @torch.no_grad()
    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """The gradient is q times the mass kept, less the p kept."""
        p_RK, ids_RK = self._top(rows)
        log_q_RD = rows.draft_RD.log_softmax(-1)
        loss_R = -(p_RK * log_q_RD.gather(-1, ids_RK)).sum(-1)
        weighted_RK = p_RK * weight_R[:, None].to(p_RK.dtype)
        grad_RD = log_q_RD.exp_().mul_(weighted_RK.sum(-1, keepdim=True))
        return Graded(loss_R, grad_RD.scatter_add_(-1, ids_RK, weighted_RK.neg_()))

    def _top(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return rows.p_RD.topk(min(self.k, rows.p_RD.shape[-1]), dim=-1, sorted=False)
