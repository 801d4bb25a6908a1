"""The checkpoints of a run: when they are written, and which are kept."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from specdec.training.boundary import Boundary
from specdec.training.callbacks import together

NAME = "step-"


class RunCheckpoint(ModelCheckpoint):
    """ModelCheckpoint with a drafting run's defaults: the last state always, also when it is interrupted.

    It saves between two optimizer steps only: a loader has counted the batches of a step that has begun, and the
    gradients of half a step are in no checkpoint. After an error the checkpoint before it is the one to go on from.
    Which are kept is decided by what lies in the folder: Lightning's own count forgets a file at every crash.

    Args:
        every_n_train_steps: optimizer steps between checkpoints.
        save_top_k: how many of these are kept, the newest; -1 for all.
    """

    def __init__(self, every_n_train_steps: int = 1000, save_top_k: int = 1) -> None:
        super().__init__(
            filename=f"{NAME}{{step}}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=min(save_top_k, 0),
            save_last=True,
            save_on_exception=True,
            enable_version_counter=False,
        )
        self.save_top_k = save_top_k
        self._boundary: Boundary | None = None  # until training starts

    @property
    def state_key(self) -> str:
        """One name whatever the interval, so that a resumed run may change it."""
        return "RunCheckpoint"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the step that a resumed run begins with for saved: Lightning would save it anew after the next batch,
        which under accumulation is in the midst of the step that follows."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step
        self._boundary = Boundary(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Save when it is due, and after the last step: once training has ended Lightning counts the epoch as whole."""
        assert self._boundary is not None
        self._boundary.reach()
        super().on_train_batch_end(trainer, *rest)
        if trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._keep_last(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the last state, whatever ended the training."""
        self._keep_last(trainer)

    def _keep_last(self, trainer: pl.Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep the state of a run that is stopped between two steps; there is none before the first."""
        stopped = isinstance(exception, KeyboardInterrupt | SystemExit)
        if stopped and trainer.global_step > 0 and self._is_between_steps() and together(trainer, exception):
            super().on_exception(trainer, pl_module, exception)

    def _should_skip_saving_checkpoint(self, trainer: pl.Trainer) -> bool:
        return super()._should_skip_saving_checkpoint(trainer) or not self._is_between_steps()

    def _is_between_steps(self) -> bool:
        return self._boundary is not None and self._boundary.holds()

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k != 0:
            self._save_checkpoint(trainer, self.format_checkpoint_name(monitor_candidates))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        try:
            super()._save_checkpoint(trainer, filepath)
        except ValueError as error:
            kept = sorted(self._kept(trainer.global_step), reverse=True)
            last = f"the last whole checkpoint is {kept[0][1]}" if kept else "there is no earlier checkpoint"
            raise ValueError(f"{error}; {last}") from error
        self._prune(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove what a run that was killed right after its last save has left no time for."""
        self._prune(trainer)

    def _prune(self, trainer: pl.Trainer) -> None:
        if self.save_top_k > 0 and trainer.is_global_zero:
            for _, path in sorted(self._kept(trainer.global_step), reverse=True)[self.save_top_k :]:
                self._remove_checkpoint(trainer, str(path))

    def _kept(self, step: int) -> list[tuple[int, Path]]:
        """The numbered checkpoints up to a step; what a refused one of a later step was, the run comes to again."""
        assert self.dirpath is not None
        found = [(path.stem.removeprefix(NAME), path) for path in Path(self.dirpath).glob(f"{NAME}*.ckpt")]
        return [(int(number), path) for number, path in found if number.isdecimal() and int(number) <= step]
