"""Where a run can be left and gone on with: between two optimizer steps, with no batch drawn for the next."""

from typing import Any

import lightning.pytorch as pl


class Boundary:
    """Knows whether a run stands between two steps. It has to be told of each, when its step is done."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self._step, self._place = trainer.global_step, self._present()

    def reach(self) -> None:
        """A batch is done, and with it, where gradients are accumulated, perhaps the step."""
        if self.trainer.global_step != self._step:
            self._step, self._place = self.trainer.global_step, self._present()

    def holds(self) -> bool:
        """Whether nothing has begun since: a loader counts a batch before anything else sees it."""
        return (self._step, self._place) == (self.trainer.global_step, self._present())

    def _present(self) -> tuple[int, list[Any]]:
        loop = self.trainer.fit_loop
        loader = loop._combined_loader
        return loop.epoch_loop.batch_progress.total.ready, [] if loader is None else loader._state_dicts()
