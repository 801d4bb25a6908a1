"""What a run keeps besides checkpoints."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from specdec.drafter import save
from specdec.files import write_json
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
        if trainer.is_global_zero and module.drafter is not None and trainer.global_step > 0:
            save(module.drafter, self.directory, replace=True)

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
