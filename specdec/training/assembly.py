"""Before the first step of a training run: loads the target, builds the drafter for it, and places both."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable

from specdec.data import TokenData
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, save_drafter
from specdec.features import Features, FeatureSource
from specdec.nn.backend import compile_pointwise, keep_freed_memory, matmul_backend
from specdec.nn.kernels import unroll_kernel
from specdec.target import Target, TargetSource
from specdec.training.building import Start, build, check_early, early_config
from specdec.training.distributed import is_sharded, shard, unsharded
from specdec.training.learning_rate import check_has_length, known_run_length
from specdec.training.memory import precision
from specdec.training.schedule import Schedule
from specdec.training.step import CUDA_PIECE, ObjectiveConfig, TrainStep

log = logging.getLogger(__name__)


class TeardownAfterError(pl.Callback):
    """Tears the module down after an error or an interruption, which Lightning itself does not do."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Release the source of features, and restore torch's settings."""
        pl_module.teardown("exception")


class BuildsDrafter(pl.LightningModule):
    """Loads the target and builds the drafter for it, when Lightning asks; the target stays outside the state dict.

    The subclass sets :attr:`objective` and :attr:`schedule`, and has the training step.
    """

    objective: ObjectiveConfig
    schedule: Schedule | LRSchedulerCallable

    def __init__(
        self,
        target: TargetSource | Target | str | Path,
        drafter: DrafterSpec | str,
        start: Start,
        features: Features,
        train_embed: bool,
        train_head: bool,
        attention: str,
        compile_parts: bool,
    ) -> None:
        super().__init__()
        # no nn.Module: neither saved nor trained
        self._target = target if isinstance(target, Target) else None
        self._proved = False
        self._trains_on: torch.device | None = None  # the trainer's device, once there is a trainer
        self.target_source = TargetSource.of(target)
        self.spec = DrafterSpec.preset(drafter) if isinstance(drafter, str) else drafter
        self.start = start
        self.features = features
        self.source = FeatureSource()
        self.train_embed = train_embed
        self.train_head = train_head and self.spec.head == "own"
        self.attention = attention
        self.compile_parts = compile_parts
        self.is_loaded = False  # by load_from_checkpoint
        self._is_assembled = False
        # drafter and objective, from :meth:`configure_model` on
        self.train_step: TrainStep | None = None
        self._matmul_backend = contextlib.ExitStack()

    @property
    def target(self) -> Target:
        """The target, loaded at the first use and self-checked (``Target.prove``) on the device that trains."""
        if self._target is None:
            self._target = self.target_source.load(str(self._trains_on or "cpu"))
        if not self._proved:
            if self._trains_on is not None:
                self._target.to(self._trains_on)
            if self._target.whole:
                self._target.prove()
            elif not self.features.made_ahead:
                raise ValueError(
                    f"model.target.parts: features {type(self.features).__name__} run the target's layers: use "
                    "features Cached, Streamed or Answered, or set parts to false"
                )
            self._proved = True
        return self._target

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, which the data modules read."""
        return self.target.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        """The drafter under training, once it has been built."""
        return None if self.train_step is None else self.train_step.drafter

    def save_drafter(
        self, directory: Path | str, replace: bool = False, about: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the trained drafter's directory, whole or not at all; where weights lie in shards every process asks.

        Args:
            about: JSON-ready, kept in the directory's ``config.json``.

        Raises:
            ValueError: nothing has been trained yet, the directory exists and ``replace`` is false, or it cannot be
                written.
        """
        if self.drafter is None:
            raise ValueError(
                "there is no drafter yet: it is built by trainer.fit(module, datamodule=...)"
            )
        drafter = unsharded(self.drafter)
        return (
            save_drafter(drafter, directory, replace, about)
            if self.global_rank == 0
            else Path(directory)
        )

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return what tears the module down after an error.

        Lightning asks for the callbacks first of all, so a run that cannot be is refused here.
        """
        trainer = self.trainer
        self._trains_on = trainer.strategy.root_device
        if not isinstance(trainer.datamodule, TokenData):  # type: ignore[attr-defined]
            raise ValueError(
                "training needs one of specdec's data modules, from which it chooses the draft vocabulary: "
                "trainer.fit(module, datamodule=ChatData(train=FILE)); wrap your own DataLoader or "
                "LightningDataModule: datamodule=TokenizedData(YOURS)"
            )
        self.features.check_data(trainer.datamodule)  # type: ignore[attr-defined]
        if trainer.state.fn == "fit":
            check_has_length(trainer, self.schedule)
        self._check_design(self._data.seq_len)
        return [TeardownAfterError()]

    def _check_design(self, seq_len: int = 0) -> None:
        trained_parts = (self.start, self.train_embed, self.train_head, self.objective.steps)
        check_early(self.spec, self.target_config, seq_len, *trained_parts)

    def early_config(self) -> DrafterConfig | None:
        """The drafter's config before the target is loaded; None where the target's config is not here."""
        return early_config(self.spec, self.target_config)

    @property
    def _data(self) -> TokenData:
        data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    @property
    def has_trainer(self) -> bool:
        """Whether a Lightning trainer runs the module."""
        try:
            return self.trainer is not None
        except RuntimeError:  # which Lightning raises without one
            return False

    def configure_model(self) -> None:
        """Build the drafter for the target, with the draft vocabulary that the training data asks for.

        Without a trainer there is no data: ``load_from_checkpoint`` builds the drafter of the checkpoint.
        """
        if not self.has_trainer:
            return
        if self.is_loaded and self.trainer.state.fn == "fit":
            raise ValueError(
                "a module from load_from_checkpoint is for use, not for training: resume with trainer.fit(module, "
                "datamodule, ckpt_path=FILE) and a new module, or start a new run with start=FromDrafter(DIRECTORY)"
            )
        data = self._data
        # Lightning has new tensors made on the trainer's device here. What comes from the data is on the CPU, so the
        # drafter is built there too, the same on every device; Lightning moves it afterwards.
        with torch.device("cpu"):
            drafter = self.drafter or self.build(data)
            if self.is_loaded:
                self._check_loaded(drafter, data)
            self.open(data, drafter)
            self._check_rows(data)
        if not self._is_assembled:
            self._assemble(drafter)
            self._is_assembled = True

    def _check_loaded(self, drafter: Drafter, data: TokenData) -> None:
        """Refuse a target or data that a checkpoint's drafter does not belong to."""
        if not self.target.is_of(drafter.config.target):
            raise ValueError(
                f"the checkpoint's drafter was trained for {drafter.config.target.get('source')}, not for "
                f"{self.target_source.source}: load it with that target"
            )
        data.check_vocabulary(drafter.config.vocab_size)

    def _assemble(self, drafter: Drafter) -> None:
        """Choose how the unroll attends on the trainer's device, and shard the drafter where the strategy does."""
        device = self.trainer.strategy.root_device
        name, kernel = unroll_kernel(self.attention, device)
        log.info("unroll attention: %s", name)
        self.objective = dataclasses.replace(self.objective, kernel=kernel)
        if device.type == "cuda":
            self.objective = dataclasses.replace(self.objective, piece_bytes=CUDA_PIECE)
        self.train_step = TrainStep(drafter, self.objective)
        if is_sharded(self.trainer):
            trained_in = precision(self.trainer.precision)
            products = trained_in.products if trained_in else drafter.lm_head.weight.dtype
            shard(self.train_step.to(device), device.type, self.trainer.num_nodes, products)

    def build(self, data: TokenData) -> Drafter:
        """Build the drafter that training begins with."""
        return build(
            self.spec,
            self.target,
            data,
            self.start,
            self.train_embed,
            self.train_head,
            self.objective.steps,
        )

    def open(self, data: TokenData, drafter: Drafter) -> None:
        """Open the source of the target's features of this data, which knows whose parts the drafter was built for."""
        config = drafter.config
        self.source = self.features.open(
            self.target, data, config.aux_layers, config.fusion.final_norm
        )
        drafter.config = dataclasses.replace(config, target=self.target.identity)
        data.reader = self.source

    def setup(self, stage: str) -> None:
        """Move the target to the drafter's device, and choose how it computes."""
        device = self.trainer.strategy.root_device
        self.target.to(device)
        if device.type == "cuda" and self.target.dtype == torch.float32:
            log.warning(
                "the target runs in float32, at a fraction of what this device can do: set model.target.dtype=bfloat16 "
                "and trainer.precision=bf16-mixed"
            )
        compile_pointwise(self.compile_parts)
        matmuls = self._matmul_backend.enter_context(matmul_backend(device))
        freed_memory = "left to the allocator"
        if device.type == "cpu" and keep_freed_memory():
            freed_memory = "kept"
        log.debug(
            "float32 products: %s; compiled: %s; freed memory: %s",
            matmuls,
            self.compile_parts,
            freed_memory,
        )

    def teardown(self, stage: str) -> None:
        """Release the source of features, and restore torch's settings."""
        self.source.close(failed=stage == "exception")
        self._matmul_backend.close()
        compile_pointwise(False)

    def _check_rows(self, data: TokenData) -> None:
        """Refuse, before the first step, a run that reads more rows than its features have."""
        self._check_validation_rows(data)
        trainer = self.trainer
        first_rows = self.source.first_rows
        if first_rows is None or trainer.state.fn != "fit":
            return
        drawn = (
            known_run_length(trainer, data)
            * trainer.accumulate_grad_batches
            * data.batch_size
            * trainer.world_size
        )
        drawn = min(drawn, len(data.splits.train.ids_BT))
        if drawn > first_rows:
            raise ValueError(
                f"the cache of features has the first {first_rows:,} training rows alone, fewer than this run draws: "
                f"run specdec cache with --first_rows {drawn}, into another directory"
            )

    def _check_validation_rows(self, data: TokenData) -> None:
        """Refuse a run that validates on more rows than its features have."""
        first_rows = self.source.first_val_rows
        if (
            first_rows is None or self.trainer.state.fn == "test"
        ):  # which reads rows of another loader
            return
        limit = self.trainer.limit_val_batches
        rows = len(data.splits.validation.ids_BT)
        read = rows
        if isinstance(limit, int):
            read = min(rows, limit * data.batch_size * self.trainer.world_size)
        if read > first_rows:
            raise ValueError(
                f"the cache of features has the first {first_rows:,} validation rows alone, fewer than this run reads: "
                f"run specdec cache with --first_val_rows {read}, into another directory, or set a lower "
                "trainer.limit_val_batches"
            )
