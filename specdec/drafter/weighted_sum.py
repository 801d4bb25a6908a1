"""Fusion by a learned mean of the target's hidden states.

Legend: B batch, T nodes, N aux layers, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdec.drafter.fusion import Fusion, published_layers

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig


class WeightedSumFusion(nn.Module):
    """Weigh the states, add them, and project the sum to the drafter's width."""

    def __init__(self, states: int, width_in: int, width: int) -> None:
        super().__init__()
        self.scores_N = nn.Parameter(torch.zeros(states))  # equal weights at the start
        self.fc = nn.Linear(width_in, width, bias=False)

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        """(B, T, N, H_target) to (B, T, H)."""
        weights_N = self.scores_N.softmax(0, dtype=torch.promote_types(self.scores_N.dtype, torch.float32))
        return self.fc((aux_BTNH * weights_N.to(aux_BTNH.dtype)[:, None]).sum(2))


@dataclass(frozen=True)
class WeightedSum(Fusion):
    """One weight per state, softmax-normalised as in ELMo (https://arxiv.org/abs/1802.05365), then one linear layer.

    The projection has the size that fusion Concat gives a single state, however many states there are.
    """

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """EAGLE-3's three."""
        return published_layers(num_target_layers)

    def build(self, config: "DrafterConfig") -> nn.Module:
        """N scores and one linear layer without bias, for one state too."""
        return WeightedSumFusion(len(config.aux_layers), config.target_hidden_size, config.hidden_size)
