"""Several losses at once."""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specdec.training.losses.base import Loss

if TYPE_CHECKING:
    from specdec.drafter import DrafterSpec


@dataclass(frozen=True)
class Term:
    """One summand.

    Args:
        loss: any loss but a sum.
        weight: at least 0; the weights of a sum need not add up to one.
    """

    loss: Loss
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.loss, WeightedSum):
            raise ValueError("a WeightedSum cannot hold another: list its terms in the outer one")
        if not isinstance(self.loss, Loss):
            raise ValueError(f"a term of WeightedSum needs a loss, not {self.loss!r}")
        if not 0 <= self.weight < math.inf:
            raise ValueError(
                f"WeightedSum: the weight of {type(self.loss).__name__} must be at least 0 and finite, "
                f"not {self.weight}"
            )


@dataclass(frozen=True)
class WeightedSum(Loss):
    """The weighted sum of losses, such as EAGLE-1's ``1.0 SmoothL1 + 0.1 SoftCrossEntropy``
    (https://arxiv.org/abs/2401.15077).

    It cannot be called: :func:`terms` lists what to call, as losses of the law and of the state read different things.
    """

    terms: list[Term]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("WeightedSum has no terms: give at least one {loss, weight}")
        if not any(term.weight for term in self.terms):
            raise ValueError("WeightedSum: every weight is 0, so that nothing is trained: make one of them positive")

    def check(self, spec: "DrafterSpec") -> None:
        """Every term must be able to train the design."""
        for term in self.terms:
            term.loss.check(spec)


class NamedTerm(NamedTuple):
    """A loss that is no sum, as logs call it."""

    name: str
    weight: float
    loss: Loss


def terms(loss: Loss) -> list[NamedTerm]:
    """What a loss is the sum of: a sum's terms, or the loss itself with weight 1.

    A name is the class's in snake case; further ones of the same class get ``_2``, ``_3`` and so on.
    """
    parts = loss.terms if isinstance(loss, WeightedSum) else [Term(loss)]
    seen: dict[str, int] = {}
    named = []
    for part in parts:
        name = _snake(type(part.loss).__name__)
        seen[name] = seen.get(name, 0) + 1
        named.append(NamedTerm(name if seen[name] == 1 else f"{name}_{seen[name]}", part.weight, part.loss))
    return named


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
