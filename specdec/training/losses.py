"""What a drafter is trained to minimize: the interface, EAGLE-1's and EAGLE-3's losses, and weighted sums of losses.

Further losses are in :mod:`specdec.training.divergences`; one of your own subclasses :class:`DistributionLoss` or
:class:`FeatureLoss` and is named by its import path, ``specdec fit --allow_imports my_parts --model.loss
my_parts.MyLoss``. It needs ``__call__`` alone; ``reads`` and ``loss_and_grad_`` save work (docs/add_a_variant.md).

Legend: R supervised rows, D draft vocabulary, H hidden.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.nn.backend import pointwise, wide
from specdec.utils.numbers import NonNegative, Positive, check_numbers

if TYPE_CHECKING:
    from specdec.drafter import DrafterSpec


class LossRows(NamedTuple):
    """What a loss of the draft distribution reads: R rows of one unroll step, in float32 or wider, ``draft_RD`` too
    unless the loss ``widens`` it. Only ``draft_RD`` has a gradient. No other tensor may be changed in place."""

    draft_RD: Tensor  # the drafter's logits
    p_RD: Tensor  # the target's probabilities, renormalized on the draft vocabulary
    log_p_RD: Tensor  # their logarithm
    # log of what the target's whole distribution has on the draft vocabulary, <= 0
    log_mass_R: Tensor
    token_R: Tensor  # int64, draft id of the target's most likely token within the draft vocabulary


READABLE = frozenset({"log_p_RD", "log_mass_R", "token_R"})
"""The columns of :class:`LossRows` that a loss has to name in ``reads``."""


class Loss:
    """Base of the losses: a frozen spec. Subclass :class:`DistributionLoss` or :class:`FeatureLoss`, not this.

    Its name in logs is the class's, in snake case.
    """

    def check(self, spec: "DrafterSpec") -> None:
        """Raise ValueError for a design that this loss cannot train."""


class DistributionLoss(Loss):
    """A loss of the drafter's next-token distribution q against the target's p."""

    reads: ClassVar[frozenset[str]] = READABLE
    """The columns of :class:`LossRows` that it reads in addition to draft logits and p; others hold NaN, or -1 for
    tokens."""
    widens: ClassVar[bool] = False
    """Whether ``loss_and_grad_`` takes ``rows.draft_RD`` in 16 bits too and converts it, which saves a float32 copy."""

    def __call__(self, rows: LossRows) -> Tensor:
        """The loss of every row, (R,), not reduced, differentiable by ``rows.draft_RD``."""
        raise TypeError(f"{type(self).__name__} must say how to compare draft and target")

    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """The losses, (R,); leaves the gradient of ``(loss_R * weight_R).sum()`` by the logits in ``rows.draft_RD``.

        By autograd; override it with a closed form. In inference mode there is no gradient, and none is left.
        """
        if torch.is_inference_mode_enabled():
            return self(rows)
        with torch.enable_grad():
            leaf_RD = rows.draft_RD.detach().requires_grad_()
            loss_R = self(rows._replace(draft_RD=leaf_RD))
            (grad_RD,) = torch.autograd.grad((loss_R * weight_R).sum(), leaf_RD)
        with torch.no_grad():
            rows.draft_RD.copy_(grad_RD)
        return loss_R.detach()


class FeatureLoss(Loss):
    """A loss of the drafter's state against the target's post-final-norm state that it stands for (EAGLE-1)."""

    def check(self, spec: "DrafterSpec") -> None:
        """Some state must be handed on."""
        if spec.drafting.one_call:
            raise ValueError(
                f"{type(self).__name__} compares the states that steps hand on, and recurrence "
                f"{type(spec.recurrence).__name__} hands on none: leave it out of model.loss"
            )

    def __call__(self, state_RH: Tensor, target_RH: Tensor) -> Tensor:
        """The loss of every row, (R,), differentiable by ``state_RH``."""
        raise TypeError(f"{type(self).__name__} must say how to compare states")


def inner(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """Sum of products along each row, (R,); no matrix product, which TF32 and autocast would round."""
    return torch.mul(a_RD, b_RD).sum(-1)


@dataclass(frozen=True)
class SoftCrossEntropy(DistributionLoss):
    """``-Σ p log q``, EAGLE-3's loss (https://arxiv.org/abs/2503.01840), in nats; its floor is the entropy of p."""

    reads: ClassVar[frozenset[str]] = frozenset()
    widens: ClassVar[bool] = True

    def __call__(self, rows: LossRows) -> Tensor:
        return -inner(rows.p_RD, rows.draft_RD.log_softmax(-1))

    @torch.no_grad()
    def loss_and_grad_(self, rows: LossRows, weight_R: Tensor) -> Tensor:
        """The gradient is ``q - p``."""
        return _soft_cross_entropy_(rows.draft_RD, rows.p_RD, weight_R.to(rows.p_RD.dtype))


