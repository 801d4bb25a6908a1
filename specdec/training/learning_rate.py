"""The learning rate over a run: how long the run is, the scheduler for it, and how a resumed run continues."""

import functools
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch.optim.lr_scheduler import LambdaLR

from specdec.data import TokenData
from specdec.training.schedule import Schedule

NO_LENGTH = (
    "the learning rate's schedule needs the run's length: set trainer.max_steps or trainer.max_epochs; "
    "trainer.max_time can only end it earlier"
)


def run_length(trainer: pl.Trainer, data: TokenData) -> int | None:
    """Return the optimizer steps of the whole run; None where neither steps nor epochs are set.

    Lightning's own ``estimated_stepping_batches`` loses the loader's state in a resumed run.
    """
    if trainer.max_steps > 0:
        return trainer.max_steps
    if not trainer.max_epochs or trainer.max_epochs < 0:
        return None
    batches = len(data.train_dataloader())
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps_per_epoch = max(1, -(-batches // trainer.accumulate_grad_batches))
    return steps_per_epoch * trainer.max_epochs


def known_run_length(trainer: pl.Trainer, data: TokenData) -> int:
    """Return the optimizer steps of the whole run; raise ValueError if neither steps nor epochs are set."""
    if (length := run_length(trainer, data)) is None:
        raise ValueError(NO_LENGTH)
    return length


def check_has_length(trainer: pl.Trainer, schedule: Schedule | LRSchedulerCallable) -> None:
    """Raise ValueError, before any data is read, if the schedule needs a length that the trainer does not have."""
    endless = trainer.max_steps <= 0 and (trainer.max_epochs or 0) <= 0
    if endless and isinstance(schedule, Schedule):
        raise ValueError(NO_LENGTH)


def scheduler_config(
    schedule: Schedule | LRSchedulerCallable,
    optimizer: torch.optim.Optimizer,
    trainer: pl.Trainer,
    data: TokenData,
) -> LRSchedulerConfigType:
    """Return the scheduler of the whole run, as Lightning takes it."""
    if isinstance(schedule, Schedule):
        factor = functools.partial(schedule.factor, total=known_run_length(trainer, data))
        return {"scheduler": LambdaLR(optimizer, factor), "interval": "step", "monitor": None}
    scheduler: Any = schedule(optimizer)
    # Lightning's ReduceLROnPlateau has a monitor, and looks at it once an epoch
    monitor = getattr(scheduler, "monitor", None)
    interval = "epoch" if monitor else "step"
    return {"scheduler": scheduler, "interval": interval, "monitor": monitor}


def use_present_rates(scheduler: LambdaLR, rates: Sequence[float]) -> None:
    """Let a resumed run continue at the current config's learning rates: those restored are the checkpoint's."""
    scheduler.base_lrs = list(rates)
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(scheduler.last_epoch)
