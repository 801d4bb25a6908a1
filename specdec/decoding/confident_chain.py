"""A chain that ends where the drafter begins to doubt.

Legend: B sequences, D draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.decoding.growth import Chain


@dataclass(frozen=True)
class ConfidentChain(Chain):
    """One token after another, until the drafter gives the whole chain less than ``threshold``; at most ``depth``.

    The token that brings doubt is still proposed: it costs nothing any more. Whether to go on is decided by what is
    drafted already, so drawn drafts keep their law. Every level waits for the device once. Of a batch, drafting goes on
    until every chain has ended.

    Raises:
        ValueError: the threshold is no probability below 1.
    """

    threshold: float = 0.2

    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise ValueError(f"growth: threshold must lie in [0, 1), not {self.threshold}")

    @property
    def name(self) -> str:
        return f"chain of at most {self.depth} (threshold {self.threshold:g})"

    def over(self, chosen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        values = [log_probs_BD.gather(1, draft_B[:, None]) for log_probs_BD, draft_B in chosen]
        return torch.cat(values, 1).double().sum(1) < (math.log(self.threshold) if self.threshold else -math.inf)
