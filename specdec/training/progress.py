"""How far a run is: on a terminal one bar over its optimizer steps, elsewhere a line every ten seconds."""

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_FIGURES = 0.5  # of a bar: reading a figure waits for the GPU
EVERY_STEP: dict[str, Callable[[float], str]] = {"train/loss": "train/loss {:.3f}".format}
"""The figure that is logged at every step, and how it is written."""
LOGGED_STEPS: dict[str, Callable[[float], str]] = {
    "train/accuracy_0": "train/accuracy_0 {:.2f}".format,
    "train/prefix_proxy": "train/prefix_proxy {:.2f}".format,
    "speed/tokens_per_second": "{:,.0f} tokens/s".format,
    "memory/peak_mb": "{:,.0f} MB".format,
}
"""Figures that are logged every ``log_every_n_steps`` steps alone, by the names that they have in the logs."""
VALIDATION: dict[str, Callable[[float], str]] = {
    "val/loss": "val/loss {:.3f}".format,
    "val/prefix_proxy": "val/prefix_proxy {:.2f}".format,
}
"""Figures of a validation."""


def progress_callback() -> pl.Callback:
    """Return a :class:`RunBar` where standard error is a terminal, else a :class:`ProgressLine`."""
    if sys.stderr.isatty():
        return RunBar(Console(stderr=True))
    return ProgressLine()


class RunProgress(pl.Callback):
    """Base of bar and lines: follows a run's steps and figures; it has to stand behind what logs them.

    A figure is shown with the step that it belongs to, so that one which is logged now and then is never taken for the
    present step's.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; a resumed run counts from the step it resumes at."""
        self._start = time.monotonic()
        self._first_step = trainer.global_step
        self._seen_step = trainer.global_step
        self._total = total_steps(trainer)
        self._logged: list[str] = []
        self._logged_step = -1

    def _steps(self, trainer: pl.Trainer) -> str:
        """Return ``20/320``, or ``20`` of a run whose length is not known."""
        step = trainer.global_step
        return f"{step}" if self._total is None else f"{step}/{self._total}"

    def _left(self, trainer: pl.Trainer) -> str:
        """Return the time left as ``2:52 left``; empty where it is not known."""
        done = trainer.global_step - self._first_step
        if self._total is None or done == 0:
            return ""
        seconds = (self._total - trainer.global_step) * (time.monotonic() - self._start) / done
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        time_left = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
        return f"{time_left}:{seconds:02d} left"

    def _read_logged(self, trainer: pl.Trainer) -> None:
        """Take the figures of a step that has just ended, if it is one that is logged."""
        step = trainer.global_step
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = every > 0 and step % every == 0
        if is_logged and step != self._logged_step and step != self._seen_step:
            self._logged = written(trainer, LOGGED_STEPS)
            self._logged_step = step
        self._seen_step = step


class ProgressLine(RunProgress):
    """Prints step, figures and the time left to standard error every ten seconds, for logs and pipes::

    step 120/419, train/loss 4.213, train/accuracy_0 0.41, train/prefix_proxy 1.62, 5,912 tokens/s, 812 MB, 1:43 left
    step 127/419, train/loss 4.198, 1:40 left

    What is logged every ``log_every_n_steps`` steps is said once; behind ``; step 120:`` if the line is a later step's.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the first step print a line."""
        super().on_train_start(trainer, pl_module)
        self._last = -math.inf

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Print a line if one is due; the last step always gets one."""
        if not trainer.is_global_zero:
            return
        ended_step = trainer.global_step != self._seen_step
        self._read_logged(trainer)
        now = time.monotonic()
        is_last = ended_step and trainer.global_step == self._total
        if now - self._last < SECONDS_BETWEEN_LINES and not is_last:
            return
        self._last = now
        step = f"step {self._steps(trainer)}"
        logged = self._logged
        earlier = ""
        if logged and self._logged_step != trainer.global_step:
            earlier = f"; step {self._logged_step}: {joined(logged)}"
            logged = []
        self._logged = []
        line = joined([step, *written(trainer, EVERY_STEP), *logged, self._left(trainer)])
        sys.stderr.write(f"{line}{earlier}\n")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the figures of a validation."""
        figures = written(trainer, VALIDATION)
        if figures and validates_in_fit(trainer):
            sys.stderr.write(f"step {self._steps(trainer)}, validation: {joined(figures)}\n")