@pointwise
def _soft_cross_entropy_(draft_RD: Tensor, p_RD: Tensor, weight_R: Tensor) -> Tensor:
    wide_RD = draft_RD.to(p_RD.dtype)
    below_RD = wide_RD - wide_RD.amax(-1, keepdim=True)
    e_RD = below_RD.exp()
    total_R1 = e_RD.sum(-1, keepdim=True)
    # neither term is below zero
    log_total_R = total_R1.log().squeeze(-1)
    loss_R = log_total_R * p_RD.sum(-1) - (p_RD * below_RD).sum(-1)
    draft_RD.copy_((e_RD * (1 / total_R1) - p_RD) * weight_R[:, None])
    return loss_R


@dataclass(frozen=True)
class SmoothL1(FeatureLoss):
    """EAGLE-1's feature regression (https://arxiv.org/abs/2401.15077): Huber's loss over ``beta``, the mean over H.

    Args:
        beta: below this distance the loss is quadratic, above it linear.
    """

    beta: Positive = 1.0

    def __post_init__(self) -> None:
        check_numbers(SmoothL1, vars(self), "SmoothL1.")

    def check(self, spec: "DrafterSpec") -> None:
        """Raise ValueError unless the state stands where the target's post-final-norm state stands: read from it, fed
        back in its place, and read by the target's own head."""
        required = {
            "fusion LastLayer": not spec.fusion.mixes and spec.fusion.final_norm,
            "norms.output=false": not spec.norms.output,
            "head=target": spec.head == "target",
        }
        missing = [setting for setting, holds in required.items() if not holds]
        if missing:
            raise ValueError(
                "loss SmoothL1 compares the drafter's state with the target's, and this design's state is in another "
                f"space: set {', '.join(missing)}; or leave SmoothL1 out "
                "of model.loss"
            )

    def __call__(self, state_RH: Tensor, target_RH: Tensor) -> Tensor:
        """(R,), in float32 or wider."""
        dtype = wide(torch.promote_types(state_RH.dtype, target_RH.dtype))
        return F.smooth_l1_loss(
            state_RH.to(dtype), target_RH.to(dtype), reduction="none", beta=self.beta
        ).mean(-1)


@dataclass(frozen=True)
class Term:
    """One summand: any loss but a sum; the weights need not add up to one."""

    loss: Loss
    weight: NonNegative = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.loss, WeightedSum) or not isinstance(self.loss, Loss):
            raise ValueError(
                f"a term of WeightedSum needs a loss that is no sum itself, not {self.loss!r}"
            )
        check_numbers(Term, vars(self), f"WeightedSum: {type(self.loss).__name__}'s ")


@dataclass(frozen=True)
class WeightedSum(Loss):
    """The weighted sum of losses, such as EAGLE-1's ``1.0 SmoothL1 + 0.1 SoftCrossEntropy``
    (https://arxiv.org/abs/2401.15077). It is not called: :func:`terms` lists its terms."""

    terms: list[Term]

    def __post_init__(self) -> None:
        for n, term in enumerate(self.terms):
            if not isinstance(term, Term):
                raise ValueError(
                    f"WeightedSum: terms[{n}] must be a Term, as Term(SoftCrossEntropy(), 1.0), not {term!r:.60}"
                )
        if not any(term.weight for term in self.terms):
            raise ValueError(
                "WeightedSum trains nothing: give at least one {loss, weight} with a positive weight"
            )

    def check(self, spec: "DrafterSpec") -> None:
        for term in self.terms:
            term.loss.check(spec)


class NamedTerm(NamedTuple):
    """A loss that is no sum, as logs call it."""

    name: str
    weight: float
    loss: Loss


def terms(loss: Loss) -> list[NamedTerm]:
    """What a loss is the sum of, by the class's name in snake case; further ones of a class get ``_2`` and so on.

    Raises:
        ValueError: one reads a column that :class:`LossRows` doesn't have.
    """
    seen: dict[str, int] = {}
    named = []
    for part in loss.terms if isinstance(loss, WeightedSum) else [Term(loss)]:
        reads = getattr(part.loss, "reads", READABLE)
        if unknown := sorted(set(reads) - READABLE):
            raise ValueError(
                f"loss {type(part.loss).__name__} reads {', '.join(unknown)}: choose from {', '.join(sorted(READABLE))}"
            )
        name = re.sub(
            r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part.loss).__name__
        ).lower()
        seen[name] = seen.get(name, 0) + 1
        named.append(
            NamedTerm(name if seen[name] == 1 else f"{name}_{seen[name]}", part.weight, part.loss)
        )
    return named
