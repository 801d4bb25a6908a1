"""What a drafter is trained to minimise.

Legend: R supervised rows, D draft vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor


class Loss:
    """Base of the losses: a frozen spec, called with float32 logits of R rows."""

    def __call__(self, draft_RD: Tensor, teacher_RD: Tensor) -> Tensor:
        """The loss of every row, shape (R,), not reduced.

        Args:
            draft_RD: the drafter's logits.
            teacher_RD: the target's logits on the draft vocabulary, without gradient.
        """
        raise TypeError(f"{type(self).__name__} must say how to compare draft and teacher")


@dataclass(frozen=True)
class SoftCrossEntropy(Loss):
    """``-Σ P log Q``, P the target's law renormalised on the draft vocabulary (https://arxiv.org/abs/2503.01840)."""

    def __call__(self, draft_RD: Tensor, teacher_RD: Tensor) -> Tensor:
        """In nats per row; its floor is the entropy of P."""
        return -(teacher_RD.softmax(-1) * draft_RD.log_softmax(-1)).sum(-1)


def step_weights(steps: int, decay: float) -> list[float]:
    """``decay**k``, normalised to sum to one, so that the learning rate does not depend on the number of steps."""
    total = sum(decay**k for k in range(steps))
    return [decay**k / total for k in range(steps)]
