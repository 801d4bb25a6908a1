"""Losses and weights that are NaN or infinite end a run, without waiting for the device at every step."""

from collections.abc import Iterable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from specdec.training.distributed import local_part

NO_STEP = torch.iinfo(torch.int64).max  # later than any step of a run


class NonFiniteSteps:
    """Remembers the first step whose loss was NaN or infinite, on the loss's device."""

    def __init__(self) -> None:
        self.first_step = torch.tensor(NO_STEP)

    def restart(self, device: torch.device) -> None:
        """Forget the steps of an earlier fit."""
        self.first_step = torch.tensor(NO_STEP, device=device)

    def record_nonfinite(self, loss: Tensor, step: int) -> None:
        """Remember ``step`` if its loss is not finite, without waiting for the device."""
        earliest = self.first_step.clamp(max=step)
        self.first_step = torch.where(loss.isfinite(), self.first_step, earliest)

    def check_losses(self) -> None:
        """Raise ValueError if a loss so far was not finite; it was summed over all processes, so all know of it."""
        _refuse(self.first_step)

    def check_weights(self, weights: Iterable[Tensor], step: int, strategy: Strategy) -> None:
        """Raise ValueError, on every process, if a loss so far or a weight on any process is not finite.

        Every process has to ask. A weight counts for ``step``.
        """
        local_weights = [local_part(weight).detach() for weight in weights]
        # the least and the largest value of each weight: NaN and infinities show in them
        extremes = [torch.stack(weight.aminmax()) for weight in local_weights if weight.numel()]
        first_step = self.first_step
        if extremes:
            are_finite = torch.stack([extreme.isfinite().all() for extreme in extremes]).all()
            first_step = torch.where(are_finite, first_step, first_step.clamp(max=step))
        _refuse(-strategy.reduce(-first_step, reduce_op="max"))


def _refuse(first_step: Tensor) -> None:
    if (step := int(first_step)) < NO_STEP:
        raise ValueError(
            f"by step {step} the loss or a weight was NaN or infinite: lower the learning rate (model.optimizer), "
            "clip gradients harder (trainer.gradient_clip_val) or look at model.loss; the last checkpoint "
            "is sound: --ckpt_path auto --allow_changes '[model.optimizer]' resumes from it"
        )
