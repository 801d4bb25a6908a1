"""Training a drafter under Lightning.

Legend: B batch, T tokens, V vocabulary.
"""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, PreNorm, choose
from specdec.embedded.source import TargetSource
from specdec.nn.mlp import SwiGLU
from specdec.nn.norm import RMSNorm
from specdec.target import Target
from specdec.training.losses import Loss, SoftCrossEntropy
from specdec.training.metrics import UnrollMetrics
from specdec.training.objective import objective, teach
from specdec.training.schedule import WarmupCosine

log = logging.getLogger(__name__)

STAGES = ("train", "val", "test")


class DrafterModule(pl.LightningModule):
    """Trains an EAGLE drafter by training-time test; the target stays outside the state dict.

    Args:
        target: whose drafter it becomes.
        drafter: the design, or a preset's file.
        loss: compares draft and target at every supervised slot.
        ttt_steps: unroll steps K; 1 is EAGLE-1's teacher forcing.
        step_decay: weight of step k is ``step_decay**k``, normalised.
        in_vocab: train only where the draft vocabulary has the target's most likely token, as EAGLE-3 does.
        train_embed: train the token embedding too, which else stays the target's.
        train_head: train the head, which starts from the target's rows; always off with ``head: target``.
        optimizer: called with the trainable parameters.
        schedule: learning rate over the run.
        compile: compile the point-wise parts with ``torch.compile``.
    """

    def __init__(
        self,
        target: TargetSource = TargetSource(),  # noqa: B008  frozen
        drafter: DrafterSpec = DrafterSpec(),  # noqa: B008  frozen
        loss: Loss = SoftCrossEntropy(),  # noqa: B008  frozen
        ttt_steps: int = 7,
        step_decay: float = 0.8,
        in_vocab: bool = True,
        train_embed: bool = False,
        train_head: bool = True,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0),
        schedule: WarmupCosine = WarmupCosine(),  # noqa: B008  frozen
        compile: bool = False,
    ) -> None:
        super().__init__()
        if ttt_steps < 1:
            raise ValueError(f"model.ttt_steps must be at least 1, not {ttt_steps}")
        if not 0 < step_decay <= 1:
            raise ValueError(f"model.step_decay must lie in (0, 1], not {step_decay}")
        self.target_source, self.spec, self.loss = target, drafter, loss
        self.ttt_steps, self.step_decay, self.in_vocab = ttt_steps, step_decay, in_vocab
        self.train_embed, self.train_head = train_embed, train_head and drafter.head == "own"
        self.make_optimizer, self.schedule, self.compile_parts = optimizer, schedule, compile
        self.drafter: Drafter | None = None
        self.metrics = torch.nn.ModuleList(UnrollMetrics(ttt_steps) for _ in STAGES)
        self._target: Target | None = None  # no nn.Module: neither saved nor trained

    @property
    def target(self) -> Target:
        """The target, loaded and proven at the first use."""
        if self._target is None:
            self._target = self.target_source.load()
            self._target.prove()
        return self._target

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, which the data modules read."""
        return self.target.tokenizer

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads on all ranks."""
        data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.batch_size * data.seq_len * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def configure_model(self) -> None:
        """Build the drafter for the target, with the draft vocabulary that the training data asks for."""
        if self.drafter is not None:
            return
        target = self.target
        config = DrafterConfig.for_target(
            self.spec,
            target.config,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            identity=target.identity,
        )
        data: TokenData = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.seq_len > target.config.max_position_embeddings:
            raise ValueError(
                f"data.seq_len {data.seq_len} exceeds the target's {target.config.max_position_embeddings} positions"
            )
        counts_V = data.supervised_counts(config.vocab_size)
        ids_D = choose(counts_V, config.draft_vocab_size, target.eos_token_ids)
        drafter = Drafter(config, ids_D)
        scale_H = target.final_norm(torch.ones(target.hidden_size, dtype=target.dtype, device=target.device))
        drafter.warm_start(target.embedding_weight(), target.head_weight(), scale_H)
        if config.hidden_size != config.target_hidden_size and not (self.train_embed and self.train_head):
            raise ValueError(
                f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: embedding and head "
                "cannot start from the target's and must be trained: set model.train_embed=true and train_head=true"
            )
        if config.head == "target":
            _check_plain_head(target)
        if self.ttt_steps > 1 and isinstance(config.recurrence, PreNorm) and not config.norms.hidden:
            log.warning("ttt_steps %d feeds un-normalised states back: their magnitude may grow", self.ttt_steps)
        drafter.embed_tokens.requires_grad_(self.train_embed)
        drafter.lm_head.requires_grad_(self.train_head)
        covered = float(counts_V[ids_D].sum() / counts_V.sum().clamp(min=1))
        trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        log.info(
            "drafter: %s trainable parameters, boundaries %s of %d, draft vocabulary %d covering %.2f %% of the text",
            f"{trainable:,}", list(config.aux_layers), config.num_target_layers, len(ids_D), 100 * covered,
        )  # fmt: skip
        if self.compile_parts:
            for module in drafter.modules():
                if isinstance(module, SwiGLU | RMSNorm):
                    module.compile()
        self.drafter = drafter

    def setup(self, stage: str) -> None:
        """Put the target beside the drafter."""
        self.target.to(self.trainer.strategy.root_device)

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
        stored, now = checkpoint.get("drafter_config"), self.drafter.config.to_json()
        if stored is None:
            raise ValueError("this checkpoint holds no drafter config: it was not written by specdec fit")
        if different := sorted(key for key in now if stored.get(key) != now[key]):
            raise ValueError(
                "the checkpoint belongs to another drafter; these differ from the present config: "
                + "; ".join(f"{key} was {stored.get(key)}, is {now[key]}" for key in different)
            )
        ids_D = checkpoint["state_dict"]["drafter.vocab.target_ids_D"]
        if not torch.equal(ids_D.cpu(), self.drafter.vocab.target_ids_D.cpu()):
            raise ValueError("the checkpoint's draft vocabulary is not the one of the present training data")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The injected optimizer over what is trainable, and the schedule over the whole run."""
        assert self.drafter is not None
        optimizer = self.make_optimizer([p for p in self.drafter.parameters() if p.requires_grad])
        total = self._total_steps()
        scheduler = self.schedule.build(optimizer, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _total_steps(self) -> int:
        # not trainer.estimated_stepping_batches, which loses the loader's state in a resumed run
        trainer, data = self.trainer, self.trainer.datamodule  # type: ignore[attr-defined]
        if trainer.max_steps > 0:
            return trainer.max_steps
        if not trainer.max_epochs or trainer.max_epochs < 0:
            raise ValueError("the learning rate's schedule needs the run's length: set trainer.max_steps or max_epochs")
        batches, limit = len(data.train_dataloader()), trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return max(1, -(-batches // trainer.accumulate_grad_batches)) * trainer.max_epochs

    def _metric(self, stage: str) -> UnrollMetrics:
        metric = self.metrics[STAGES.index(stage)]
        assert isinstance(metric, UnrollMetrics)
        return metric

    def _run(self, batch: Batch, stage: str, measure: bool = True) -> Tensor:
        assert self.drafter is not None
        teacher = teach(self.target, self.drafter, batch)
        out = objective(
            self.drafter, batch, teacher, self.loss, self.ttt_steps, self.step_decay, self.in_vocab, measure
        )
        if out.counts is not None:
            self._metric(stage).update(out.counts)
        return out.loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One unrolled loss; figures are measured on the steps that are logged."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        logged = every > 0 and (self.global_step + 1) % every == 0
        loss = self._run(batch, "train", measure=logged)
        self.log("train/loss", loss, prog_bar=True)
        if logged and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._report("train")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same loss and figures on held-out rows."""
        loss = self._run(batch, "val")
        self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.ids_BT))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation."""
        loss = self._run(batch, "test")
        self.log("test/loss", loss, sync_dist=True, batch_size=len(batch.ids_BT))

    def on_validation_epoch_end(self) -> None:
        """Report the depth figures."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report the depth figures."""
        self._report("test")

    def _report(self, stage: str) -> None:
        metric = self._metric(stage)
        self.log_dict({f"{stage}/{name}": value for name, value in metric.compute().items()})
        metric.reset()


def _check_plain_head(target: Target) -> None:
    """Raise ValueError if the target's logits are more than a matrix times the state (a bias, scale or cap)."""
    final_1TH = torch.randn(1, 4, target.hidden_size, generator=torch.Generator().manual_seed(0))
    final_1TH = final_1TH.to(device=target.device, dtype=target.dtype)
    plain_1TV = final_1TH @ target.head_weight().T
    if not torch.allclose(target.logits(final_1TH), plain_1TV, rtol=1e-2, atol=1e-2 * float(plain_1TV.abs().max())):
        raise ValueError(
            "head=target cannot be used with this target: its logits have a bias, scale or cap that EAGLE-1's drafter "
            "has no place for; use head=own"
        )
