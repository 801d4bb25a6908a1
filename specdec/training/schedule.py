"""The learning rate over the run."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine down to a fraction of the peak.

    Args:
        warmup: share of all steps spent warming up.
        floor: last learning rate as a share of the peak.
    """

    warmup: float = 0.03
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"schedule: warmup must lie in [0, 1) and floor in [0, 1], not {self.warmup}, {self.floor}"
            )

    def factor(self, step: int, total: int) -> float:
        """Share of the peak learning rate at optimizer step ``step`` of ``total``."""
        warm = max(1, round(self.warmup * total))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, total - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))

    def build(self, optimizer: Optimizer, total: int) -> LambdaLR:
        """A torch scheduler to be stepped after every optimizer step."""
        return LambdaLR(optimizer, lambda step: self.factor(step, total))
