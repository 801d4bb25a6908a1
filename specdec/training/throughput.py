"""How fast a run trains and how much memory it takes, logged at every ``log_every_n_steps``.

Lightning's ``ThroughputMonitor`` is not used: it waits for the GPU after every batch, takes all batches for equal and
all ranks for the first, counts checkpoints and compilation as training, knows neither supervised tokens nor waiting
for data nor memory, and its table of peaks misses the H200 (see :mod:`specdec.training.work`).
"""

import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.timers import HostTimer, Timer, timer
from specdec.training.precision import precision
from specdec.training.work import Work, peak, row_counts

log = logging.getLogger(__name__)

MB = 1e6


@runtime_checkable
class Counted(Protocol):
    """A module that knows its work, without which no ``speed/mfu`` is logged."""

    ttt_steps: int

    def work(self, B: int, T: int, kept: int, rows: int, teacher_rows: int) -> Work:
        """Operations of a batch, linear in the last three; see :func:`specdec.training.work.step_work`."""
        ...


class PeakMemory:
    """The most memory taken since the last reading, in bytes.

    On a GPU what torch has allocated there. On a host the resident set, libraries and data included: since the last
    reading where Linux lets the process reset its high-water mark, else since the process began.
    """

    def __init__(self, device: torch.device, proc: Path = Path("/proc/self")) -> None:
        self.device, self.proc = device, proc
        self.source = "allocated on the GPU, most since the last report"
        if device.type != "cuda":
            reset = (proc / "status").is_file() and self._reset()
            self.source = f"resident set, most since {'the last report' if reset else 'the process began'}"

    def _reset(self) -> bool:
        try:
            (self.proc / "clear_refs").write_text("5")  # the high-water mark alone
        except OSError:
            return False
        return True

    def read(self) -> int:
        """Bytes; begins anew."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return most
        if (self.proc / "status").is_file():
            lines = dict(line.split(":", 1) for line in (self.proc / "status").read_text().splitlines())
            self._reset()
            return int(lines["VmHWM"].split()[0]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class Throughput(pl.Callback):
    """Logs, of the steps since the last report and over all ranks:

    * ``speed/tokens_per_second``, padding included, and ``speed/supervised_tokens_per_second``, of the loss mask;
    * ``speed/step_seconds``, of an optimizer step;
    * ``speed/data_wait_share``: the share of the time between the end of a batch and the start of the next, as the host
      sees it: fetching and moving data, and what Lightning and later callbacks do in between;
    * ``speed/mfu``, where module and peak are known, the latter named in the log;
    * ``memory/peak_mb`` (10^6 bytes), of the rank that takes most; the log says which memory.

    Validation, checkpoints and the first steps, which compile, are not part of any rate. Nothing is kept in
    checkpoints: a resumed run starts anew. A GPU is waited for once a report.

    Args:
        skip: optimizer steps at the start of the run that are not measured.
        clock: seconds on the host.
    """

    def __init__(self, skip: int = 2, clock: Callable[[], float] = time.perf_counter) -> None:
        self.skip, self.clock = skip, clock
        self.timer: Timer = HostTimer(clock)
        self._measuring = False  # a run may fail, and be saved, before it starts
        self._open: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget everything, and say what utilisation and memory will mean."""
        device: torch.device = trainer.strategy.root_device
        self.timer = timer(device, self.clock)
        self.memory, self.peak = PeakMemory(device), None
        said = f"memory/peak_mb: {self.memory.source}"
        if isinstance(pl_module, Counted):
            trained_in = precision(trainer.precision)
            self.peak = peak(device, trained_in.products) if trained_in else None
            known = f"of {self.peak.flops / 1e12:,.3g} TFLOP/s, {self.peak.source}" if self.peak else "unknown peak"
            said += f"; speed/mfu: {known}"
        log.info("%s", said)
        self._seen_step, self._skip_until = trainer.global_step, trainer.global_step + self.skip
        self._measuring = self.skip <= 0
        self._begin()

    def _begin(self) -> None:
        self._spans: list[tuple[Any, Any]] = []
        self._open = self.timer.mark() if self._measuring else None  # start of the span that is under way
        self._ended: float | None = None  # when the last batch ended
        self._waited, self._steps, self._supervised = 0.0, 0, 0
        self._shapes: Counter[tuple[int, int]] = Counter()
        self._rows: Tensor | int = 0

    def _pause(self) -> None:
        if self._measuring and self._open is not None:
            self._spans.append((self._open, self.timer.mark()))
        self._open = self._ended = None

    def _resume(self) -> None:
        if self._measuring and self._open is None:
            self._open = self.timer.mark()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The data is there."""
        self._resume()
        if self._ended is not None:
            self._waited += self.clock() - self._ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and report if a step is done that is logged."""
        stepped = trainer.global_step != self._seen_step
        self._seen_step = trainer.global_step
        if not self._measuring:
            if stepped and trainer.global_step >= self._skip_until:
                self._measuring = True
                self._begin()
                self._ended = self.clock()
            return
        self._resume()  # a checkpoint was written since the batch was done
        self._count(pl_module, batch)
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

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stop the clock until training goes on."""
        self._pause()

    def _count(self, module: pl.LightningModule, batch: Any) -> None:
        assert isinstance(batch, Batch)
        B, T = batch.ids_BT.shape
        self._shapes[B, T] += 1
        steps = module.ttt_steps if isinstance(module, Counted) else 1
        # stays on the device until the report
        self._rows = self._rows + torch.cat([row_counts(batch, steps), batch.loss_mask_BT.sum()[None]])

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.timer.wait(self._spans[-1][1])
        seconds = sum(self.timer.seconds(*span) for span in self._spans)
        assert isinstance(self._rows, Tensor)
        *counts, supervised = self._rows.tolist()
        tokens = sum(B * T * times for (B, T), times in self._shapes.items())
        flops = 0
        if isinstance(module, Counted):
            (B, T), none = next(iter(self._shapes)), (0, 0, 0)
            flops = sum(module.work(*shape, *none).total * times for shape, times in self._shapes.items())
            flops += module.work(B, T, *counts).total - module.work(B, T, *none).total
        ranks = trainer.world_size
        sums, most = [tokens, supervised, flops, seconds, self._waited], float(self.memory.read())
        if ranks > 1:
            device = trainer.strategy.root_device
            own = torch.tensor([*sums, most], dtype=torch.float64, device=device)
            reduce = trainer.strategy.reduce
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
            found["speed/mfu"] = flops / (wall * ranks * self.peak.flops)
        module.log_dict({name: float(value) for name, value in found.items()}, on_step=True, on_epoch=False)
