"""How the target's hidden states become the drafter's feature.

Legend: B batch, T nodes, N aux layers, H hidden.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from specdec.nn.backend import wide
from specdec.nn.parts import Part
from specdec.utils.text import how_many

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig


class Fusion(Part):
    """Base of the fusion axis: its module goes from (B, T, N, H_target) to (B, T, H)."""

    final_norm: ClassVar[bool] = False
    """Whether the state at the last boundary is asked for after the target's final norm."""
    mixes: ClassVar[bool] = True
    """Whether a learned projection stands between the target's states and the drafter's width."""

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Boundaries tapped when the user names none: EAGLE-3's 2, L // 2 and L - 3 (https://arxiv.org/abs/2503.01840).

        Raises:
            ValueError: the target is too shallow for three that increase.
        """
        layers = (2, num_target_layers // 2, num_target_layers - 3)
        if not 0 <= layers[0] < layers[1] < layers[2]:
            raise ValueError(
                f"a target of {how_many(num_target_layers, 'layer')} is too shallow for EAGLE-3's boundaries 2, L//2 "
                f"and L-3 (they would be {list(layers)}): set aux_layers"
            )
        return layers


@dataclass(frozen=True)
class LastLayer(Fusion):
    """EAGLE-1's feature (https://arxiv.org/abs/2401.15077): the target's last state after its final norm, as it is."""

    final_norm: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        return (num_target_layers,)

    def check(self, config: "DrafterConfig") -> None:
        """Raise ValueError unless there is one state, of the drafter's own width."""
        if config.aux_layers != (config.num_target_layers,):
            raise ValueError(
                f"fusion LastLayer taps boundary {config.num_target_layers} alone, not {list(config.aux_layers)}"
            )
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"fusion LastLayer keeps the target's width {config.target_hidden_size}; hidden_size "
                f"{config.hidden_size} needs a projection: use fusion Concat"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        return nn.Flatten(2)


@dataclass(frozen=True)
class Concat(Fusion):
    """EAGLE-3's fusion (https://arxiv.org/abs/2503.01840): low, middle and high states through one linear layer."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        """Return one linear layer without bias, for one state too."""
        fc = nn.Linear(
            len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False
        )
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(2), fc=fc))


@dataclass(frozen=True)
class ScalarMix(Fusion):
    """One weight per state, softmax-normalized as in ELMo (https://arxiv.org/abs/1802.05365), then one linear layer.

    The projection has the size that fusion Concat gives a single state, however many states there are.
    """

    def build(self, config: "DrafterConfig") -> nn.Module:
        """N scores and one linear layer without bias, for one state too."""
        return ScalarMixFusion(
            len(config.aux_layers), config.target_hidden_size, config.hidden_size
        )


class ScalarMixFusion(nn.Module):
    """Weigh the states, add them, and project the sum to the drafter's width."""

    def __init__(self, states: int, width_in: int, width: int) -> None:
        super().__init__()
        self.scores_N = nn.Parameter(torch.zeros(states))  # equal weights at the start
        self.fc = nn.Linear(width_in, width, bias=False)

    def forward(self, aux_BTNH: Tensor) -> Tensor:
        """(B, T, N, H_target) to (B, T, H)."""
        weights_N = self.scores_N.softmax(0, dtype=wide(self.scores_N.dtype))
        return self.fc((aux_BTNH * weights_N.to(aux_BTNH.dtype)[:, None]).sum(2))
