"""The moving average of the weights."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from specdec.drafter import Drafter
from specdec.training.distributed import is_sharded
from specdec.training.module import DrafterModule


class EMA(WeightAveraging):
    """Exponential moving average: validated, saved as the drafter, and what a checkpoint's ``state_dict`` holds.

    Lightning's own EMAWeightAveraging is not for drafters: it averages the ids of the draft vocabulary too, which
    rounds them to others, moves frozen weights by rounding, copies the target, and saves a wrong last checkpoint.

    Args:
        decay: share of the old average kept at each step; it looks back about ``1 / (1 - decay)`` steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA: decay must lie in [0, 1), not {decay}")
        # as lerp, of which equal weights come out unchanged to the last bit; buffers are no weights
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))
        # the module has the averaged weights and the average the trained ones
        self._swapped = False

    @property
    def _has_averaged(self) -> bool:
        return self._average_model is not None and int(self._average_model.n_averaged) > 0

    @property
    def drafter(self) -> Drafter | None:
        """The averaged drafter; None before averaging has begun."""
        average = self._average_model
        if average is None or not self._has_averaged:
            return None
        assert isinstance(average.module, DrafterModule)
        return average.module.drafter

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the drafter, on its device, without the target."""
        if stage != "fit":
            return
        if trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(
                f"EMA: weights in {trainer.precision} cannot be averaged: use bf16-mixed or 32-true"
            )
        if is_sharded(trainer):
            raise ValueError(
                "EMA: weights in shards cannot be averaged: use --trainer.strategy ddp, or leave EMA out"
            )
        assert isinstance(pl_module, DrafterModule)
        pl_module.configure_model()  # Lightning would only do it later
        target = pl_module._target
        pl_module._target = None
        try:
            self._average_model = AveragedModel(
                pl_module, trainer.strategy.root_device, **self._kwargs
            )
        finally:
            pl_module._target = target

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the average."""
        if self._has_averaged:
            self._swap_models(pl_module)
            self._swapped = True

    def on_validation_epoch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any
    ) -> None:
        """Continue with the trained weights."""
        if self._swapped:
            self._swap_models(pl_module)
            self._swapped = False

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put a validation's exchange right before anything is saved."""
        self.on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing yet: the last checkpoint is written after this, and needs both."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the module."""
        if self._has_averaged:
            self._copy_average_to_current(pl_module)
