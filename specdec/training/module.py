"""Training a drafter under Lightning.

Legend: B batch, T tokens, V vocabulary.
"""

import contextlib
import dataclasses
import logging
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, DrafterSpec
from specdec.embedded.source import TargetSource
from specdec.features import Features, OnTheFly, Source
from specdec.nn.host_memory import keep_freed_memory
from specdec.nn.kernels import unroll_kernel
from specdec.nn.pointwise import compile_pointwise
from specdec.nn.products import fast_products
from specdec.optimizers import AdamW
from specdec.target import Target
from specdec.training.building import build, check_checkpoint
from specdec.training.enough import check_rows
from specdec.training.losses import FeatureLoss, LawLoss, Loss, SoftCrossEntropy, terms
from specdec.training.losses.trial import try_losses
from specdec.training.metrics import UnrollMetrics
from specdec.training.noise import Noise, NoNoise, batch_generator, try_noise
from specdec.training.objective import Objective, Recipe, objective, teach
from specdec.training.schedule import WarmupCosine, total_steps
from specdec.training.sharding import is_sharded, local, shard
from specdec.training.start import FromTarget, Start
from specdec.training.work import FrozenModel, Work, step_work

log = logging.getLogger(__name__)

STAGES = ("train", "val", "test")


class _TearDown(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pl_module.teardown("exception")


class DrafterModule(pl.LightningModule):
    """Trains an EAGLE drafter by training-time test; the target stays outside the state dict.

    Args:
        target: whose drafter it becomes.
        drafter: the design, or a preset's file.
        start: the weights to begin with: the target's where it has any, or a saved drafter's.
        loss: compares draft and target at every supervised slot.
        ttt_steps: unroll steps K; 1 is EAGLE-1's teacher forcing.
        step_decay: weight of step k is ``step_decay**k``.
        in_vocab: train only where the draft vocabulary has the target's most likely token, as EAGLE-3 does.
        features: where the target's features come from: ``OnTheFly``, or ``Cached`` by ``specdec cache``.
        noise: on the target's features as they enter the drafter, in training only.
        train_embed: train the token embedding too, which else stays as it starts: the target's.
        train_head: train the head, which starts from the target's rows; always off with ``head: target``.
        optimizer: called with the trainable parameters, by name.
        schedule: learning rate over the run.
        attention: how the unroll attends: ``dense``, ``blocked`` or ``flex``; ``auto`` takes flex on CUDA, else
            blocked.
        recompute: run each unroll step again in the backward pass instead of keeping its insides: less memory, a
            third more time.
        compile: fuse the point-wise pieces with ``torch.compile``.
    """

    def __init__(
        self,
        target: TargetSource = TargetSource(),  # noqa: B008  frozen
        drafter: DrafterSpec = DrafterSpec(),  # noqa: B008  frozen
        start: Start = FromTarget(),  # noqa: B008  frozen
        loss: Loss = SoftCrossEntropy(),  # noqa: B008  frozen
        ttt_steps: int = 7,
        step_decay: float = 0.8,
        in_vocab: bool = True,
        features: Features = OnTheFly(),  # noqa: B008  frozen
        noise: Noise = NoNoise(),  # noqa: B008  frozen
        train_embed: bool = False,
        train_head: bool = True,
        optimizer: OptimizerCallable = lambda p: AdamW(p),
        schedule: WarmupCosine = WarmupCosine(),  # noqa: B008  frozen
        attention: Literal["auto", "dense", "blocked", "flex"] = "auto",
        recompute: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if ttt_steps < 1:
            raise ValueError(f"model.ttt_steps must be at least 1, not {ttt_steps}")
        if not 0 < step_decay <= 1:
            raise ValueError(f"model.step_decay must lie in (0, 1], not {step_decay}")
        parts = (
            ("loss", loss, (Loss, LawLoss, FeatureLoss)),
            ("features", features, (Features,)),
            ("noise", noise, (Noise,)),
            ("start", start, (Start,)),
        )
        for name, part, bases in parts:
            if type(part) in bases:
                raise ValueError(f"model.{name}={type(part).__name__} is a base, no part: choose one of its own")
        loss.check(drafter)
        try_losses(loss)
        self.target_source, self.spec, self.start, self.noise = target, drafter, start, noise
        self.features, self.source = features, Source()
        self.recipe = Recipe(loss, ttt_steps, step_decay, in_vocab, recompute=recompute)
        self.train_embed, self.train_head = train_embed, train_head and drafter.head == "own"
        self.make_optimizer, self.schedule, self.attention = optimizer, schedule, attention
        self.compile_parts = compile
        self.drafter: Drafter | None = None
        self.metrics = torch.nn.ModuleList(UnrollMetrics(ttt_steps, terms(loss), step_decay) for _ in STAGES)
        self._target: Target | None = None  # no nn.Module: neither saved nor trained
        self._products = contextlib.ExitStack()
        self._sums = torch.zeros(2)  # rows, and their losses, of the batches since the last optimizer step

    @property
    def target(self) -> Target:
        """The target, loaded and proven at the first use."""
        if self._target is None:
            target = self.target_source.load()
            target.prove()
            self._target = target
        return self._target

    def use(self, target: Target) -> None:
        """Take a target of :attr:`target_source` that is loaded and proven already."""
        self._target = target

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, which the data modules read."""
        return self.target.tokenizer

    @property
    def ttt_steps(self) -> int:
        """Unroll steps K."""
        return self.recipe.steps

    def work(self, B: int, T: int, kept: int, rows: int, teacher_rows: int) -> Work:
        """Operations of one batch; see :func:`specdec.training.work.step_work`."""
        assert self.drafter is not None
        return step_work(
            self.drafter.config,
            FrozenModel.of(self.target.model),
            B,
            T,
            self.ttt_steps,
            kept=kept,
            rows=rows,
            teacher_rows=teacher_rows,
            whole_vocabulary=self.recipe.whole_vocabulary,
            train_embed=self.train_embed,
            train_head=self.train_head,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads on all ranks."""
        return self._batch_tokens * self._parts

    def configure_model(self) -> None:
        """Build the drafter for the target, with the draft vocabulary that the training data asks for."""
        if self.drafter is None:
            data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
            self.drafter = self.build(data)
            self.open(data, self.drafter)
            check_rows(self.trainer, data, self.source.first_rows)
            if is_sharded(self.trainer):
                shard(self.drafter.to(self.trainer.strategy.root_device), self.device_mesh["data_parallel"])  # type: ignore[index]

    def build(self, data: TokenData) -> Drafter:
        """The drafter that training begins with, for the target and what these prepared data supervise."""
        learnt = (self.train_embed, self.train_head)
        return build(self.spec, self.target, data, self.start, *learnt, self.recipe.steps)

    def open(self, data: TokenData, drafter: Drafter) -> None:
        """Let the target's features of these data be had from where the run has them."""
        config = drafter.config
        self.source = self.features.open(self.target, data, config.aux_layers, config.aux_final_norm)
        data.companion = self.source
        try_noise(self.noise, len(config.aux_layers), self.target.hidden_size)

    def setup(self, stage: str) -> None:
        """Put the target beside the drafter, and choose how this device computes."""
        device = self.trainer.strategy.root_device
        self.target.to(device)
        name, kernel = unroll_kernel(self.attention, device)
        self.recipe = dataclasses.replace(self.recipe, kernel=kernel)
        compile_pointwise(self.compile_parts)
        products = self._products.enter_context(fast_products()) if device.type == "cpu" else "CUDA's"
        kept = "kept" if device.type == "cpu" and keep_freed_memory() else "left to the allocator"
        log.info(
            "unroll attention: %s; float32 products: %s; compiled: %s; freed memory: %s",
            name, products, self.compile_parts, kept,
        )  # fmt: skip

    def configure_callbacks(self) -> list[pl.Callback]:
        """Lightning tears no module down after an error."""
        return [_TearDown()]

    def teardown(self, stage: str) -> None:
        """Leave torch as it was."""
        self.source.close()
        self._products.close()
        compile_pointwise(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the weights belong to."""
        assert self.drafter is not None
        checkpoint["drafter_config"] = self.drafter.config.to_json()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another drafter.

        Raises:
            ValueError: the checkpoint was made under another drafter config, target or draft vocabulary.
        """
        assert self.drafter is not None
        check_checkpoint(checkpoint, self.drafter)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The injected optimizer over what is trainable, and the schedule over the whole run."""
        assert self.drafter is not None
        named = [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]
        optimizer = self.make_optimizer(named)
        scheduler = self.schedule.build(optimizer, total_steps(self.trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _metric(self, stage: str) -> UnrollMetrics:
        metric = self.metrics[STAGES.index(stage)]
        assert isinstance(metric, UnrollMetrics)
        return metric

    def _run(self, batch: Batch, stage: str, measure: bool = True) -> Objective:
        assert self.drafter is not None
        teacher = teach(self.target, self.drafter, batch, self.recipe, measure, self.source)
        if stage == "train" and not isinstance(self.noise, NoNoise):
            generator = batch_generator(batch, self.global_step, self.global_rank)
            noisy = self.noise(teacher.aux_BTNH, batch.documents_BT, generator)
            teacher = teacher._replace(aux_BTNH=noisy)
        out: Objective = self.drafter(objective, batch, teacher, self.recipe, measure)
        if out.counts is not None:
            self._metric(stage).update(out.counts)
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One unrolled loss; figures are measured on the steps that are logged."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        logged = every > 0 and (self.global_step + 1) % every == 0
        out = self._run(batch, "train", measure=logged)
        if logged and not out.loss.isfinite():
            raise ValueError(
                f"the loss of step {self.global_step} is {float(out.loss.detach())}: lower the learning rate, "
                "or look at model.loss"
            )
        if logged and ((batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch):
            self._report("train")
        if self._parts == 1:
            self.log("train/loss", out.loss, prog_bar=True)
            return out.loss
        self._sums = self._sums.to(out.rows) + torch.stack([out.rows, out.loss.detach() * out.rows])
        return out.loss * (out.rows / self._batch_tokens)

    @property
    def _batch_tokens(self) -> int:
        """Tokens of a full batch: keeps the scaled losses near one; an epoch's last batch may have fewer."""
        data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.batch_size * data.seq_len

    @property
    def _parts(self) -> int:
        """Batches, on all ranks, whose gradients an optimizer step averages."""
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Let the gradients go at once; Lightning would keep them through the next forward, where memory is dearest."""
        super().optimizer_step(*args, **kwargs)
        optimizer: torch.optim.Optimizer = args[2]
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the mean of the batches' gradients the gradient of the mean over all their rows, on all ranks; log that.

        A batch with few supervised rows counts for few; none at all leaves gradients of zero.
        """
        if self._parts == 1:
            return
        rows, losses = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self._sums = torch.zeros_like(self._sums)
        self.log("train/loss", losses / rows.clamp(min=1e-30), prog_bar=True)
        scale = torch.where(rows > 0, self._parts * self._batch_tokens / rows.clamp(min=1e-30), 0.0)
        torch._foreach_mul_(local(p.grad for p in self.parameters() if p.grad is not None), scale)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same loss and figures on held-out rows."""
        self._run(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation."""
        self._run(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Report the loss and the depth figures."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report the loss and the depth figures."""
        self._report("test")

    def _report(self, stage: str) -> None:
        metric = self._metric(stage)
        values = metric.compute()
        if stage == "train":
            del values["loss"]  # that of every step is logged
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()})
        metric.reset()
