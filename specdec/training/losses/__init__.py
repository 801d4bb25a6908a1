"""What a drafter is trained to minimise."""

from specdec.training.losses.base import FeatureLoss, Graded, LawLoss, Loss, Rows
from specdec.training.losses.combined import NamedTerm, Term, WeightedSum, terms
from specdec.training.losses.distributions import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    ReverseKL,
    SoftCrossEntropy,
    TotalVariation,
)
from specdec.training.losses.features import SmoothL1
from specdec.training.losses.lk import LKAlpha, LKLambda
from specdec.training.losses.top_k import TopKCrossEntropy

__all__ = [
    "FeatureLoss",
    "ForwardKL",
    "Graded",
    "HardCrossEntropy",
    "JensenShannon",
    "LKAlpha",
    "LKLambda",
    "LawLoss",
    "Loss",
    "NamedTerm",
    "ReverseKL",
    "Rows",
    "SmoothL1",
    "SoftCrossEntropy",
    "Term",
    "TopKCrossEntropy",
    "TotalVariation",
    "WeightedSum",
    "terms",
]
