"""Training a drafter under Lightning.

One training step is read in five files: this one (``training_step``), ``step.py`` (target, unroll and loss),
``drafting/chained.py`` (the unroll), ``head_loss.py`` (the head, piece by piece) and ``losses.py``.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from specdec.data import Batch
from specdec.drafter import DrafterSpec
from specdec.features import Features, OnTheFly
from specdec.nn.optimizers import AdamW
from specdec.target import Target, TargetSource
from specdec.training import divergences, transplant  # noqa: F401  configs name their classes
from specdec.training.assembly import BuildsDrafter
from specdec.training.building import (
    FromTarget,
    Start,
    check_checkpoint,
    drafter_of_checkpoint,
)
from specdec.training.distributed import local_part
from specdec.training.learning_rate import (
    run_length,
    scheduler_config,
    use_present_rates,
)
from specdec.training.losses import Loss
from specdec.training.noise import FeatureNoise, NoNoise, generator_of, noisy
from specdec.training.nonfinite import NonFiniteSteps
from specdec.training.parts import OBJECTIVE, check_parts, other_objective
from specdec.training.schedule import Schedule, WarmupCosine
from specdec.training.stage_metrics import BY_SOURCE, StageMetrics
from specdec.training.step import ObjectiveConfig, StepOutput, TrainStep, target_outputs
from specdec.training.step_weights import StepWeights
from specdec.training.updates import Weights, copied_weights, relative_updates
from specdec.utils.config import hyperparameters
from specdec.utils.numbers import Depth, PositiveShare, check_numbers

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    AnyTarget = TargetSource | Target | str | Path
    AnyDrafter = DrafterSpec | str
else:  # of which the command line makes its options
    AnyTarget = TargetSource
    AnyDrafter = DrafterSpec
DEFAULTS: dict[str, Any] = {
    "data": {"class_path": "specdec.embedded.corpus.EmbeddedData"},
    "model.optimizer": {"class_path": "specdec.nn.optimizers.AdamW"},
}
"""What a config that does not say trains with."""


class DrafterModule(BuildsDrafter):
    """Trains an EAGLE drafter by training-time test; the target stays outside the state dict.

    Any trainer will do: ``Trainer(max_steps=1000, gradient_clip_val=0.5).fit(DrafterModule(target="DIR"),
    datamodule=ChatData("a.jsonl"))``. Then :attr:`drafter` is the trained drafter, and :meth:`save_drafter` writes it.

    Args:
        target: whose drafter it becomes.
        drafter: the design, or a preset's file.
        start: the weights to begin with: the target's where it has any, or a saved drafter's.
        loss: compares draft and target at every supervised slot.
        ttt_steps: unroll steps K; 1 is EAGLE-1's teacher forcing.
        step_weights: what the steps of a slot weigh: by depth alone, or by how well those before were drafted.
        step_keep: share of a step's slots that the next one keeps, newly drawn for every batch (conditional drop,
            https://arxiv.org/abs/2504.18583; P-EAGLE: 0.7); never less than a fifth of all, or than this share if that
            is less; 1 keeps all.
        in_vocab: train only where the draft vocabulary has the target's most likely token, as EAGLE-3 does.
        features: where the target's features come from: ``OnTheFly``, ``Cached`` by ``specdec cache``, ``Streamed``
            from separate processes, or ``Answered`` by those, which write the data's answers, too.
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
        loss: Loss = OBJECTIVE.loss,
        ttt_steps: Depth = OBJECTIVE.steps,
        step_weights: StepWeights = OBJECTIVE.weights,
        step_keep: PositiveShare = OBJECTIVE.keep,
        in_vocab: bool = OBJECTIVE.in_vocab,
        features: Features = OnTheFly(),  # noqa: B008  frozen
        noise: FeatureNoise = NoNoise(),  # noqa: B008  frozen
        train_embed: bool = False,
        train_head: bool = True,
        optimizer: OptimizerCallable = lambda p: AdamW(p),
        schedule: Schedule | LRSchedulerCallable = WarmupCosine(),  # noqa: B008  frozen
        attention: Literal["auto", "dense", "blocked", "flex"] = "auto",
        recompute: bool = OBJECTIVE.recompute,
        compile: bool = False,
    ) -> None:
        arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        check_numbers(DrafterModule.__init__, arguments, "model.")
        check_parts(arguments)
        super().__init__(
            target, drafter, start, features, train_embed, train_head, attention, compile
        )
        # for loggers; fit puts its whole config there
        self.save_hyperparameters({"model": hyperparameters(arguments)})
        self.noise = noise
        self.objective = ObjectiveConfig(
            loss, ttt_steps, step_weights, in_vocab, recompute=recompute, keep=step_keep
        )
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.metrics = StageMetrics(self.objective)
        self.nonfinite = NonFiniteSteps()
        # rows, and their losses, of the batches since the last optimizer step
        self._sums = torch.zeros(2)
        # copies of the weights before an optimizer step that is logged, until it is done
        self._weights_before: Weights | None = None
        self.objective.check(self.spec)
        if recompute:
            self.spec.drafting.check_recompute()
        start.check()
        self.target_config = (
            self.target_source.local_config() if self._target is None else self._target.config
        )
        self._check_design()

    # one training step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return a batch's unrolled loss; figures are measured on the steps that are logged."""
        trainer = self.trainer
        is_logged = self._is_logged
        output = self._run(batch, "train", is_logged)
        is_last_part = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_logged and (is_last_part or trainer.is_last_batch):
            self._log_metrics("train")
        if self._batches_per_step == 1:
            self.nonfinite.record_nonfinite(output.loss.detach(), self.global_step)
            self.log("train/loss", output.loss, prog_bar=True)
            return output.loss
        sums = torch.stack([output.weight, output.loss.detach() * output.weight])
        self._sums = self._sums.to(output.weight) + sums
        # several batches make one optimizer step: each counts by its rows; on_before_optimizer_step divides by all rows
        return output.loss * (output.weight / self._batch_tokens)

    def _run(self, batch: Batch, stage: str, measure: bool = True) -> StepOutput:
        """Run the target, add noise in training, then run the drafter's step; figures go to the stage's metrics."""
        assert self.train_step is not None and self._target is not None
        target = target_outputs(
            self._target, self.train_step.drafter, batch, self.objective, measure, self.source
        )
        if stage == "train" and not isinstance(self.noise, NoNoise):
            aux_BTNH = noisy(self.noise, target.aux_BTNH, batch, self.global_step, self.global_rank)
            target = target._replace(aux_BTNH=aux_BTNH)
        random_BT = None
        if stage == "train" and self.objective.keep < 1:
            generator = generator_of(batch, self.global_step, self.global_rank, purpose=1)
            random_BT = torch.rand(
                batch.ids_BT.shape, generator=generator, device=batch.ids_BT.device
            )
        output: StepOutput = self.train_step(batch, target, measure, random_BT)
        if output.counts is not None:
            self.metrics.of_stage(stage).update(output.counts)
        return output

    @property
    def _is_logged(self) -> bool:
        """Whether the optimizer step under way is one that is logged."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.global_step + 1) % every == 0

    @property
    def _batches_per_step(self) -> int:
        """The batches, over all processes, whose gradients Lightning averages for one optimizer step."""
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    @property
    def _batch_tokens(self) -> int:
        """The tokens of a full batch; dividing by them keeps the scaled losses near one."""
        return self._data.batch_size * self._data.seq_len

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradient that of the step, log its norm, which clipping sees next, and the learning rates, and copy
        the weights."""
        self._finish_accumulation()
        if not self._is_logged:
            return
        self.nonfinite.check_losses()
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.log_dict({"train/grad_norm": norm, **_learning_rates(optimizer)})
        assert self.drafter is not None
        self._weights_before = copied_weights(self.drafter)

    def _finish_accumulation(self) -> None:
        """Make the mean of the batches' gradients the gradient of the mean over all their rows, on all ranks; log that.

        A batch with few supervised rows counts for few; none at all leaves gradients of zero.
        """
        batches = self._batches_per_step
        if batches == 1:
            return
        if self.trainer.world_size > 1:  # Lightning's own reduction waits for all processes first
            torch.distributed.all_reduce(self._sums)
        rows, losses = self._sums
        self._sums = torch.zeros_like(self._sums)
        self.nonfinite.record_nonfinite(losses, self.global_step)
        self.log("train/loss", losses / rows.clamp(min=1e-30), prog_bar=True)
        scale = torch.where(rows > 0, batches * self._batch_tokens / rows.clamp(min=1e-30), 0.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(scale)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Let the gradients go at once; Lightning would keep them through the next forward, where memory is dearest.

        Of a step that is logged, log how far it moved each group of weights.
        """
        super().optimizer_step(*args, **kwargs)
        optimizer: torch.optim.Optimizer = args[2]
        optimizer.zero_grad()
        if self._weights_before is not None:
            assert self.drafter is not None
            updates = relative_updates(self._weights_before, self.drafter)
            self._weights_before = None
            self.log_dict({f"update/{group}": share for group, share in updates.items()})

    # validation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure the same loss and figures on held-out rows, of all together and of each source that has a name."""
        self._measure(batch, batch_idx, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As :meth:`validation_step`; the figures are named ``test/...``."""
        self._measure(batch, batch_idx, "test")

    def _measure(self, batch: Batch, batch_idx: int, stage: str) -> None:
        counts = self._run(batch, stage).counts
        source = self._data.validation_source(batch_idx)
        if counts is not None and source is not None:
            position = list(self._data.validation_sections).index(source)
            self.metrics.of_source(position).update(counts)

    def on_validation_epoch_end(self) -> None:
        """Log the loss and the figures of every depth, and those of all depths by source."""
        self._log_measures("val")

    def on_test_epoch_end(self) -> None:
        """As after a validation."""
        self._log_measures("test")

    def _log_measures(self, stage: str) -> None:
        self._log_metrics(stage)
        for position, source in enumerate(self._data.validation_sections):
            metrics = self.metrics.of_source(position)
            if metrics.update_called:  # a validation that is cut short may not come to it
                values = metrics.compute()
                self.log_dict({f"{stage}/{name}/{source}": values[name] for name in BY_SOURCE})
                metrics.reset()

    def _log_metrics(self, stage: str) -> None:
        metrics = self.metrics.of_stage(stage)
        values = metrics.compute()
        if stage == "train":
            del values["loss"]  # that of every step is logged
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()})
        metrics.reset()

    # optimizer and learning rate

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the injected optimizer over what is trainable, and the schedule over the whole run."""
        assert self.drafter is not None
        trainable = [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]
        optimizer = self.make_optimizer(trainable)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = scheduler_config(self.schedule, optimizer, self.trainer, self._data)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_train_start(self) -> None:
        """Continue at the learning rate of the current config: what is restored is the checkpoint's."""
        scheduler = self.lr_schedulers()
        if isinstance(self.schedule, Schedule) and isinstance(scheduler, LambdaLR):
            use_present_rates(scheduler, self._rates)

    @property
    def length(self) -> int | None:
        """Optimizer steps of the whole run; None where neither steps nor epochs are set."""
        return run_length(self.trainer, self._data)

    # losses and weights that are not finite

    def setup(self, stage: str) -> None:
        """Place target and drafter, and forget the losses of an earlier fit."""
        super().setup(stage)
        self._sums = torch.zeros(2)
        self.nonfinite.restart(self.trainer.strategy.root_device)

    def check_finite(self) -> None:
        """Look at the losses of all steps so far, and at the weights they have led to; every process has to ask.

        Raises:
            ValueError: one is NaN or infinite: on every process, whichever has it.
        """
        if self.drafter is None:
            self.nonfinite.check_losses()
            return
        weights = [p for p in self.drafter.parameters() if p.requires_grad]
        self.nonfinite.check_weights(weights, self.global_step, self.trainer.strategy)

    def on_validation_start(self) -> None:
        """Refuse to measure weights that are not finite."""
        self.check_finite()

    def on_test_start(self) -> None:
        """As before a validation."""
        self.check_finite()

    def on_train_end(self) -> None:
        """Refuse to end as done with weights that are not finite."""
        self.check_finite()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the drafter's config with the weights; those that are not finite leave the last checkpoint be."""
        assert self.drafter is not None
        self.check_finite()
        checkpoint["drafter_config"] = self.drafter.config.to_json()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint belongs to the drafter under training.

        Without a trainer (``DrafterModule.load_from_checkpoint(FILE)``) there is no drafter yet: then build the
        checkpoint's, for the checkpoint's target unless :attr:`target_source` is another one than the default.

        Raises:
            ValueError: the checkpoint belongs to another drafter config, target or draft vocabulary.
        """
        drafter = self.drafter
        if drafter is None:
            drafter = drafter_of_checkpoint(checkpoint)
            self.spec = drafter.config.design()
            self.train_step = TrainStep(drafter.requires_grad_(False), self.objective)
            self.is_loaded = True
            if self.target_source == TargetSource():
                trained_for = drafter.config.target
                revision = trained_for.get("revision")
                self.target_source = TargetSource(
                    str(trained_for.get("source")), None if revision is None else str(revision)
                )
            if self._target is None:
                self.target_config = self.target_source.local_config()
            if differing := other_objective(checkpoint, self.hparams):
                log.warning(
                    "the checkpoint was trained with %s: give load_from_checkpoint the same, or validate and test "
                    "measure another loss",
                    ", ".join(differing),
                )
        check_checkpoint(checkpoint, drafter)


def _learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the first group's learning rate to log, and those of groups that began with another one."""
    first, *others = optimizer.param_groups
    rates = {"train/lr": first["lr"]}
    initial_rate = first.get("initial_lr", first["lr"])
    for number, group in enumerate(others, start=1):
        if group.get("initial_lr", group["lr"]) != initial_rate:
            rates[f"train/lr_{number}"] = group["lr"]
    return {name: torch.tensor(float(rate), dtype=torch.float64) for name, rate in rates.items()}
