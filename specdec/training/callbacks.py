"""What a run keeps: checkpoints, the drafter, and what it was."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from specdec.drafter import save
from specdec.files import write_json, write_text
from specdec.training.ema import drafter_to_keep
from specdec.training.module import DrafterModule


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
        """Keep the final weights, then say that the run is done."""
        self._save(trainer, pl_module)
        if trainer.is_global_zero and not trainer.interrupted:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            figures = {name: value if math.isfinite(value) else None for name, value in found.items()}
            done: dict[str, Any] = {"steps": trainer.global_step, "metrics": figures}
            write_json(self.directory.parent / "DONE.json", done)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what there is after an interruption."""
        if isinstance(exception, KeyboardInterrupt | SystemExit) or type(exception).__name__ == "SIGTERMException":
            self._save(trainer, pl_module)


class RunCheckpoint(ModelCheckpoint):
    """ModelCheckpoint with a drafting run's defaults: the last state always, also when it is interrupted.

    Args:
        every_n_train_steps: optimizer steps between checkpoints.
        save_top_k: how many of these are kept.
    """

    def __init__(self, every_n_train_steps: int = 1000, save_top_k: int = 1) -> None:
        super().__init__(
            filename="step-{step}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=save_top_k,
            monitor="step",
            mode="max",
            save_last=True,
            save_on_exception=True,
            enable_version_counter=False,
        )

    @property
    def state_key(self) -> str:
        """One name whatever the interval, so that a resumed run may change it."""
        return "RunCheckpoint"

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep the state of an interrupted run; there is none before the first step."""
        if trainer.global_step > 0:
            super().on_exception(trainer, pl_module, exception)


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

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write ``config.yaml`` and ``provenance.json``; ``config.1.yaml`` and so on when the run is resumed."""
        if not trainer.is_global_zero:
            return
        times = len(list(self.directory.glob("config*.yaml")))  # a resumed run keeps what it was before
        mark = f".{times}" if times else ""
        write_text(self.directory / f"config{mark}.yaml", self.config)
        write_json(self.directory / f"provenance{mark}.json", self.record)
