"""What a drafting step hands to the next one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from specdec.drafter.parts import Part

if TYPE_CHECKING:
    from specdec.drafter.config import DrafterConfig, DrafterSpec


class Recurrence(Part):
    """Base of the recurrence axis: a frozen dataclass whose ``build`` makes a module, (raw_BTH, normed_BTH) to the next
    step's feature (B, T, H). The head always reads normed_BTH.

    One of your own: ``--allow_imports my_parts --model.drafter.recurrence my_parts.Mine``.
    """


@dataclass(frozen=True)
class PreNorm(Recurrence):
    """EAGLE-1 to 3: feed the un-normalised output back (https://arxiv.org/abs/2503.01840)."""

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedRaw()


class FeedRaw(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return raw_BTH


@dataclass(frozen=True)
class PostNorm(Recurrence):
    """EAGLE-3.1's ``norm_output``: feed back what the head sees (https://arxiv.org/abs/2605.09992)."""

    def check(self, config: "DrafterConfig | DrafterSpec") -> None:
        if not config.norms.output:
            raise ValueError("recurrence PostNorm needs norms.output=true: there is no norm to feed back from")

    def build(self, config: "DrafterConfig") -> nn.Module:
        return FeedNormed()


class FeedNormed(nn.Module):
    def forward(self, raw_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return normed_BTH
