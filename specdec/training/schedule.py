"""The learning rate over the run."""

import math
from dataclasses import dataclass

import lightning.pytorch as pl
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


def total_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ValueError: neither steps nor epochs are set.
    """
    # not trainer.estimated_stepping_batches, which loses the loader's state in a resumed run
    data = trainer.datamodule  # type: ignore[attr-defined]
    if trainer.max_steps > 0:
        return trainer.max_steps
    if not trainer.max_epochs or trainer.max_epochs < 0:
        raise ValueError("the learning rate's schedule needs the run's length: set trainer.max_steps or max_epochs")
    batches, limit = len(data.train_dataloader()), trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return max(1, -(-batches // trainer.accumulate_grad_batches)) * trainer.max_epochs
