"""Whether a run's features last to its end."""

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from specdec.data import TokenData


def check_rows(trainer: pl.Trainer, data: TokenData, first_rows: int | None) -> None:
    """See that a run draws no training row that its features lack.

    Args:
        first_rows: how many they have, those that the first epoch draws first; None if they have all.

    Raises:
        ValueError: it draws others.
    """
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
    limit, whole = trainer.limit_train_batches, math.ceil(count / batch)
    epoch = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
    epoch_steps = math.ceil(epoch / trainer.accumulate_grad_batches)
    steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    if steps > epoch_steps and trainer.max_epochs != 1:
        return None
    batches = epoch if steps >= epoch_steps else int(steps) * trainer.accumulate_grad_batches
    return min(count, batches * batch)
