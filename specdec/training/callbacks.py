"""What a run does beside training: its record, the drafter that it keeps, and the moving average."""

import hashlib
import math
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import Timer, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from specdec.drafter import Drafter, save
from specdec.training.checkpoint import ends_all
from specdec.training.distributed import is_sharded, whole
from specdec.training.module import DrafterModule
from specdec.training.run_directory import CONFIG, LOSSES
from specdec.utils.files import explain, write_json, write_text


class RunRecord(pl.Callback):
    """Writes what a run is, and what becomes of it, into its directory; and seeds every batch.

    * ``config.yaml`` and ``provenance.json``, once target, drafter and data stand; ``config.1.yaml`` and so on when the
      run is resumed. The config lies in every checkpoint too.
    * ``losses.txt``: ``step part loss`` for every batch of the first process, the loss in hexadecimal, so that no bit
      is lost. ``step`` counts optimizer steps, ``part`` the batches of one. Losses stay on the device until the next
      logged step or checkpoint; a resumed run forgets those after its checkpoint.
    * ``drafter/``, when training ends, and when it is interrupted; an older one is replaced whole.
    * ``DONE.json``, once training has ended by itself.

    Torch's, numpy's and Python's generators are seeded before every batch: what was drawn before it, in validation or
    in a run that was killed, has no say in what dropout draws here.

    Args:
        directory: the run's.
        seed: of the batches' seeds.
        config: the resolved config, as YAML.
        provenance: see :func:`specdec.utils.machine.provenance`.
    """

    def __init__(self, directory: Path, seed: int, config: str = "", provenance: dict[str, Any] | None = None) -> None:
        self.directory, self.seed, self.config, self.provenance = directory, seed, config, provenance or {}
        self._step, self._part = -1, 0  # of the present batch; Lightning's own count of batches is another when resumed
        self._held: list[tuple[int, int, Tensor]] = []  # losses that are not on the disk yet

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write config and provenance."""
        first = trainer.strategy.broadcast(trainer.ckpt_path)
        if first != trainer.ckpt_path:
            raise ValueError(f"this process goes on from {trainer.ckpt_path}, the first from {first}: name one for all")
        if trainer.is_global_zero:
            (self.directory / "DONE.json").unlink(missing_ok=True)  # of a run that is made longer
            times = len(list(self.directory.glob("config*.yaml")))  # a resumed run keeps what it was before
            mark = f".{times}" if times else ""
            write_text(self.directory / f"config{mark}.yaml", self.config)
            write_json(self.directory / f"provenance{mark}.json", self.provenance)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the losses of the steps before the one at which training begins."""
        self._held, self._step = [], -1
        if trainer.is_global_zero:
            path = self.directory / LOSSES
            lines = read_lines(path) if path.exists() else []
            write_text(path, "".join(f"{line}\n" for line in lines if int(line.split()[0]) < trainer.global_step))

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Seed for one batch of an optimizer step."""
        self._part = self._part + 1 if trainer.global_step == self._step else 0
        self._step = trainer.global_step
        key = f"{self.seed}/{self._step}/{self._part}/{trainer.global_rank}"
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        torch.manual_seed(drawn)
        np.random.seed(drawn % 2**32)
        random.seed(drawn)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any) -> None:
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
        epochs: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        at_end = 0 <= trainer.max_steps <= trainer.global_step or 0 < (trainer.max_epochs or -1) <= epochs
        timers = [each.time_remaining() for each in trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
        late = any(seconds is not None and seconds <= 0 for seconds in timers)
        if trainer.is_global_zero and not trainer.interrupted and (at_end or not late):
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            figures = {name: value if math.isfinite(value) else None for name, value in found.items()}
            write_json(self.directory / "DONE.json", {"steps": trainer.global_step, "metrics": figures})

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what there is after an interruption; Lightning tears no module down after an error."""
        self._write_losses()
        if ends_all(trainer, exception):
            self._save_drafter(trainer, pl_module)
        pl_module.teardown("exception")

    def _save_drafter(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, DrafterModule)
        averages = (each.drafter for each in trainer.callbacks if isinstance(each, EMA))  # type: ignore[attr-defined]
        drafter = next((drafter for drafter in averages if drafter is not None), module.drafter)
        kept = None if drafter is None else whole(drafter)  # for which every process has to ask
        if trainer.is_global_zero and kept is not None and trainer.global_step > 0:
            save(kept, self.directory / "drafter", replace=True)

    def _write_losses(self) -> None:
        if not self._held:
            return
        losses = torch.stack([loss for _, _, loss in self._held]).double().tolist()
        lines = [f"{step} {part} {loss.hex()}\n" for (step, part, _), loss in zip(self._held, losses, strict=True)]
        self._held, path = [], self.directory / LOSSES
        try:
            with path.open("a", encoding="ascii") as file:
                file.writelines(lines)
        except OSError as error:
            raise explain(error, path) from error


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file of losses; one that a kill cut short counts for nothing."""
    return path.read_text(encoding="ascii").split("\n")[:-1]


class EMA(WeightAveraging):
    """Exponential moving average: validated, saved as the drafter, and what a checkpoint's ``state_dict`` holds.

    Lightning's own EMAWeightAveraging is not for drafters: it averages the ids of the draft vocabulary too, which
    rounds them to others, moves frozen weights by rounding, copies the target, and saves a wrong last checkpoint.

    Args:
        decay: share of the old average kept at each step; it looks back about ``1 / (1 - decay)`` steps.
        start: optimizer steps before averaging begins; until then the weights themselves count.
    """

    def __init__(self, decay: float = 0.999, start: int = 0) -> None:
        if not 0 <= decay < 1 or start < 0:
            raise ValueError(f"EMA: decay must lie in [0, 1) and start be 0 or more, not {decay} and {start}")
        # as lerp, of which equal weights come out unchanged to the last bit; buffers are no weights
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.start = start
        self._swapped = False  # the module has the averaged weights and the average the trained ones

    @property
    def _has_averaged(self) -> bool:
        return self._average_model is not None and int(self._average_model.n_averaged) > 0

    @property
    def drafter(self) -> Drafter | None:
        """The averaged drafter; None before averaging has begun."""
        module = self._average_model.module if self._has_averaged and self._average_model is not None else None
        return module.drafter if isinstance(module, DrafterModule) else None

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """After every step from ``start`` on."""
        return step_idx is not None and step_idx >= self.start

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the drafter, on its device, without the target."""
        if stage != "fit":
            return
        if trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(f"EMA: weights in {trainer.precision} cannot be averaged: use bf16-mixed or 32-true")
        if is_sharded(trainer):
            raise ValueError("EMA: weights in shards cannot be averaged: use --trainer.strategy ddp, or leave EMA out")
        assert isinstance(pl_module, DrafterModule)
        pl_module.configure_model()  # Lightning would only do it later
        target, pl_module._target = pl_module._target, None
        try:
            self._average_model = AveragedModel(pl_module, trainer.strategy.root_device, **self._kwargs)
        finally:
            pl_module._target = target

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the average."""
        if self._has_averaged:
            self._swap_models(pl_module)
            self._swapped = True

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        """Go on with the trained weights."""
        if self._swapped:
            self._swap_models(pl_module)
            self._swapped = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put a validation's exchange right before anything is saved."""
        self.on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing yet: the last checkpoint is written after this, and needs both."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the module."""
        if self._has_averaged:
            self._copy_average_to_current(pl_module)
