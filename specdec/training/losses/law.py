"""What the losses of a law share.

Legend: R supervised rows, D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG_ZERO = -1e5
"""Stands for the logarithm of nothing, in nats: an infinity times a law of zero would be no number."""


class Slope(NamedTuple):
    """A gradient by logits, and the mean of the gradient by the law that it came from."""

    grad_RD: Tensor
    mean_R: Tensor


def log_target(log_p_RD: Tensor) -> Tensor:
    """A new, finite copy of the logarithm of the target's law: a masked token has ``LOG_ZERO``."""
    return log_p_RD.clamp(min=LOG_ZERO)


def by_logits_(slope_RD: Tensor, q_RD: Tensor, weight_R: Tensor) -> Slope:
    """From a gradient by the law q to one by its logits, ``weight * q * (slope - Σ q slope)``; overwrites the slope."""
    slope_RD.mul_(q_RD)
    mean_R = slope_RD.sum(-1)
    slope_RD.addcmul_(q_RD, mean_R[:, None], value=-1)
    return Slope(slope_RD.mul_(weight_R[:, None]), mean_R)


def inner(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """Sum of products along each row, (R,); no matrix product, which TF32 and autocast would round."""
    return torch.mul(a_RD, b_RD).sum(-1)
