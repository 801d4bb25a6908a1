"""Losses of the drafter's state.

Legend: R supervised rows, H hidden.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.training.losses.base import FeatureLoss

if TYPE_CHECKING:
    from specdec.drafter import DrafterSpec


@dataclass(frozen=True)
class SmoothL1(FeatureLoss):
    """EAGLE-1's feature regression (https://arxiv.org/abs/2401.15077): Huber's loss over ``beta``, the mean over H.

    Args:
        beta: below this distance the loss is quadratic, above it linear.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"SmoothL1.beta must be positive and finite, not {self.beta}")

    def check(self, spec: "DrafterSpec") -> None:
        """The state must stand where the target's post-final-norm state stands: read from it, fed back in its place,
        and read by the target's own head.

        Raises:
            ValueError: the design gives the state a space of its own.
        """
        fusion = type(spec.fusion).__name__
        reasons = []
        if spec.fusion.mixes or not spec.fusion.final_norm:
            reasons.append(f"fusion {fusion} does not feed the target's last normed state (set fusion LastLayer)")
        if spec.norms.output:
            reasons.append("norms.output=true normalises the state once more (set norms.output=false)")
        if spec.head != "target":
            reasons.append(f"head={spec.head} reads a space of its own (set head=target)")
        if reasons:
            raise ValueError(
                "loss SmoothL1 compares the drafter's state with the target's, and this design's state is in another "
                f"space: {'; '.join(reasons)}; or leave SmoothL1 out of model.loss"
            )

    def __call__(self, state_RH: Tensor, target_RH: Tensor) -> Tensor:
        """(R,), in float32 or wider."""
        dtype = torch.promote_types(torch.promote_types(state_RH.dtype, target_RH.dtype), torch.float32)
        return F.smooth_l1_loss(state_RH.to(dtype), target_RH.to(dtype), reduction="none", beta=self.beta).mean(-1)
