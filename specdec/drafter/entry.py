"""How the token embedding meets the feature at the drafter's first layer.

Legend: B batch, T nodes, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec
    from specdec.drafter.norms import NormTable


class Entered(NamedTuple):
    """What the first layer receives."""

    block_BTW: Tensor  # the attention's input, H or 2H wide
    residual_BTH: Tensor  # where the residual path starts


class Entry:
    """Base of the entry axis: a frozen spec that builds ``(e, f, h, norms) -> Entered``."""

    def width(self, hidden_size: int) -> int:
        """Width of the first attention's input."""
        raise TypeError(f"{type(self).__name__} must say how wide it is")

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """Raise ValueError for a config this entry cannot serve."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        """The module."""
        raise TypeError(f"{type(self).__name__} must build a module")


class WideEntry(nn.Module):
    """Embedding and feature side by side into the first layer's q, k and v."""

    def forward(self, e_BTH: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """``e`` normalised embedding, ``f`` normalised feature, ``h`` feature as it came."""
        return Entered(torch.cat([e_BTH, f_BTH], dim=-1), norms.residual(h_BTH, f_BTH))


@dataclass(frozen=True)
class Wide(Entry):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840), as its code has it: q, k and v read 2H channels."""

    def width(self, hidden_size: int) -> int:
        """Twice the hidden width."""
        return 2 * hidden_size

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The input norms of a wide entry are those on its two halves."""
        if config.norms.input:
            raise ValueError("norms.input belongs to entry Narrow; entry Wide is normalised by norms.embed and .hidden")

    def build(self, config: "DrafterConfig") -> nn.Module:
        """No parameters."""
        return WideEntry()


class NarrowEntry(nn.Module):
    """Project embedding and feature to one width before the block."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * width, width, bias=bias)

    def forward(self, e_BTH: Tensor, f_BTH: Tensor, h_BTH: Tensor, norms: "NormTable") -> Entered:
        """``e`` normalised embedding, ``f`` normalised feature, ``h`` feature as it came."""
        merged_BTH = self.fc(torch.cat([e_BTH, f_BTH], dim=-1))
        return Entered(norms.input(merged_BTH), merged_BTH)


@dataclass(frozen=True)
class Narrow(Entry):
    """EAGLE-1 (https://arxiv.org/abs/2401.15077): ``fc([e; f])`` from 2H to H, with a bias in the published code."""

    bias: bool = True

    def width(self, hidden_size: int) -> int:
        """The hidden width."""
        return hidden_size

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        """The residual path starts at the projection, so it cannot start at the normalised feature."""
        if config.norms.residual != "raw":
            raise ValueError(
                "norms.residual=normed belongs to entry Wide; after entry Narrow the residual starts at its projection"
            )

    def build(self, config: "DrafterConfig") -> nn.Module:
        """One linear layer."""
        return NarrowEntry(config.hidden_size, self.bias)
