"""Callbacks of a run: its record and drafter on the disk, and its speed in the logs."""

import errno
import hashlib
import math
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, save_drafter
from specdec.drafter.of_run import RUN, check_of_run, run_of_record
from specdec.training.checkpoint import ends_all
from specdec.training.distributed import is_sharded, unsharded
from specdec.training.ema import EMA
from specdec.training.losses_file import read_losses, with_checksum
from specdec.training.memory import MB, Precision, memory_need, precision, report_memory
from specdec.training.module import DrafterModule
from specdec.training.run_directory import (
    CONFIG,
    LOSSES,
    STEADY,
    record_to_write,
    run_key,
    write_run_sums,
)
from specdec.utils.files import drop_sums, write_json, write_text
from specdec.utils.links import open_in_place
from specdec.utils.reading import check_sums, explained, read_json

# a run's folder, and a key of the config.json in it
BEST = "drafter_best"
CHOSEN_BY = "chosen_by"


class RunRecord(pl.Callback):
    """Writes what a run is, and what becomes of it, into its directory; and seeds every batch.

    * ``config.yaml`` and ``provenance.json``, once target, drafter and data stand, with each source's share of a mix
      and which run it is (:func:`specdec.training.run_directory.run_key`), which its drafters' ``config.json`` say too;
      ``config.1.yaml`` and so on when the run is resumed. The config lies in every checkpoint too.
    * ``losses.txt``: ``step part loss checksum`` for every batch of the first process, the loss in hexadecimal, so
      that no bit is lost, and the CRC-32 of what stands before it. ``step`` counts optimizer steps, ``part`` the
      batches of one. Losses stay on the device until the next logged step or checkpoint; a resumed run forgets those
      after its checkpoint.
    * ``drafter/``, when training ends, and when it is interrupted; an older one is replaced whole.
    * ``drafter_best/``, the drafter that decoded best so far (:meth:`keep_best`). What it was chosen by stands in its
      ``config.json``, which a resumed run reads again, and in ``DONE.json``.
    * ``DONE.json``, once training has ended by itself.
    * ``SHA256SUMS``: the hashes of config, provenance and ``DONE.json``.

    Torch's, numpy's and Python's generators are seeded before every batch: what was drawn before it, in validation or
    in a run that was killed, has no say in what dropout draws here.

    Args:
        directory: the run's.
        seed: of the batches' seeds.
        config: the resolved config, as YAML.
        provenance: see :func:`specdec.utils.machine.provenance`.
    """

    def __init__(
        self, directory: Path, seed: int, config: str = "", provenance: dict[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.config = config
        self.provenance = provenance or {}
        # of the present batch; Lightning's own count of batches is another when resumed
        self._step = -1
        self._part = 0
        self._held: list[tuple[int, int, Tensor]] = []  # losses that are not on the disk yet
        # what ``drafter_best/`` was chosen by; None: nothing was decoded
        self.best: dict[str, Any] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write config and provenance."""
        first = trainer.strategy.broadcast(trainer.ckpt_path)
        if first != trainer.ckpt_path:
            raise ValueError(
                f"this process resumes from {trainer.ckpt_path}, the first from {first}: name one for all"
            )
        self.best = trainer.strategy.broadcast(
            _chosen_by(self.directory / BEST) if trainer.is_global_zero else None
        )
        key = self._run_key(trainer, pl_module) if trainer.is_global_zero else None
        self.provenance |= {RUN: trainer.strategy.broadcast(key)}
        if trainer.is_global_zero:
            drop_sums(self.directory, *STEADY)  # some are about to change
            (self.directory / "DONE.json").unlink(missing_ok=True)  # of a run that is made longer
            data = trainer.datamodule  # type: ignore[attr-defined]
            mix = {"mix": data.shares} if isinstance(data, TokenData) and data.shares else {}
            config, provenance = record_to_write(self.directory)
            write_text(config, self.config)
            write_json(provenance, self.provenance | mix)
            write_run_sums(self.directory)

    def _run_key(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        """Return which run this is: what the record of its first start says, or now that it starts."""
        assert isinstance(module, DrafterModule) and module.drafter is not None
        if (key := run_of_record(self.directory)) is not None:
            return key
        data = trainer.datamodule  # type: ignore[attr-defined]
        rows = data.contents if isinstance(data, TokenData) else ()
        return run_key(self.config, rows, module.drafter.config.target)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the losses of the steps before the one at which training begins."""
        self._held = []
        self._step = -1
        if trainer.is_global_zero:
            path = self.directory / LOSSES
            lines = read_losses(path) if path.exists() else []
            earlier = [line for line in lines if int(line.split()[0]) < trainer.global_step]
            write_text(path, "".join(map(with_checksum, earlier)))

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Seed for one batch of an optimizer step."""
        self._part = self._part + 1 if trainer.global_step == self._step else 0
        self._step = trainer.global_step
        key = f"{self.seed}/{self._step}/{self._part}/{trainer.global_rank}"
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        torch.manual_seed(drawn)
        np.random.seed(drawn % 2**32)
        random.seed(drawn)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any
    ) -> None:
        """Hold the loss as the backward pass took it."""
        if trainer.is_global_zero:
            self._held.append((self._step, self._part, outputs["loss"].detach()))
            if 0 < trainer.log_every_n_steps <= len(self._held):  # type: ignore[attr-defined]
                self._write_losses()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the config with the weights; what a checkpoint has seen is on the disk."""
        checkpoint[CONFIG] = yaml.safe_load(self.config)
        for logger in trainer.loggers:
            logger.save()
        self._write_losses()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the final weights, then say that the run is done, unless only its time was over."""
        self._write_losses()
        self._save_drafter(trainer, pl_module)
        if not trainer.is_global_zero or trainer.interrupted or _only_time_is_over(trainer):
            return
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics = {name: value if math.isfinite(value) else None for name, value in logged.items()}
        done: dict[str, Any] = {"steps": trainer.global_step, "metrics": metrics}
        write_json(self.directory / "DONE.json", done | ({"best": self.best} if self.best else {}))
        write_run_sums(self.directory)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Keep what there is after an interruption, and tear the module down, whatever cannot be kept.

        Lightning calls no further callback after one that fails, not even the module's own that tears it down.
        """
        try:
            self._write_losses()
            if ends_all(trainer, exception):
                self._save_drafter(trainer, pl_module)
        finally:
            pl_module.teardown("exception")

    def keep_best(self, module: DrafterModule, decoded: dict[str, Any]) -> None:
        """Keep the drafter as it stands if none of the run has decoded better in the same way; every process asks.

        Args:
            decoded: ``mean`` acceptance length, bonus token included, with the ends ``low`` and ``high`` of its 95 %
                interval or None, the optimizer ``step``, and what it was ``decoded`` with: lengths of another draft
                shape or other prompts do not compare, and such a drafter is replaced.
        """
        best = self.best
        comparable = best is not None and best["decoded"] == decoded["decoded"]
        if best is None or not comparable or decoded["mean"] > best["mean"]:
            about = {RUN: self.provenance[RUN], CHOSEN_BY: decoded}
            module.save_drafter(self.directory / BEST, replace=True, about=about)
            self.best = decoded

    def _save_drafter(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, DrafterModule)
        drafter = module.drafter
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EMA) and callback.drafter is not None:
                drafter = callback.drafter
                break
        module.check_finite()
        whole = None if drafter is None else unsharded(drafter)  # every process has to ask for both
        if trainer.is_global_zero and whole is not None and trainer.global_step > 0:
            about = {RUN: self.provenance[RUN]}
            save_drafter(whole, self.directory / "drafter", replace=True, about=about)

    def _write_losses(self) -> None:
        if not self._held:
            return
        losses = torch.stack([loss for _, _, loss in self._held]).double().tolist()
        rows = zip(self._held, losses, strict=True)
        lines = [with_checksum(f"{step} {part} {loss.hex()}") for (step, part, _), loss in rows]
        self._held = []
        path = self.directory / LOSSES
        with explained(path):
            try:
                file = open_in_place(path, "a", encoding="ascii")
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # someone made a snapshot by hard links: it keeps this file, and the run writes to a copy
                write_text(path, "".join([path.read_text(encoding="ascii"), *lines]))
            else:
                with file:
                    file.writelines(lines)


def _only_time_is_over(trainer: pl.Trainer) -> bool:
    """Return whether a run ended by its time, before its last step or epoch."""
    epochs: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    if 0 <= trainer.max_steps <= trainer.global_step or 0 < (trainer.max_epochs or -1) <= epochs:
        return False
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    left = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def _chosen_by(directory: Path) -> dict[str, Any] | None:
    """Return what a run's best drafter was chosen by; None where there is none, ValueError if it is damaged."""
    if not directory.exists():
        return None
    remedy = f"remove {directory}: a new best one is chosen from here on"
    check_sums(directory, remedy)
    check_of_run(directory, remedy)
    stored = read_json(directory / "config.json")
    chosen = stored.get(CHOSEN_BY) if isinstance(stored, dict) else None
    if isinstance(chosen, dict) and isinstance(chosen.get("mean"), float) and "decoded" in chosen:
        return chosen
    raise ValueError(f"{directory}: its config.json does not say what it was chosen by: {remedy}")


def check_run(directory: Path) -> None:
    """Raise ValueError if a file of a run, checkpoints and drafter aside, is not what was written."""
    check_sums(directory, partial=True)
    if (directory / LOSSES).exists():
        read_losses(directory / LOSSES)


SKIPPED = 2  # steps at the start of a run that are not measured: they compile


class Throughput(pl.Callback):
    """Logs what the run will need of memory, then, of the steps since the last report and over all ranks:

    * ``speed/tokens_per_second``, padding included;
    * ``speed/step_seconds``, of an optimizer step;
    * ``memory/peak_mb`` (10^6 bytes), of the rank that takes most: on a GPU what torch has allocated there since the
      last report, on a host the resident set, libraries and data included, since the process began.

    Validation, checkpoints and the first two steps, which compile, are not part of any rate. A GPU is waited for
    once a report, and where the clock stops. (Lightning's ``ThroughputMonitor`` waits for it after every batch, takes
    all ranks for the first, and counts checkpoints and compilation as training.)
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
            _report_need(trainer, pl_module, pl_module.drafter)
        self._seen_step = trainer.global_step
        self._skip_until = trainer.global_step + SKIPPED
        self._measuring = False

    def _begin(self) -> None:
        self._measuring = True
        # of the time under way; None while the clock stands
        self._started: float | None = self.clock()
        self._seconds = 0.0
        self._steps = 0
        self._tokens = 0

    def _pause(self, *args: Any) -> None:
        """Stop the clock until the next batch."""
        if self._measuring and self._started is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds += self.clock() - self._started
            self._started = None

    on_validation_start = on_save_checkpoint = _pause  # type: ignore[assignment]

    def on_train_batch_start(self, *args: Any) -> None:
        """Continue after a pause."""
        if self._measuring and self._started is None:
            self._started = self.clock()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch, and report if a step is done that is logged."""
        assert isinstance(batch, Batch)
        stepped = trainer.global_step != self._seen_step
        self._seen_step = trainer.global_step
        if not self._measuring:
            if stepped and trainer.global_step >= self._skip_until:
                self._begin()
            return
        self._tokens += batch.ids_BT.numel()
        self._steps += stepped
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if stepped and every > 0 and trainer.global_step % every == 0:
            self._pause()
            self._report(trainer, pl_module)
            self._begin()

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # in bytes on macOS alone
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        tokens: float = self._tokens
        seconds = self._seconds
        reduce = trainer.strategy.reduce
        if (ranks := trainer.world_size) > 1:
            totals = torch.tensor([tokens, seconds], dtype=torch.float64, device=self._device)
            tokens, seconds = reduce(totals, reduce_op="sum").tolist()
            most = torch.tensor(peak_bytes, dtype=torch.float64, device=self._device)
            peak_bytes = int(reduce(most, reduce_op="max"))
        wall = max(seconds / ranks, 1e-9)
        figures_to_log = {
            "speed/tokens_per_second": tokens / wall,
            "speed/step_seconds": wall / self._steps,
            "memory/peak_mb": peak_bytes / MB,
        }
        module.log_dict(figures_to_log, on_step=True, on_epoch=False)


def _report_need(trainer: pl.Trainer, module: DrafterModule, drafter: Drafter) -> None:
    """Log what the run will need of memory."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    model = module.target.model
    tensors = [*model.parameters(), *model.buffers()]
    dtype = drafter.lm_head.weight.dtype
    need = memory_need(
        drafter.config,
        module.objective,
        data.batch_size,
        data.seq_len,
        trained_in=precision(trainer.precision) or Precision(dtype, dtype),
        train_embed=module.train_embed,
        train_head=module.train_head,
        target_dtype=module.target.dtype,
        world=trainer.world_size,
        nodes=trainer.num_nodes,
        target_bytes=sum(tensor.nbytes for tensor in tensors if not tensor.is_meta),
        sharded=is_sharded(trainer),
    )
    report_memory(need)
