"""How a run goes: its memory before the first step, its speed in the logs, and how far it is.

Lightning's ``ThroughputMonitor`` waits for the GPU after every batch, takes all ranks for the first, counts checkpoints
and compilation as training, and knows neither supervised tokens nor memory.
"""

import logging
import math
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar

from specdec.data import Batch
from specdec.training.cost import MB, MemoryNeed, Precision, precision, row_counts, step_flops
from specdec.training.distributed import is_sharded
from specdec.training.module import DrafterModule
from specdec.utils import machine

log = logging.getLogger(__name__)

SKIPPED = 2  # steps at the start of a run that are not measured: they compile
# Dense TFLOP/s of products in 16 bits (sums in float32) and in TF32, by what CUDA calls the device, from NVIDIA's data
# sheets, which list Hopper's and Blackwell's tensor cores with sparsity: halved.
PEAKS: dict[str, tuple[float, float]] = {
    r"\bG?B200\b": (2250, 1125),
    r"\bH[12]00 NVL\b": (835.5, 417.5),
    r"\bH100 PCIe\b": (756.5, 378),
    r"\bH[12]00\b": (989.5, 494.5),
    r"\bA100\b": (312, 156),
    r"\bL40S\b": (362, 183),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that a GPU could do at most in products of ``dtype``; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    low, tf32 = next((figures for chip, figures in PEAKS.items() if re.search(chip, name)), (None, None))
    if dtype == torch.float32:
        low = None if torch.get_float32_matmul_precision() == "highest" else tf32
    return None if low is None or dtype == torch.float64 else low * 1e12


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still take on ``device``; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return machine.free_memory() if device.type == "cpu" else None


def peak_memory(device: torch.device) -> int:
    """The most memory taken, in bytes: on a GPU what torch has allocated there since the last reading, which begins
    anew; on a host the resident set, libraries and data included, since the process began."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def report_memory(need: MemoryNeed, device: torch.device) -> None:
    """Log what is needed, and warn if ``device``, on which drafter and target stand by now, has less."""
    log.info("estimated memory: %s", need)
    free, ahead = free_memory(device), need.total - need.weights - need.target
    if free is not None and free < ahead:
        log.warning(
            "the first step will need about %s MB more on %s, which has %s MB free: "
            "lower data.batch_size, data.seq_len or model.ttt_steps",
            f"{ahead / MB:,.0f}", device, f"{free / MB:,.0f}",
        )  # fmt: skip


class Throughput(pl.Callback):
    """Logs what the run will need of memory, then, of the steps since the last report and over all ranks:

    * ``speed/tokens_per_second``, padding included, and ``speed/supervised_tokens_per_second``, of the loss mask;
    * ``speed/step_seconds``, of an optimizer step;
    * ``speed/data_wait_share``: the share of the time between the end of a batch and the start of the next, as the host
      sees it: fetching and moving data, and what Lightning and later callbacks do in between;
    * ``speed/mfu``, on GPUs whose peak is known: model FLOPs utilisation (https://arxiv.org/abs/2204.02311);
    * ``memory/peak_mb`` (10^6 bytes), of the rank that takes most: see :func:`peak_memory`.

    Validation, checkpoints and the first two steps, which compile, are not part of any rate. A GPU is waited for
    once a report, and where the clock stops.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._measuring = False  # a run may fail, and be saved, before it starts
        self._device = torch.device("cpu")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget everything; drafter and target stand on their device by now."""
        assert isinstance(pl_module, DrafterModule) and pl_module.drafter is not None
        self._device = trainer.strategy.root_device
        trained_in = precision(trainer.precision) or Precision(pl_module.drafter.lm_head.weight.dtype)
        self.peak = peak_flops(self._device, trained_in.products)
        if trainer.is_global_zero:
            data, model = trainer.datamodule, pl_module.target.model  # type: ignore[attr-defined]
            size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
            shape = (pl_module.drafter.config, data.batch_size, data.seq_len, trained_in, size)
            report_memory(pl_module.memory_need(*shape, trainer.world_size, is_sharded(trainer)), self._device)
        self._seen_step, self._skip_until = trainer.global_step, trainer.global_step + SKIPPED
        self._measuring = False
        self._begin()

    def _begin(self) -> None:
        self._started = self.clock() if self._measuring else None  # of the time under way
        self._ended: float | None = None  # when the last batch ended
        self._seconds, self._waited, self._steps = 0.0, 0.0, 0
        self._tokens, self._rows = 0, torch.zeros(4, dtype=torch.int64, device=self._device)

    def _pause(self) -> None:
        if self._started is not None and self._measuring:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds += self.clock() - self._started
        self._started = self._ended = None

    def on_train_batch_start(self, *args: Any) -> None:
        """The data is there."""
        if self._measuring and self._started is None:
            self._started = self.clock()
        if self._ended is not None:
            self._waited += self.clock() - self._ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and report if a step is done that is logged."""
        assert isinstance(batch, Batch) and isinstance(pl_module, DrafterModule)
        stepped = trainer.global_step != self._seen_step
        self._seen_step = trainer.global_step
        if not self._measuring:
            if stepped and trainer.global_step >= self._skip_until:
                self._measuring = True
                self._begin()
                self._ended = self.clock()
            return
        if self._started is None:  # a checkpoint was written since the batch was done
            self._started = self.clock()
        self._tokens, self._length = self._tokens + batch.ids_BT.numel(), batch.ids_BT.shape[1]
        # stays on the device until the report
        self._rows += torch.cat([row_counts(batch, pl_module.objective.steps), batch.loss_mask_BT.sum()[None]])
        self._steps += stepped
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if stepped and every > 0 and trainer.global_step % every == 0:
            self._pause()
            self._report(trainer, pl_module)
            self._begin()
        self._ended = self.clock()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock until the next batch."""
        if not trainer.sanity_checking:
            self._pause()

    def on_save_checkpoint(self, *args: Any) -> None:
        """Stop the clock until training goes on."""
        if self._measuring:
            self._pause()

    def _report(self, trainer: pl.Trainer, module: DrafterModule) -> None:
        *rows, supervised = self._rows.tolist()
        tokens, flops = self._tokens, 0.0
        if self.peak is not None and module.drafter is not None:
            T, model = self._length, module.target.model
            flops = step_flops(module.drafter.config, module.objective, model, tokens / T, T, rows)
        ranks, most = trainer.world_size, float(peak_memory(self._device))
        sums = [tokens, supervised, flops, self._seconds, self._waited]
        if ranks > 1:
            own, reduce = torch.tensor([*sums, most], dtype=torch.float64, device=self._device), trainer.strategy.reduce
            sums, most = reduce(own[:-1], reduce_op="sum").tolist(), float(reduce(own[-1], reduce_op="max"))
        tokens, supervised, flops, seconds, waited = sums
        wall = max(seconds / ranks, 1e-9)
        found = {
            "speed/tokens_per_second": tokens / wall,
            "speed/supervised_tokens_per_second": supervised / wall,
            "speed/step_seconds": wall / self._steps,
            "speed/data_wait_share": waited / ranks / wall,
            "memory/peak_mb": most / MB,
        }
        if self.peak is not None:
            found["speed/mfu"] = flops / (wall * ranks * self.peak)
        module.log_dict({name: float(value) for name, value in found.items()}, on_step=True, on_epoch=False)


SECONDS_BETWEEN_LINES = 10.0
FIGURES: dict[str, Callable[[float], str]] = {
    "train/loss": "train/loss {:.3f}".format,
    "train/accuracy_0": "accuracy_0 {:.2f}".format,
    "train/prefix_proxy": "prefix {:.2f}".format,
    "speed/tokens_per_second": "{:,.0f} tokens/s".format,
    "speed/mfu": "mfu {:.0%}".format,
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
