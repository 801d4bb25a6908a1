"""Training a drafter under Lightning.

One training step is read in five files: this one (``training_step``), ``step.py`` (target, unroll and loss), ``ttt.py``
(the unroll), ``head_loss.py`` (both heads, piece by piece) and ``losses.py``.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, save_drafter
from specdec.features import Features, FeatureSource, OnTheFly
from specdec.nn.backend import compile_pointwise, keep_freed_memory, matmul_backend
from specdec.nn.kernels import unroll_kernel
from specdec.nn.optimizers import AdamW
from specdec.target import Target, TargetSource
from specdec.training import divergences  # noqa: F401  configs name its losses
from specdec.training.building import (
    FromTarget,
    Start,
    build,
    check_checkpoint,
    check_early,
    early_config,
)
from specdec.training.distributed import is_sharded, shard, unsharded
from specdec.training.losses import DistributionLoss, FeatureLoss, Loss, SoftCrossEntropy, terms
from specdec.training.memory import precision
from specdec.training.metrics import UnrollMetrics
from specdec.training.noise import FeatureNoise, NoNoise, generator_of, noisy
from specdec.training.schedule import Schedule, WarmupCosine
from specdec.training.step import CUDA_PIECE, ObjectiveConfig, StepOutput, TrainStep, target_outputs
from specdec.training.step_weights import Decay, PrefixWeights, StepWeights
from specdec.utils.config import hyperparameters
from specdec.utils.numbers import Depth, PositiveShare, check_numbers

log = logging.getLogger(__name__)

STAGES = ("train", "val")
# figures of validation that are logged for every source
BY_SOURCE = ("loss", "prefix_proxy", "coverage")
NEVER = torch.iinfo(torch.int64).max  # a step that does not come
NO_LENGTH = (
    "the learning rate's schedule needs the run's length: set trainer.max_steps or trainer.max_epochs; "
    "trainer.max_time can only end it earlier"
)
if TYPE_CHECKING:
    AnyTarget = TargetSource | Target | str | Path
    AnyDrafter = DrafterSpec | str
else:  # of which the command line makes its options
    AnyTarget = TargetSource
    AnyDrafter = DrafterSpec
DEFAULTS: dict[str, Any] = {
    "data": {"class_path": "specdec.embedded.corpus.EmbeddedData"},
    "model.optimizer": {
        "class_path": "specdec.nn.optimizers.AdamW",
        "init_args": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
    },
}
"""What a config that does not say trains with."""


class DrafterModule(pl.LightningModule):
    """Trains an EAGLE drafter by training-time test; the target stays outside the state dict.

    Any trainer will do: ``Trainer(max_steps=1000).fit(DrafterModule(target="DIR"), datamodule=ChatData("a.jsonl"))``.
    Then :attr:`drafter` is the trained drafter, and :meth:`save_drafter` writes it.

    Args:
        target: whose drafter it becomes.
        drafter: the design, or a preset's file.
        start: the weights to begin with: the target's where it has any, or a saved drafter's.
        loss: compares draft and target at every supervised slot.
        ttt_steps: unroll steps K; 1 is EAGLE-1's teacher forcing.
        step_weights: what the steps of a slot weigh: by depth alone, or by how well those before were drafted.
        step_keep: share of a step's slots that the next one keeps, drawn anew for every batch (conditional drop,
            https://arxiv.org/abs/2504.18583; P-EAGLE: 0.7); never less than a fifth of all, or than this share if that
            is less; 1 keeps all.
        in_vocab: train only where the draft vocabulary has the target's most likely token, as EAGLE-3 does.
        features: where the target's features come from: ``OnTheFly``, ``Cached`` by ``specdec cache``, or ``Streamed``
            from processes of their own.
        noise: on the target's features as they enter the drafter, in training only.
        train_embed: train the token embedding too, which else stays as it starts: the target's.
        train_head: train the head, which starts from the target's rows; always off with ``head: target``.
        optimizer: called with the trainable parameters, by name.
        schedule: learning rate over the run: a :class:`Schedule`, or any scheduler of torch's, called with the
            optimizer and stepped with it.
        attention: how the unroll attends: ``dense``, ``blocked`` or ``flex``; ``auto`` takes flex on CUDA, else
            blocked.
        recompute: run each unroll step again in the backward pass instead of keeping its insides: less memory, a
            third more time.
        compile: fuse the point-wise pieces with ``torch.compile``.
    """

    def __init__(
        self,
        target: AnyTarget = TargetSource(),  # noqa: B008  frozen
        drafter: AnyDrafter = DrafterSpec(),  # noqa: B008  frozen
        start: Start = FromTarget(),  # noqa: B008  frozen
        loss: Loss = SoftCrossEntropy(),  # noqa: B008  frozen
        ttt_steps: Depth = 7,
        step_weights: StepWeights = Decay(),  # noqa: B008  frozen
        step_keep: PositiveShare = 1.0,
        in_vocab: bool = True,
        features: Features = OnTheFly(),  # noqa: B008  frozen
        noise: FeatureNoise = NoNoise(),  # noqa: B008  frozen
        train_embed: bool = False,
        train_head: bool = True,
        optimizer: OptimizerCallable = lambda p: AdamW(p),
        schedule: Schedule | LRSchedulerCallable = WarmupCosine(),  # noqa: B008  frozen
        attention: Literal["auto", "dense", "blocked", "flex"] = "auto",
        recompute: bool = False,
        compile: bool = False,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__()
        # for loggers; fit puts its whole config there
        self.save_hyperparameters({"model": hyperparameters(given)})
        check_numbers(DrafterModule.__init__, given, "model.")
        bases = (
            Loss,
            DistributionLoss,
            FeatureLoss,
            StepWeights,
            PrefixWeights,
            Features,
            FeatureNoise,
            Start,
        )
        for name in ("loss", "step_weights", "features", "noise", "start"):
            if type(part := given[name]) in bases:
                raise ValueError(
                    f"model.{name}={type(part).__name__} is an abstract base class: choose one of its subclasses"
                )
        # no nn.Module: neither saved nor trained
        self._target = target if isinstance(target, Target) else None
        self._proved = False
        self._trains_on: torch.device | None = None  # of the trainer, once there is one
        self.target_source = TargetSource.of(target)
        self.spec = DrafterSpec.preset(drafter) if isinstance(drafter, str) else drafter
        self.start = start
        self.noise = noise
        self.features = features
        self.source = FeatureSource()
        self.objective = ObjectiveConfig(
            loss, ttt_steps, step_weights, in_vocab, recompute=recompute, keep=step_keep
        )
        self.train_embed = train_embed
        self.train_head = train_head and self.spec.head == "own"
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.attention = attention
        self.compile_parts = compile
        # drafter and objective, from :meth:`configure_model` on
        self.train_step: TrainStep | None = None
        self.metrics = torch.nn.ModuleList(
            UnrollMetrics(terms(loss), step_weights.factors(ttt_steps)) for _ in STAGES
        )
        # of validation, by the numbers of the sources that have names
        self.source_metrics = torch.nn.ModuleDict()
        self._products = contextlib.ExitStack()
        # rows, and their losses, of the batches since the last optimizer step
        self._sums = torch.zeros(2)
        # the first step whose loss is not finite, on the loss's device
        self._first_bad = torch.tensor(NEVER)
        loss.check(self.spec)
        if recompute:
            self.spec.drafting.check_recompute()
        start.check()
        self.target_config = (
            self.target_source.local_config() if self._target is None else self._target.config
        )
        self._check()

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
                    "features Cached or Streamed, or set parts to false"
                )
            self._proved = True
        return self._target

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, which the data modules read."""
        return self.target.tokenizer

    @property
    def drafter(self) -> Drafter | None:
        """What is trained, once it has been built."""
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
        kept = unsharded(self.drafter)
        return (
            save_drafter(kept, directory, replace, about)
            if self.global_rank == 0
            else Path(directory)
        )

    def configure_callbacks(self) -> list[pl.Callback]:
        """None of its own. Lightning asks for them first of all, so a run that cannot be is refused here."""
        trainer = self.trainer
        self._trains_on = trainer.strategy.root_device
        if not isinstance(trainer.datamodule, TokenData):  # type: ignore[attr-defined]
            raise ValueError(
                "training needs a data module of specdec's (ChatData, TextData, EmbeddedData or your own TokenData), "
                "of which the draft vocabulary is chosen: trainer.fit(module, datamodule=ChatData(train=...))"
            )
        if trainer.state.fn == "fit":
            endless = self.trainer.max_steps <= 0 and (self.trainer.max_epochs or 0) <= 0
            if endless and isinstance(self.schedule, Schedule):
                raise ValueError(NO_LENGTH)
        self._check(self._data.seq_len)
        return []

    def _check(self, seq_len: int = 0) -> None:
        given = (self.start, self.train_embed, self.train_head, self.objective.steps)
        check_early(self.spec, self.target_config, seq_len, *given)

    def early_config(self) -> DrafterConfig | None:
        """The drafter's config before the target is loaded; None where the target's config is not here."""
        return early_config(self.spec, self.target_config)

    @property
    def _data(self) -> TokenData:
        data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def configure_model(self) -> None:
        """Build the drafter for the target, with the draft vocabulary that the training data asks for."""
        if self.train_step is None:
            data = self._data
            device = self.trainer.strategy.root_device
            drafter = self.build(data)
            self.open(data, drafter)
            self._check_rows(data)
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
        """The drafter that training begins with."""
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
        self._first_bad = torch.tensor(NEVER, device=device)
        self.target.to(device)
        if device.type == "cuda" and self.target.dtype == torch.float32:
            log.warning(
                "the target runs in float32, at a fraction of what this device can do: set model.target.dtype=bfloat16 "
                "and trainer.precision=bf16-mixed"
            )
        compile_pointwise(self.compile_parts)
        products = (
            self._products.enter_context(matmul_backend()) if device.type == "cpu" else "CUDA's"
        )
        kept = "kept" if device.type == "cpu" and keep_freed_memory() else "left to the allocator"
        log.info(
            "float32 products: %s; compiled: %s; freed memory: %s",
            products,
            self.compile_parts,
            kept,
        )

    def teardown(self, stage: str) -> None:
        """Release the source of features, and restore torch's settings."""
        self.source.close(failed=stage == "exception")
        self._products.close()
        compile_pointwise(False)

    def _note(self, loss: Tensor) -> None:
        """Remember the step under way if its loss is not finite, without waiting for the device."""
        self._first_bad = torch.where(
            loss.isfinite(), self._first_bad, self._first_bad.clamp(max=self.global_step)
        )

    def check_finite(self, weights: bool = True) -> None:
        """Look at the losses of all steps so far, and at the weights they have led to; every process has to ask.

        Raises:
            ValueError: one is NaN or infinite: on every process, whichever has it.
        """
        bad = self._first_bad  # of the loss over all processes: the same on each
        if weights and self.drafter is not None:
            held = [_local(p).detach() for p in self.drafter.parameters() if p.requires_grad]
            found = [
                extreme.isfinite()
                for values in held
                if values.numel()
                for extreme in values.aminmax()
            ]
            sound = torch.stack(found).all() if found else torch.tensor(True, device=bad.device)
            bad = torch.where(sound, bad, bad.clamp(max=self.global_step))
            bad = -self.trainer.strategy.reduce(-bad, reduce_op="max")
        if (step := int(bad)) < NEVER:
            raise ValueError(
                f"by step {step} the loss or a weight was NaN or infinite: lower the learning rate (model.optimizer), "
                "clip gradients harder (trainer.gradient_clip_val) or look at model.loss; the last checkpoint "
                "is sound: --ckpt_path auto --allow_changes '[model.optimizer]' goes on from it"
            )

    def on_train_start(self) -> None:
        """Go on at the learning rate of the present config: what is restored is the checkpoint's."""
        scheduler = self.lr_schedulers()
        if isinstance(self.schedule, Schedule) and isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = list(self._rates)
            for group, rate, factor in zip(
                scheduler.optimizer.param_groups, self._rates, scheduler.lr_lambdas, strict=True
            ):
                group["initial_lr"], group["lr"] = rate, rate * factor(scheduler.last_epoch)

    def on_validation_start(self) -> None:
        """Nothing is measured of weights that are not finite."""
        self.check_finite()

    def on_train_end(self) -> None:
        """A run that ends as done has a drafter of numbers."""
        self.check_finite()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the drafter's config beside the weights; those that are not finite leave the last checkpoint be."""
        assert self.drafter is not None
        self.check_finite()
        checkpoint["drafter_config"] = self.drafter.config.to_json()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another drafter config, target or draft vocabulary."""
        assert self.drafter is not None
        check_checkpoint(checkpoint, self.drafter)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The injected optimizer over what is trainable, and the schedule over the whole run."""
        assert self.drafter is not None
        named = [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]
        optimizer = self.make_optimizer(named)
        schedule = self.schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if isinstance(schedule, Schedule):
            scheduler: Any = LambdaLR(
                optimizer, functools.partial(schedule.factor, total=self._total_steps())
            )
        else:
            scheduler = schedule(optimizer)
        # of Lightning's ReduceLROnPlateau, which looks once an epoch
        monitor = getattr(scheduler, "monitor", None)
        interval = "epoch" if monitor else "step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": monitor},
        }

    @property
    def length(self) -> int | None:
        """Optimizer steps of the whole run; None where neither steps nor epochs are set."""
        # whose estimated_stepping_batches loses the loader's state in a resumed run
        trainer = self.trainer
        if trainer.max_steps > 0:
            return trainer.max_steps
        if not trainer.max_epochs or trainer.max_epochs < 0:
            return None
        batches = len(self._data.train_dataloader())
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return max(1, -(-batches // trainer.accumulate_grad_batches)) * trainer.max_epochs

    def _total_steps(self) -> int:
        """The same; ValueError if neither steps nor epochs are set."""
        if (length := self.length) is None:
            raise ValueError(NO_LENGTH)
        return length

    def _check_rows(self, data: TokenData) -> None:
        """Refuse, before the first step, a run that draws more training rows than its features have."""
        trainer = self.trainer
        first_rows = self.source.first_rows
        if first_rows is None or trainer.state.fn != "fit":
            return
        drawn = (
            self._total_steps()
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

    def _run(self, batch: Batch, stage: str, measure: bool = True) -> StepOutput:
        """The target's outputs, with noise in training, then the drafter's step; figures go to the stage's metrics."""
        assert self.train_step is not None and self._target is not None
        target = target_outputs(
            self._target, self.train_step.drafter, batch, self.objective, measure, self.source
        )
        if stage == "train" and not isinstance(self.noise, NoNoise):
            aux_BTNH = noisy(self.noise, target.aux_BTNH, batch, self.global_step, self.global_rank)
            target = target._replace(aux_BTNH=aux_BTNH)
        drawn_BT = None
        if stage == "train" and self.objective.keep < 1:
            generator = generator_of(batch, self.global_step, self.global_rank, purpose=1)
            drawn_BT = torch.rand(
                batch.ids_BT.shape, generator=generator, device=batch.ids_BT.device
            )
        out: StepOutput = self.train_step(batch, target, measure, drawn_BT)
        if out.counts is not None:
            self.metrics[STAGES.index(stage)].update(out.counts)  # type: ignore[operator]
        return out

    def _metrics_of(self, source: str) -> UnrollMetrics:
        """The figures of a source of validation; every process asks for the same ones in the same order."""
        number = str(list(self._data.validation_sections).index(source))  # a name may hold a dot
        if number not in self.source_metrics:
            metrics = UnrollMetrics(
                terms(self.objective.loss), self.objective.weights.factors(self.objective.steps)
            )
            self.source_metrics[number] = metrics.to(self.device)
        found = self.source_metrics[number]
        assert isinstance(found, UnrollMetrics)
        return found

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One unrolled loss; figures are measured on the steps that are logged."""
        logged = self._is_logged
        out = self._run(batch, "train", logged)
        if logged and (
            (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
            or self.trainer.is_last_batch
        ):
            self._report("train")
        if self.trainer.accumulate_grad_batches * self.trainer.world_size == 1:
            self._note(out.loss.detach())
            self.log("train/loss", out.loss, prog_bar=True)
            return out.loss
        self._sums = self._sums.to(out.rows) + torch.stack([out.rows, out.loss.detach() * out.rows])
        # several batches make one optimizer step: each counts by its rows; on_before_optimizer_step divides by all rows
        return out.loss * (out.rows / self._batch_tokens)

    @property
    def _is_logged(self) -> bool:
        """Whether the optimizer step under way is one that is logged."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.global_step + 1) % every == 0

    @property
    def _batch_tokens(self) -> int:
        """Of a full batch: keeps the scaled losses near one."""
        return self._data.batch_size * self._data.seq_len

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Let the gradients go at once; Lightning would keep them through the next forward, where memory is dearest."""
        super().optimizer_step(*args, **kwargs)
        optimizer: torch.optim.Optimizer = args[2]
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradient that of the step, and log its norm, which clipping sees next, and the learning rates."""
        self._mean_over_rows()
        if not self._is_logged:
            return
        self.check_finite(weights=False)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters() if p.grad is not None]
        )
        found: dict[str, Any] = {
            "train/grad_norm": norm.full_tensor() if isinstance(norm, DTensor) else norm
        }
        first, *others = optimizer.param_groups
        found["train/lr"] = torch.tensor(float(first["lr"]), dtype=torch.float64)
        # those whose rate was another from the start
        for number, group in enumerate(others, start=1):
            if group.get("initial_lr", group["lr"]) != first.get("initial_lr", first["lr"]):
                found[f"train/lr_{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        self.log_dict(found)

    def _mean_over_rows(self) -> None:
        """Make the mean of the batches' gradients the gradient of the mean over all their rows, on all ranks; log that.

        A batch with few supervised rows counts for few; none at all leaves gradients of zero.
        """
        # batches that Lightning averages
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        if parts == 1:
            return
        if self.trainer.world_size > 1:  # Lightning's own reduction waits for all processes first
            torch.distributed.all_reduce(self._sums)
        rows, losses = self._sums
        self._sums = torch.zeros_like(self._sums)
        self._note(losses)
        self.log("train/loss", losses / rows.clamp(min=1e-30), prog_bar=True)
        scale = torch.where(rows > 0, parts * self._batch_tokens / rows.clamp(min=1e-30), 0.0)
        for gradient in (p.grad for p in self.parameters() if p.grad is not None):
            _local(gradient).mul_(scale)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same loss and figures on held-out rows, of all together and of each source that has a name."""
        counts = self._run(batch, "val").counts
        if counts is not None and (source := self._data.validation_source(batch_idx)) is not None:
            self._metrics_of(source).update(counts)

    def on_validation_epoch_end(self) -> None:
        """Log the loss and the figures of every depth, and those of all depths by source."""
        self._report("val")
        for source in self._data.validation_sections:
            metrics = self._metrics_of(source)
            if metrics.update_called:  # a validation that is cut short may not come to it
                values = metrics.compute()
                self.log_dict({f"val/{name}/{source}": values[name] for name in BY_SOURCE})
                metrics.reset()

    def _report(self, stage: str) -> None:
        metric = self.metrics[STAGES.index(stage)]
        assert isinstance(metric, UnrollMetrics)
        values = metric.compute()
        if stage == "train":
            del values["loss"]  # that of every step is logged
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()})
        metric.reset()


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
