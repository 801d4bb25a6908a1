"""An interrupted run ends between two optimizer steps: gradients of half a step are in no checkpoint."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WholeSteps(pl.Callback):
    """Holds Ctrl-C and SIGTERM back until the optimizer step is done whose batches are being run.

    Ctrl-C a second time ends the run at once; what half a step had accumulated is lost then.
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}  # who handled it
        self.held: signal.Signals | None = None
        self.within = False  # a step has begun and is not done
        self.step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand before Lightning's handlers, which it has installed by now and takes away itself."""
        self.held, self.within = None, False
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            handler = signal.getsignal(signum)
            if callable(handler):  # else it is ignored or ends the process, as someone wanted
                self.before[signum] = handler
                signal.signal(signum, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        signum = signal.Signals(number)
        again = signum == signal.SIGINT == self.held
        if self.within and not again:
            self.held = signum
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
        if not self.within:
            self._release()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the handlers back."""
        for signum, handler in self.before.items():
            signal.signal(signum, handler)
        self._release()

    def _release(self) -> None:
        if self.held is not None:
            signum, self.held = self.held, None
            self.before[signum](signum, None)
