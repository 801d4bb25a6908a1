"""A loss that does not fit is told so at once."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import Tensor

from specdec.training.losses import FeatureLoss, LawLoss, Rows, SmoothL1, SoftCrossEntropy, Term, WeightedSum
from specdec.training.losses.trial import try_losses


@dataclass(frozen=True)
class Mine(LawLoss):
    make: Callable[[Rows], Tensor]

    def __call__(self, rows: Rows) -> Tensor:
        return self.make(rows)


@dataclass(frozen=True)
class MyFeatures(FeatureLoss):
    def __call__(self, state_RH: Tensor, target_RH: Tensor) -> Tensor:
        return (state_RH - target_RH).square()


@dataclass(frozen=True)
class Unfinished(LawLoss):
    pass


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Mine(lambda rows: rows.draft_RD.square()), "Mine cannot be used"),
        (Mine(lambda rows: rows.draft_RD.sum()), r"shape \(3,\)"),
        (Mine(lambda rows: rows.p_RD.sum(-1)), "cannot be used"),
        (Mine(lambda rows: rows.draft_RD.sum(-1) * float("nan")), "not finite"),
        (Mine(lambda rows: rows.draft_RD @ rows.draft_RD), "cannot be used"),
        (Unfinished(), "Unfinished cannot be used"),
        (MyFeatures(), r"MyFeatures must be of shape \(3,\)"),
        (WeightedSum([Term(SoftCrossEntropy()), Term(Unfinished())]), "Unfinished"),
    ],
)
def test_a_loss_that_does_not_fit(loss: LawLoss, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        try_losses(loss)


def test_the_losses_that_are_there_do() -> None:
    for cls in LawLoss.__subclasses__():
        if cls.__module__.startswith("specdec."):
            try_losses(cls())
    try_losses(WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)]))
