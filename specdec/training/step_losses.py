"""The loss of every batch, exactly: what a rerun is compared with."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.files import explain, write_text

LOSSES = "losses.txt"


class StepLosses(pl.Callback):
    """Writes ``step part loss`` for every batch of the first process, the loss in hexadecimal, so that no bit is lost.

    ``step`` counts optimizer steps from 0, ``part`` the batches of one. Losses stay on the device until the next
    logged step or checkpoint; a resumed run forgets those after its checkpoint.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: list[tuple[int, int, Tensor]] = []
        self._step, self._part = -1, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what is before the step at which training begins."""
        self._held, self._step, self._part = [], -1, 0
        if not trainer.is_global_zero:
            return
        lines = read_lines(self.path) if self.path.exists() else []
        write_text(self.path, "".join(f"{line}\n" for line in lines if int(line.split()[0]) < trainer.global_step))

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Count the batches of a step."""
        self._part = self._part + 1 if trainer.global_step == self._step else 0
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any) -> None:
        """Hold the loss as the backward pass took it."""
        if not trainer.is_global_zero:
            return
        self._held.append((self._step, self._part, outputs["loss"].detach()))
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every > 0 and len(self._held) >= every:
            self._write()

    def on_save_checkpoint(self, trainer: pl.Trainer, *rest: Any) -> None:
        """What a checkpoint has seen is on the disk."""
        self._write()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the rest."""
        self._write()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the rest."""
        self._write()

    def _write(self) -> None:
        if not self._held:
            return
        losses = torch.stack([loss for _, _, loss in self._held]).double().tolist()
        lines = [f"{step} {part} {loss.hex()}\n" for (step, part, _), loss in zip(self._held, losses, strict=True)]
        self._held = []
        try:
            with self.path.open("a", encoding="ascii") as file:
                file.writelines(lines)
        except OSError as error:
            raise explain(error, self.path) from error


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file of losses; one that a kill cut short counts for nothing."""
    return path.read_text(encoding="ascii").split("\n")[:-1]
