"""The length of a run: its learning rate's schedule, and whether its features last to the end."""

import math
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from specdec.data import TokenData


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
    """Optimizer steps of the whole run; ValueError if neither steps nor epochs are set."""
    # not trainer.estimated_stepping_batches, which loses the loader's state in a resumed run
    if trainer.max_steps > 0:
        return trainer.max_steps
    if not trainer.max_epochs or trainer.max_epochs < 0:
        raise ValueError("the learning rate's schedule needs the run's length: set trainer.max_steps or max_epochs")
    batches = _limited(trainer, len(trainer.datamodule.train_dataloader()))  # type: ignore[attr-defined]
    return max(1, -(-batches // trainer.accumulate_grad_batches)) * trainer.max_epochs


def _limited(trainer: pl.Trainer, batches: int) -> int:
    limit = trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def check_rows(trainer: pl.Trainer, data: TokenData, first_rows: int | None) -> None:
    """Raise ValueError if a run draws a training row that its features lack, which have the ``first_rows`` that the
    first epoch draws first; None: all."""
    if first_rows is None or trainer.state.fn != "fit":
        return
    rows = drawn_rows(trainer, data)
    if rows is None or rows > first_rows:
        wanted = f"--first_rows {rows}" if rows is not None else "no --first_rows"
        raise ValueError(
            f"the cache of features has the first {first_rows:,} training rows alone, fewer than this run draws: run "
            f"specdec cache with {wanted}, into another directory"
        )


def drawn_rows(trainer: pl.Trainer, data: TokenData) -> int | None:
    """How many of the rows that the first epoch draws first; None if others too, or if that cannot be told."""
    scheduled = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.overfit_batches > 0 or scheduled:  # type: ignore[attr-defined]  # in order, not shuffled
        return None
    count, batch = len(data.splits.train.ids_BT), data.batch_size * trainer.world_size
    epoch = _limited(trainer, math.ceil(count / batch))
    steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    epoch_steps = math.ceil(epoch / trainer.accumulate_grad_batches)
    if steps > epoch_steps and trainer.max_epochs != 1:
        return None
    batches = epoch if steps >= epoch_steps else int(steps) * trainer.accumulate_grad_batches
    return min(count, batches * batch)
