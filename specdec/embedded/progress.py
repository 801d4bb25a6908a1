"""How far a training run is: a bar on a terminal, a line every few seconds anywhere else."""

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0


def progress() -> pl.Callback:
    """Lightning's rich bar where standard error is a terminal, :class:`PlainProgress` elsewhere."""
    if Console(stderr=True).is_terminal:
        return RichProgressBar(refresh_rate=1, leave=True, console_kwargs={"stderr": True})
    return PlainProgress()


class PlainProgress(pl.Callback):
    """Prints step, loss, tokens/s and the time left, for logs and pipes::

        step 120/419, train_loss 4.213, 5,912 tokens/s, 1:43 left

    The loss is the first of the trainer's metrics whose name holds ``loss``. The rate is printed if the module has an
    attribute ``tokens_per_step``, the total and the time left if the trainer has ``max_steps``.

    Args:
        seconds: least time between two lines; the first and the last step always get one.
        console: where to, standard error by default.
    """

    def __init__(self, seconds: float = SECONDS_BETWEEN_LINES, console: Console | None = None) -> None:
        self.seconds = seconds
        self.console = console or Console(stderr=True)
        self._started, self._printed = 0.0, -math.inf
        self._first_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; a resumed run counts from the step it resumes at."""
        self._started, self._printed = time.monotonic(), -math.inf
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line if one is due."""
        now, step = time.monotonic(), trainer.global_step
        if trainer.is_global_zero and (now - self._printed >= self.seconds or step == trainer.max_steps):
            self._printed = now
            self._print(_line(trainer, pl_module, step - self._first_step, now - self._started))

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


def _line(trainer: pl.Trainer, module: pl.LightningModule, done: int, seconds: float) -> str:
    step, total = trainer.global_step, trainer.max_steps
    parts = [f"step {step}/{total}" if total > 0 else f"step {step}"]
    losses = [(name, float(value)) for name, value in trainer.callback_metrics.items() if "loss" in name]
    parts += [f"{name} {value:.3f}" for name, value in losses[:1]]
    if done > 0 and seconds > 0:
        if isinstance(each := getattr(module, "tokens_per_step", None), int):
            parts.append(f"{done * each / seconds:,.0f} tokens/s")
        if total > 0:
            left = round((total - step) * seconds / done)
            parts.append(f"{left // 60}:{left % 60:02d} left")
    return ", ".join(parts)
