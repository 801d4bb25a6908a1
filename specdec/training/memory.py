"""Says what training will need of memory, before its first step."""

from collections.abc import Iterable

import lightning.pytorch as pl
import torch

from specdec.training.estimate import Estimate, estimate, module_bytes, report
from specdec.training.module import DrafterModule
from specdec.training.precision import precision
from specdec.training.sharding import is_sharded


def expected(trainer: pl.Trainer, module: DrafterModule) -> Estimate:
    """The estimate for a trainer that is about to start."""
    drafter, data, recipe = module.drafter, trainer.datamodule, module.recipe  # type: ignore[attr-defined]
    assert drafter is not None

    trained_in = precision(trainer.precision)

    def size(parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(p.numel() for p in parameters)

    return estimate(
        drafter.config,
        size(drafter.parameters()),
        size(p for p in drafter.parameters() if p.requires_grad),
        data.batch_size,
        data.seq_len,
        recipe.steps,
        dtype=drafter.lm_head.weight.dtype,
        autocast=trained_in.autocast if trained_in else None,
        target_bytes=module_bytes(module.target.model),
        target_dtype=module.target.dtype,
        checkpointing=recipe.recompute,
        piece_bytes=recipe.piece_bytes,
        train_head=module.train_head,
        world=trainer.world_size,
        sharded=is_sharded(trainer),
        frozen_embedding=0 if module.train_embed else drafter.embed_tokens.weight.numel(),
    )


class MemoryEstimate(pl.Callback):
    """Logs :func:`expected`, and warns where there is less."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drafter and target stand on their device by now."""
        assert isinstance(pl_module, DrafterModule)
        if trainer.is_global_zero:
            report(expected(trainer, pl_module), trainer.strategy.root_device)
