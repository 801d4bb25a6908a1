"""Where a run is saved and stopped: between two optimizer steps, with no batch drawn for the next.

A loader has counted the batches of a step that has begun, and the gradients of half a step are in no checkpoint.
"""

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from specdec.training.distributed import is_sharded

log = logging.getLogger(__name__)

NAME = "step-"


def together(trainer: pl.Trainer, exception: BaseException) -> bool:
    """Whether all processes that hold a part of the weights end here: of SIGTERM Lightning tells them all."""
    return trainer.world_size == 1 or not is_sharded(trainer) or isinstance(exception, SIGTERMException)


class Boundary:
    """Knows whether a run stands between two steps. It has to be told of each, when its step is done."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer, self._step, self._place = trainer, trainer.global_step, self._present(trainer)

    def reach(self) -> None:
        """A batch is done, and with it, where gradients are accumulated, perhaps the step."""
        if self.trainer.global_step != self._step:
            self._step, self._place = self.trainer.global_step, self._present(self.trainer)

    def holds(self) -> bool:
        """Whether nothing has begun since: a loader counts a batch before anything else sees it."""
        return (self._step, self._place) == (self.trainer.global_step, self._present(self.trainer))

    @staticmethod
    def _present(trainer: pl.Trainer) -> tuple[int, list[Any]]:
        loop, loader = trainer.fit_loop, trainer.fit_loop._combined_loader
        return loop.epoch_loop.batch_progress.total.ready, [] if loader is None else loader._state_dicts()


class RunCheckpoint(ModelCheckpoint):
    """ModelCheckpoint with a drafting run's defaults: the last state always, also when it is interrupted.

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
            self.on_train_end(trainer)

    def on_train_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Keep the last state, whatever ended the training."""
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep the state of a run that is stopped between two steps; there is none before the first."""
        stopped = isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.global_step > 0
        if stopped and self._boundary is not None and self._boundary.holds() and together(trainer, exception):
            super().on_exception(trainer, pl_module, exception)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove what a run that was killed right after its last save has left no time for."""
        self._prune(trainer)

    def _should_skip_saving_checkpoint(self, trainer: pl.Trainer) -> bool:
        between = self._boundary is not None and self._boundary.holds()
        return super()._should_skip_saving_checkpoint(trainer) or not between

    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k != 0:
            self._save_checkpoint(trainer, self.format_checkpoint_name(monitor_candidates))

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        try:
            super()._save_checkpoint(trainer, filepath)
        except ValueError as error:
            kept = self._kept(trainer.global_step)
            last = f"the last whole checkpoint is {kept[0]}" if kept else "there is no earlier checkpoint"
            raise ValueError(f"{error}; {last}") from error
        self._prune(trainer)

    def _prune(self, trainer: pl.Trainer) -> None:
        for path in self._kept(trainer.global_step)[self.save_top_k :] if self.save_top_k > 0 else ():
            if trainer.is_global_zero:
                self._remove_checkpoint(trainer, str(path))

    def _kept(self, step: int) -> list[Path]:
        """The numbered checkpoints up to a step, the newest first; to a refused one of a later step the run comes
        again."""
        assert self.dirpath is not None
        found = [(path.stem.removeprefix(NAME), path) for path in Path(self.dirpath).glob(f"{NAME}*.ckpt")]
        numbered = [(int(number), path) for number, path in found if number.isdecimal() and int(number) <= step]
        return [path for _, path in sorted(numbered, reverse=True)]


class WholeSteps(pl.Callback):
    """Holds Ctrl-C, SIGTERM and what other callbacks end a run by back until the optimizer step under way is done.

    The first of several decides how the run ends. Ctrl-C a second time ends it at once. With several processes nothing
    is held back, as one might leave before a step in which the others wait for it: Lightning handles both signals.
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}  # who handled it
        self.held: list[signal.Signals] = []  # in the order in which they came
        self.within = False  # a step has begun and is not done
        self.stops = False  # a callback wants the run to end after this step
        self.step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Go behind the checkpoints, which Lightning has put last: what is due after a step is written first."""
        trainer.callbacks = [each for each in trainer.callbacks if each is not self] + [self]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand before Lightning's handlers, which it has installed by now and takes away itself."""
        self.before, self.held, self.within, self.stops = {}, [], False, False
        self.boundary = Boundary(trainer)
        if trainer.world_size > 1 or threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(signum)
            if callable(handler):  # else it is ignored or ends the process, as someone wanted
                self.before[signum] = handler
                signal.signal(signum, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        again = signum == signal.SIGINT and signum in self.held
        if (self.within or not self.boundary.holds()) and not again:
            self.held.append(signum)
            if signum == signal.SIGINT:
                log.info("stopping after this optimizer step; Ctrl-C again stops at once")
        else:
            self.before[signum](number, frame)

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """A step begins with its first batch."""
        if not self.within:
            self.step, self.within = trainer.global_step, True

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """After a whole step, let what was held back take effect."""
        self.within = trainer.global_step == self.step
        self.boundary.reach()
        self.on_validation_end(trainer)
        if not self.within:
            self._release()

    def on_validation_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Put off the end that every process has decided on alike; a validation may lie within a step."""
        self.stops = self.stops or trainer.should_stop
        trainer.should_stop = self.stops and not self.within

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the handlers back."""
        self._restore()
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put the handlers back; the run ends here, so that a Ctrl-C has nothing left to stop and hides no error."""
        self._restore()
        if self.held[:1] != [signal.SIGINT]:
            self._release()
        self.held = []

    def _restore(self) -> None:
        self.within = False
        for signum, handler in self.before.items():
            if signal.getsignal(signum) == self._receive:  # Lightning ignores Ctrl-C while it shuts down
                signal.signal(signum, handler)

    def _release(self) -> None:
        held, self.held = self.held, []
        if held:
            self.before[held[0]](held[0], None)
