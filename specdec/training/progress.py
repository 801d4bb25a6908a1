"""How far a training run is (``specdec fit``): a bar on a terminal, a line every few seconds anywhere else."""

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0

# Logged names, what a line calls them, and how it writes them; in the order of the line.
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "train/accuracy_0": ("accuracy_0", "{:.2f}".format),
    "train/prefix_proxy": ("prefix", "{:.2f}".format),
    "speed/tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "speed/mfu": ("mfu", lambda share: f"{100 * share:.0f} %"),
    "speed/data_wait_share": ("data wait", lambda share: f"{100 * share:.0f} %"),
    "memory/peak_mb": ("MB", "{:,.0f}".format),
}
UNITS = ("tokens/s", "MB")  # these follow their number


def progress() -> pl.Callback:
    """:class:`Bar` where standard error is a terminal, :class:`PlainProgress` elsewhere."""
    if Console(stderr=True).is_terminal:
        return Bar()
    return PlainProgress()


class Bar(RichProgressBar):
    """Lightning's rich bar with the figures of a line beside it, and without the logger's version."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1, leave=True, console_kwargs={"stderr": True})
        self._read, self._shown = -math.inf, dict[str, Any]()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What is logged for the bar, then the figures; read once a second, since a GPU is waited for each time."""
        now = time.monotonic()
        if now - self._read >= 1:
            logged = super().get_metrics(trainer, pl_module).items()
            kept = {name: value for name, value in logged if name != "v_num" and name not in FIGURES}
            self._read, self._shown = now, kept | figures(trainer)
        return self._shown


class PlainProgress(pl.Callback):
    """Prints step, loss, figures, tokens/s and the time left, for logs and pipes::

        step 120/419, train_loss 4.213, accuracy_0 0.41, prefix 1.62, 5,912 tokens/s, mfu 38 %, data wait 1 %,
        812 MB, 1:43 left

    on one line. The loss is the first of the trainer's metrics whose name holds ``loss``; the figures are those of
    :data:`FIGURES` that are logged. Where no rate is, the mean since the start is printed if the module has an
    attribute ``tokens_per_step``. Total and time left are printed if the trainer has ``max_steps``.

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


def figures(trainer: pl.Trainer) -> dict[str, str]:
    """The logged ones of :data:`FIGURES`, by the line's names."""
    found = trainer.callback_metrics
    return {name: write(float(found[key])) for key, (name, write) in FIGURES.items() if key in found}


def _line(trainer: pl.Trainer, module: pl.LightningModule, done: int, seconds: float) -> str:
    step, total = trainer.global_step, trainer.max_steps
    parts = [f"step {step}/{total}" if total > 0 else f"step {step}"]
    losses = [(name, float(value)) for name, value in trainer.callback_metrics.items() if "loss" in name]
    parts += [f"{name} {value:.3f}" for name, value in losses[:1]]
    shown, each = figures(trainer), getattr(module, "tokens_per_step", None)
    if "tokens/s" not in shown and isinstance(each, int) and done > 0 and seconds > 0:
        shown["tokens/s"] = f"{done * each / seconds:,.0f}"
    parts += [f"{text} {name}" if name in UNITS else f"{name} {text}" for name, text in shown.items()]
    if total > 0 and done > 0 and seconds > 0:
        left = round((total - step) * seconds / done)
        parts.append(f"{left // 60}:{left % 60:02d} left")
    return ", ".join(parts)
