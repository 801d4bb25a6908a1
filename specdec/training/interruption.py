"""An interrupted run ends between two optimizer steps: gradients of half a step are in no checkpoint."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from specdec.training.boundary import Boundary

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WholeSteps(pl.Callback):
    """Holds Ctrl-C and SIGTERM back until the optimizer step is done whose batches are being run.

    So does it with what other callbacks end a run by, the clock say.

    The first of several decides how the run ends. Ctrl-C a second time ends it at once; what half a step had
    accumulated is lost then. With several processes nothing is held back: one might leave before a step in which the
    others wait for it, so both signals are left to Lightning.
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
        for signum in SIGNALS:
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
        self._stop(trainer)
        if not self.within:
            self._release()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may lie within a step, and end the run."""
        self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        """Put off what every process has decided alike."""
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
