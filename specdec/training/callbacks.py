"""What a run keeps: the drafter, and what it was."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from specdec.drafter import save
from specdec.files import write_json, write_text
from specdec.training.ema import drafter_to_keep
from specdec.training.module import DrafterModule
from specdec.training.resuming import CONFIG
from specdec.training.sharding import is_sharded


class SaveDrafter(pl.Callback):
    """Writes the drafter's directory when training ends, and when it is interrupted.

    Args:
        directory: where; an older drafter of the same run is replaced whole.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, DrafterModule)
        drafter = drafter_to_keep(trainer, module)
        if trainer.is_global_zero and drafter is not None and trainer.global_step > 0:
            save(drafter, self.directory, replace=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the final weights, then say that the run is done, unless only its time was over."""
        self._save(trainer, pl_module)
        if trainer.is_global_zero and not trainer.interrupted and (_is_at_its_end(trainer) or not _is_late(trainer)):
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            figures = {name: value if math.isfinite(value) else None for name, value in found.items()}
            done: dict[str, Any] = {"steps": trainer.global_step, "metrics": figures}
            write_json(self.directory.parent / "DONE.json", done)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what there is after an interruption."""
        if isinstance(exception, KeyboardInterrupt | SystemExit) and together(trainer, exception):
            self._save(trainer, pl_module)


def _is_at_its_end(trainer: pl.Trainer) -> bool:
    epochs: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    most = trainer.max_epochs or -1
    return 0 <= trainer.max_steps <= trainer.global_step or 0 < most <= epochs


def _is_late(trainer: pl.Trainer) -> bool:
    """Whether ``trainer.max_time`` has passed; what else stops a run early has found that it is done."""
    timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in timers]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def together(trainer: pl.Trainer, exception: BaseException) -> bool:
    """Whether all processes that hold a part of the weights end here: of SIGTERM Lightning tells them all."""
    alone = trainer.world_size == 1 or not is_sharded(trainer)
    return alone or isinstance(exception, SIGTERMException)


class RunRecord(pl.Callback):
    """Writes what the run is into its directory, once target, drafter and data stand.

    Args:
        directory: the run's.
        config: resolved, as YAML.
        record: the provenance.
    """

    def __init__(self, directory: Path, config: str, record: dict[str, Any]) -> None:
        self.directory, self.config, self.record = directory, config, record
        self.trained = False  # has made an optimizer step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note where a resumed run begins."""
        self.begin = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Note that there is something to keep."""
        self.trained = trainer.global_step > self.begin

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the config with the weights, and bring the loggers' rows so far to the disk."""
        checkpoint[CONFIG] = yaml.safe_load(self.config)
        for logger in trainer.loggers:
            logger.save()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write ``config.yaml`` and ``provenance.json``; ``config.1.yaml`` and so on when the run is resumed.

        Raises:
            ValueError: the processes of the run go on from different checkpoints.
        """
        first = trainer.strategy.broadcast(trainer.ckpt_path)
        if first != trainer.ckpt_path:
            raise ValueError(f"this process goes on from {trainer.ckpt_path}, the first from {first}: name one for all")
        if not trainer.is_global_zero:
            return
        (self.directory / "DONE.json").unlink(missing_ok=True)  # of a run that is made longer
        times = len(list(self.directory.glob("config*.yaml")))  # a resumed run keeps what it was before
        mark = f".{times}" if times else ""
        write_text(self.directory / f"config{mark}.yaml", self.config)
        write_json(self.directory / f"provenance{mark}.json", self.record)
