"""Whether a run's features last to its end."""

import math

import lightning.pytorch as pl

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
    batch = data.batch_size * trainer.world_size
    epoch = math.ceil(len(data.splits.train.ids_BT) / batch)
    steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps > 0 else math.inf
    limit = trainer.limit_train_batches
    share = min(epoch, limit) if isinstance(limit, int) else int(epoch * limit)
    batches = min(steps, math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs * share)
    if batches <= share and batches * batch <= first_rows:
        return
    wanted = f"--first_rows {int(batches) * batch}" if batches <= share else "no --first_rows, as it runs for epochs"
    raise ValueError(
        f"the cache of features has the first {first_rows:,} training rows alone, fewer than this run draws: run "
        f"specdec cache with {wanted}, into another directory"
    )
