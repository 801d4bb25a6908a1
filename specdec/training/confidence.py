"""What trains a drafter's confidence head: the chance that each of its drafts is accepted (DSpark).

The chance is ``Σ min(p, q)`` (https://arxiv.org/abs/2211.17192), which a training step knows exactly of every slot, p
over the target's whole vocabulary. So the head learns from a number between 0 and 1, not from one drawn outcome.

Legend: K unroll steps, S slots, R rows (slots of one step), D draft vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.training.head_loss import Index
from specdec.training.losses import DistributionLoss, Loss, NamedTerm
from specdec.training.metrics import overlap
from specdec.training.target_head import TargetProbs

if TYPE_CHECKING:
    from specdec.drafter import DrafterSpec


@dataclass(frozen=True)
class ConfidenceLoss(Loss):
    """The cross-entropy, in nats, of the confidence head's estimate against the chance that a draft sampled from q is
    accepted (DSpark, https://github.com/deepseek-ai/DeepSpec). Its floor is the entropy of that chance."""

    def check(self, spec: "DrafterSpec") -> None:
        """Raise ValueError unless the drafter has such a head."""
        if not spec.drafting.has_confidence:
            raise ValueError(
                "loss ConfidenceLoss trains a confidence head, and this design has none: use recurrence MarkovBlock "
                "with confidence=true, or leave the loss out of model.loss"
            )

    def __call__(self, logit_R: Tensor, chance_R: Tensor) -> Tensor:
        """The loss of every row, (R,), differentiable by ``logit_R``, the logit of the estimate."""
        return F.binary_cross_entropy_with_logits(
            logit_R, chance_R.to(logit_R.dtype), reduction="none"
        )


def check_confidence_is_trained(spec: "DrafterSpec", terms: list[NamedTerm]) -> None:
    """Raise ValueError for a drafter with a confidence head that no loss trains, or that is all that is trained."""
    weighted = [term.loss for term in terms if term.weight]
    trained = any(isinstance(loss, ConfidenceLoss) for loss in weighted)
    if trained and not any(isinstance(loss, DistributionLoss) for loss in weighted):
        raise ValueError(
            "model.loss trains the confidence head alone, and no drafts: add a loss such as SoftCrossEntropy to a "
            "WeightedSum (conf/train/dspark.yaml)"
        )
    if spec.drafting.has_confidence and not trained:
        raise ValueError(
            "the drafter has a confidence head that no loss trains: use --config conf/train/dspark.yaml (in Python see "
            "docs/python.md), or set model.drafter.recurrence.init_args.confidence=false and model.ttt_steps="
            f"{spec.drafting.fixed_drafts}"
        )


class AcceptanceChances:
    """Keeps the chance that each slot's draft is accepted, while a piece's logits are in memory."""

    def __init__(self, trained_KS: Tensor, dtype: torch.dtype) -> None:
        self.chance_KS = torch.zeros(trained_KS.shape, dtype=dtype, device=trained_KS.device)

    def __call__(self, k: int, slots: Index, logits_RD: Tensor, probs: TargetProbs) -> None:
        chance_R = overlap(logits_RD, probs)
        self.chance_KS[k, slots] = chance_R.clamp(0, 1).to(self.chance_KS.dtype)
