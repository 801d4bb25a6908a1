"""What the unroll steps of a slot weigh in the loss: by depth alone, or by how well the slot was drafted before them.

One of your own subclasses :class:`StepWeights` or :class:`PrefixWeights` and is named by its import path, as a loss is.

Legend: B rows of the batch, T tokens, S = B T slots, K unroll steps, R rows (slots of one step), D draft vocabulary, H
hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.nn.backend import wide
from specdec.training.head_loss import HeadTask, Index, head_loss
from specdec.training.metrics import overlap
from specdec.training.target_head import TargetProbs
from specdec.utils.numbers import PositiveShare, Share, check_numbers


class StepWeights:
    """Base of the weights: a frozen spec. The loss is the rows' mean by these weights, one denominator for all."""

    def factors(self, steps: int) -> list[float]:
        """Return what each step weighs, whatever the row."""
        raise TypeError(f"{type(self).__name__} must say what each step weighs")


class PrefixWeights(StepWeights):
    """Weights, times the factors, that depend on a slot's other steps. They are constants for the gradient, and worked
    out by a first pass over both heads, which costs the products of their forward pass once more."""

    def factors(self, steps: int) -> list[float]:
        return [1.0] * steps

    reads: ClassVar[frozenset[str]] = frozenset({"token_R"})
    """The columns of :class:`specdec.training.losses.LossRows` that :meth:`observe` reads besides p."""

    def observe(self, logits_RD: Tensor, probs: TargetProbs) -> Tensor:
        """Return what :meth:`weights` needs to know of R rows of a step, (R,).

        Args:
            logits_RD: the drafter's.
            probs: the target's, of the same rows; ``covered_C`` says whether its most likely token, ``token_C``, is in
                the draft vocabulary; if not, no greedy draft can be right.
        """
        raise TypeError(f"{type(self).__name__} must say what it looks at")

    def weights(self, seen_KS: Tensor, chained_KS: Tensor) -> Tensor:
        """The weights, (K, S), none below zero.

        Args:
            seen_KS: what was looked at; zero where nothing was.
            chained_KS: bool, each slot's steps before the first that is not trained; weights elsewhere become zero.
        """
        raise TypeError(f"{type(self).__name__} must say what a slot's steps weigh")


@dataclass(frozen=True)
class Decay(StepWeights):
    """``base**k`` for every row of step k. DFlash's ``exp(-k / gamma)`` (https://arxiv.org/abs/2602.06036), gamma 4 to
    7, is base ``exp(-1 / gamma)``, 0.78 to 0.87.

    Args:
        base: EAGLE-3's 0.8; 1 weighs all steps alike.
    """

    base: PositiveShare = 0.8

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), f"{type(self).__name__}.")

    def factors(self, steps: int) -> list[float]:
        return [self.base**k for k in range(steps)]


@dataclass(frozen=True)
class AcceptUntilFail(Decay, PrefixWeights):
    """``base**k`` for a slot's steps up to the first whose greedy draft is not the target's greedy token, that one
    included, and nothing for those after it, which decoding would not use (Spec-AUF, https://arxiv.org/abs/2607.01893).

    Args:
        base: as of ``Decay``.
    """

    def observe(self, logits_RD: Tensor, probs: TargetProbs) -> Tensor:
        """Whether the greedy draft is right."""
        return (logits_RD.argmax(-1) == probs.token_C) & probs.covered_C

    def weights(self, seen_KS: Tensor, chained_KS: Tensor) -> Tensor:
        return _chance_before(seen_KS)


@dataclass(frozen=True)
class DPACE(PrefixWeights):
    """What a step's confidence is worth to the accepted length (D-PACE, https://arxiv.org/abs/2605.18810).

    With ``a_k`` the drafter's probability of the target's most likely token and ``s_k = (1 - alpha) a_k + alpha``, the
    length is taken for ``Σ_k Π_{i<=k} s_i``, and step j weighs its gradient by ``log s_j``:
    ``Π_{i<=j} s_i (1 + Σ_{m>j} Π_{j<i<=m} s_i)``.

    Args:
        alpha: 0 trusts the confidences, which starves late steps while drafts are poor; 1 weighs by depth alone.
    """

    alpha: Share = 0.5

    def __post_init__(self) -> None:
        check_numbers(DPACE, vars(self), "DPACE.")

    def observe(self, logits_RD: Tensor, probs: TargetProbs) -> Tensor:
        """The confidence: zero for a token that the draft vocabulary lacks."""
        q_RD = logits_RD.softmax(-1, dtype=wide(logits_RD.dtype))
        return q_RD.gather(-1, probs.token_C[:, None]).squeeze(-1) * probs.covered_C

    def weights(self, seen_KS: Tensor, chained_KS: Tensor) -> Tensor:
        s_KS = ((1 - self.alpha) * seen_KS + self.alpha) * chained_KS
        return s_KS.cumprod(0) * _length_ahead(s_KS)


@dataclass(frozen=True)
class AcceptedLength(PrefixWeights):
    """What a step's chance of acceptance is worth to the accepted length. With ``a_k = Σ min(p, q)``, the chance that
    draft k is accepted (https://arxiv.org/abs/2211.17192), ``Σ_k Π_{i<=k} a_i`` drafts of a slot are accepted on
    average; step j weighs ``Π_{i<j} a_i (1 + Σ_{m>j} Π_{j<i<=m} a_i)``, the derivative by ``a_j``. So the loss
    ``TotalVariation``, which is ``1 - a``, has the gradient of the accepted length itself.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"log_mass_R"})

    def observe(self, logits_RD: Tensor, probs: TargetProbs) -> Tensor:
        """The chance that the draft is accepted."""
        return overlap(logits_RD, probs)

    def weights(self, seen_KS: Tensor, chained_KS: Tensor) -> Tensor:
        a_KS = seen_KS * chained_KS
        return _chance_before(a_KS) * _length_ahead(a_KS)


def _chance_before(chance_KS: Tensor) -> Tensor:
    """Return the chance that a chain reaches each step, (K, S): ``Π_{i<j} chance_i``."""
    return torch.cat([torch.ones_like(chance_KS[:1]), chance_KS[:-1]]).cumprod(0)


def _length_ahead(chance_KS: Tensor) -> Tensor:
    """Return how long a chain is from each step on, that step included, if it is accepted, (K, S):
    ``1 + Σ_{m>j} Π_{j<i<=m} chance_i``."""
    ahead_S = torch.zeros_like(chance_KS[0])
    ahead = list[Tensor]()
    for chance_S in chance_KS.flip(0):
        ahead.insert(0, 1 + ahead_S)
        ahead_S = chance_S * ahead[0]
    return torch.stack(ahead)


@torch.no_grad()
def slot_weights(
    part: PrefixWeights,
    task: HeadTask,
    weights: Sequence[Tensor],
    normed: Sequence[Tensor],
    trained_KBT: Tensor,
) -> Tensor:
    """Return what each step of each slot weighs, (K, S), in float32 or wider: a first pass over the same pieces."""
    trained_KS = trained_KBT.flatten(1)
    seen_KS = torch.zeros(trained_KS.shape, dtype=wide(normed[0].dtype), device=normed[0].device)

    def observe(k: int, slots: Index, logits_RD: Tensor, probs: TargetProbs) -> None:
        seen_KS[k, slots] = part.observe(logits_RD, probs).to(seen_KS.dtype)

    head_loss(task._replace(terms=(), observers=[observe]), weights, normed)
    chained_KS = trained_KS.cumprod(0)
    return part.weights(seen_KS, chained_KS.bool()) * chained_KS
