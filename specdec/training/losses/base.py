"""What a drafter is trained to minimise: the interface.

Legend: R supervised rows, D draft vocabulary, H hidden.
"""

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.drafter import DrafterSpec


class Rows(NamedTuple):
    """What a loss of the draft law reads: R rows of one unroll step, in float32 or wider. Only ``draft_RD`` has a
    gradient. No tensor may be changed in place."""

    draft_RD: Tensor  # the drafter's logits
    p_RD: Tensor  # the target's law, renormalised on the draft vocabulary
    log_p_RD: Tensor  # its logarithm
    log_mass_R: Tensor  # log of what the target's law over its whole vocabulary has on the draft vocabulary, <= 0
    token_R: Tensor  # int64, draft id of the target's most likely token within the draft vocabulary


class Graded(NamedTuple):
    """A loss with its gradient."""

    loss_R: Tensor  # not reduced, not weighted
    grad_RD: Tensor  # gradient of the weighted sum of the rows' losses by ``draft_RD``


class Loss:
    """Base of the losses: a frozen spec. Subclass :class:`LawLoss` or :class:`FeatureLoss`, not this.

    Its name in logs is the class's, in snake case.
    """

    def check(self, spec: "DrafterSpec") -> None:
        """Raise ValueError for a design that this loss cannot train."""


class LawLoss(Loss):
    """A loss of the drafter's next-token law."""

    reads: ClassVar[frozenset[str]] = frozenset({"log_p_RD", "log_mass_R", "token_R"})
    """What it reads of :class:`Rows` beside the draft logits and p; the rest is not worked out: NaN, -1 for tokens."""
    widens: ClassVar[bool] = False
    """Whether its ``grade`` takes ``rows.draft_RD`` in whatever precision it was made, and computes in float32."""

    def __call__(self, rows: Rows) -> Tensor:
        """The loss of every row, (R,), not reduced, differentiable by ``rows.draft_RD``."""
        raise TypeError(f"{type(self).__name__} must say how to compare draft and target")

    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """Losses, and the gradient of ``(loss_R * weight_R).sum()``, by autograd.

        Override it where the gradient is known in closed form; ``tests/training/losses`` compares the two.
        """
        with torch.enable_grad():
            leaf_RD = rows.draft_RD.detach().requires_grad_()
            loss_R = self(rows._replace(draft_RD=leaf_RD))
            (grad_RD,) = torch.autograd.grad((loss_R * weight_R).sum(), leaf_RD)
        return Graded(loss_R.detach(), grad_RD)

    @torch.no_grad()
    def grade_(self, rows: Rows, weight_R: Tensor) -> Tensor:
        """:meth:`grade` that leaves the gradient in ``rows.draft_RD``, in its precision; the losses, (R,)."""
        loss_R, grad_RD = self.grade(rows, weight_R)
        rows.draft_RD.copy_(grad_RD)
        return loss_R


class FeatureLoss(Loss):
    """A loss of the drafter's state against the target's post-final-norm state that it stands for (EAGLE-1)."""

    def __call__(self, state_RH: Tensor, target_RH: Tensor) -> Tensor:
        """The loss of every row, (R,), differentiable by ``state_RH``."""
        raise TypeError(f"{type(self).__name__} must say how to compare states")