class RunBar(RunProgress):
    """One bar over the optimizer steps of the whole run; below it the last logged figures, and the last validation's.

    Args:
        console: where it is drawn.
    """

    def __init__(self, console: Console) -> None:
        self._bar = FiguresBelow(console)
        self._task = TaskID(0)
        self._read = -math.inf

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the bar."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            step = trainer.global_step
            self._task = self._bar.add_task(
                "",
                total=self._total,
                completed=step,
                steps=f"step {self._steps(trainer)}",
                left="",
                loss="",
            )
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Move on; read the figures of a logged step, and the loss every half second."""
        if not trainer.is_global_zero:
            return
        self._read_logged(trainer)
        step = trainer.global_step
        if self._logged_step == step:
            self._bar.lines["train"] = f"step {step}: {joined(self._logged)}"
        now = time.monotonic()
        if now - self._read >= SECONDS_BETWEEN_FIGURES or step == self._total:
            self._read = now
            self._bar.update(self._task, loss=joined(written(trainer, EVERY_STEP)))
        steps = f"step {self._steps(trainer)}"
        self._bar.update(self._task, completed=step, steps=steps, left=self._left(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say why the bar stands."""
        if validates_in_fit(trainer):
            self._bar.update(self._task, left="validation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the figures of a validation, with its step."""
        figures = written(trainer, VALIDATION)
        if validates_in_fit(trainer):
            self._bar.update(self._task, left=self._left(trainer))
            self._bar.lines["validation"] = f"step {trainer.global_step}: {joined(figures)}"

    def on_train_end(self, *args: Any) -> None:
        """Leave the last state on the terminal."""
        self._bar.stop()

    def on_exception(self, *args: Any) -> None:
        """Leave the terminal as it was found."""
        self._bar.stop()


class FiguresBelow(Progress):
    """A bar of rich's with the time left, and ``lines`` below it, by name."""

    def __init__(self, console: Console) -> None:
        self.lines: dict[str, str] = {}
        texts = (TextColumn(f"{{task.fields[{name}]}}") for name in ("left", "loss"))
        super().__init__(TextColumn("{task.fields[steps]}"), BarColumn(), *texts, console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return bar and lines."""
        yield from super().get_renderables()
        yield from [Text(f"  {line}") for line in list(self.lines.values())]


def validates_in_fit(trainer: pl.Trainer) -> bool:
    """Return whether a validation belongs to a run of training, and this process is the one that shows it."""
    return trainer.is_global_zero and trainer.state.fn == "fit" and not trainer.sanity_checking


def total_steps(trainer: pl.Trainer) -> int | None:
    """Return the optimizer steps after which a run ends, unless ``max_time`` ends it earlier; None where unknown."""
    limits = []
    if trainer.max_steps > 0:
        limits.append(trainer.max_steps)
    batches = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and math.isfinite(batches):
        per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        limits.append(per_epoch * trainer.max_epochs)
    return min(limits, default=None)


def written(trainer: pl.Trainer, figures: dict[str, Callable[[float], str]]) -> list[str]:
    """Return those of the figures that the run has logged, as they are shown."""
    metrics = trainer.callback_metrics
    return [write(float(metrics[name])) for name, write in figures.items() if name in metrics]


def joined(parts: Iterable[str]) -> str:
    """Return the parts that are not empty, with commas."""
    return ", ".join(filter(None, parts))
