"""How a run goes: its speed in the logs, and how far it is.

Lightning's ``ThroughputMonitor`` waits for the GPU after every batch, takes all ranks for the first, counts checkpoints
and compilation as training, and knows neither supervised tokens nor memory.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar

from specdec.data import Batch
from specdec.training.distributed import is_sharded
from specdec.training.memory import MB, Precision, precision, report_memory
from specdec.training.module import DrafterModule

SKIPPED = 2  # steps at the start of a run that are not measured: they compile


class Throughput(pl.Callback):
    """Logs what the run will need of memory, then, of the steps since the last report and over all ranks:

    * ``speed/tokens_per_second``, padding included, and ``speed/supervised_tokens_per_second``, of the loss mask;
    * ``speed/step_seconds``, of an optimizer step;
    * ``speed/data_wait_share``: the share of the time between the end of a batch and the start of the next, as the host
      sees it: fetching and moving data, and what Lightning and later callbacks do in between;
    * ``memory/peak_mb`` (10^6 bytes), of the rank that takes most: on a GPU what torch has allocated there since the
      last report, on a host the resident set, libraries and data included, since the process began.

    Validation, checkpoints and the first two steps, which compile, are not part of any rate. A GPU is waited for
    once a report, and where the clock stops.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._device = torch.device("cpu")
        self._measuring = False  # a run may fail, and be saved, before it starts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget everything; drafter and target stand on their device by now."""
        assert isinstance(pl_module, DrafterModule) and pl_module.drafter is not None
        self._device = trainer.strategy.root_device
        if trainer.is_global_zero:
            data, model = trainer.datamodule, pl_module.target.model  # type: ignore[attr-defined]
            trained_in = precision(trainer.precision) or Precision(pl_module.drafter.lm_head.weight.dtype)
            size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
            shape = (pl_module.drafter.config, data.batch_size, data.seq_len, trained_in, size)
            report_memory(pl_module.memory_need(*shape, trainer.world_size, is_sharded(trainer)), self._device)
        self._seen_step, self._skip_until, self._measuring = trainer.global_step, trainer.global_step + SKIPPED, False

    def _begin(self) -> None:
        self._measuring = True
        self._started: float | None = self.clock()  # of the time under way; None while the clock stands
        self._ended: float | None = self._started  # when the last batch ended; None after a pause
        self._seconds = self._waited = 0.0
        self._steps = self._tokens = 0
        self._supervised = torch.zeros((), dtype=torch.int64, device=self._device)  # read at the report alone

    def _pause(self, *args: Any) -> None:
        """Stop the clock until the next batch."""
        if self._measuring and self._started is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds += self.clock() - self._started
            self._started = self._ended = None

    on_validation_start = on_save_checkpoint = _pause

    def on_train_batch_start(self, *args: Any) -> None:
        """The data is there."""
        if self._measuring:
            self._started = self._started or self.clock()
            self._waited += 0.0 if self._ended is None else self.clock() - self._ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and report if a step is done that is logged."""
        assert isinstance(batch, Batch)
        stepped, self._seen_step = trainer.global_step != self._seen_step, trainer.global_step
        if not self._measuring:
            if stepped and trainer.global_step >= self._skip_until:
                self._begin()
            return
        self._started = self._started or self.clock()  # a checkpoint was written since the batch was done
        self._tokens += batch.ids_BT.numel()
        self._supervised += batch.loss_mask_BT.sum()
        self._steps += stepped
        self._ended = self.clock()
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if stepped and every > 0 and trainer.global_step % every == 0:
            self._pause()
            self._report(trainer, pl_module)
            self._begin()

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:  # in bytes on macOS alone
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        sums = [self._tokens, int(self._supervised), self._seconds, self._waited]
        ranks, reduce = trainer.world_size, trainer.strategy.reduce
        if ranks > 1:
            figures = torch.tensor([*sums, most], dtype=torch.float64, device=self._device)
            sums, most = reduce(figures[:-1], reduce_op="sum").tolist(), int(reduce(figures[-1], reduce_op="max"))
        tokens, supervised, seconds, waited = sums
        wall = max(seconds / ranks, 1e-9)
        found = {
            "speed/tokens_per_second": tokens / wall,
            "speed/supervised_tokens_per_second": supervised / wall,
            "speed/step_seconds": wall / self._steps,
            "speed/data_wait_share": waited / ranks / wall,
            "memory/peak_mb": most / MB,
        }
        module.log_dict(found, on_step=True, on_epoch=False)


SECONDS_BETWEEN_LINES = 10.0
FIGURES: dict[str, Callable[[float], str]] = {
    "train/loss": "train/loss {:.3f}".format,
    "train/accuracy_0": "accuracy_0 {:.2f}".format,
    "train/prefix_proxy": "prefix {:.2f}".format,
    "speed/tokens_per_second": "{:,.0f} tokens/s".format,
    "speed/data_wait_share": "data wait {:.0%}".format,
    "memory/peak_mb": "{:,.0f} MB".format,
}
"""What a line says of the metrics that are logged, in its order."""


def progress() -> pl.Callback:
    """Lightning's bar where standard error is a terminal, else :class:`ProgressLine`."""
    return RichProgressBar(console_kwargs={"stderr": True}) if sys.stderr.isatty() else ProgressLine()


class ProgressLine(pl.Callback):
    """Prints step, figures and the time left to standard error every ten seconds, for logs and pipes::

    step 120/419, train/loss 4.213, accuracy_0 0.41, prefix 1.62, 5,912 tokens/s, data wait 1%, 812 MB, 1:43 left
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; a resumed run counts from the step it resumes at."""
        self._begun, self._told, self._first_step = time.monotonic(), -math.inf, trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Print a line if one is due; the last step always gets one."""
        now, step, total = time.monotonic(), trainer.global_step, trainer.max_steps
        if not trainer.is_global_zero or (now - self._told < SECONDS_BETWEEN_LINES and step != total):
            return
        self._told, found, done = now, trainer.callback_metrics, step - self._first_step
        parts = [f"step {step}/{total}" if total > 0 else f"step {step}"]
        parts += [write(float(found[name])) for name, write in FIGURES.items() if name in found]
        if total > 0 and done > 0:
            left = round((total - step) * (now - self._begun) / done)
            parts.append(f"{left // 60}:{left % 60:02d} left")
        sys.stderr.write(", ".join(parts) + "\n")
