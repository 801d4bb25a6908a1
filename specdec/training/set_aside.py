"""Going back on purpose: what a run had trained after the checkpoint that was named is set aside."""

import logging
from pathlib import Path

import lightning.pytorch as pl

from specdec.training.seals import step_of

log = logging.getLogger(__name__)


class SetAside(pl.Callback):
    """Renames the checkpoints of later steps when training begins, so that ``auto`` does not go on with them.

    Args:
        directory: the run's checkpoints; nothing in it is removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """By the first process; the others wait at their first step."""
        if not trainer.is_global_zero:
            return
        for path in sorted(self.directory.glob("*.ckpt")):
            try:
                later = step_of(path) > trainer.global_step
            except ValueError:  # damaged: auto refuses it
                continue
            if later:
                aside = free_name(path)
                path.rename(aside)
                log.warning("going back to step %d: %s is now %s", trainer.global_step, path, aside.name)


def free_name(path: Path) -> Path:
    """``NAME.abandoned``, or ``NAME.abandoned-1`` and so on where that is taken."""
    names = (path.with_name(f"{path.name}.abandoned{f'-{i}' if i else ''}") for i in range(10**6))
    return next(name for name in names if not name.exists())
