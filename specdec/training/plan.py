"""What a run would need and do on several processes, from its config and its target's alone: nothing is loaded.

Legend: B rows, T tokens, K unroll steps, D draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.drafter import Drafter, DrafterConfig
from specdec.target.loading import DTYPES, skeleton
from specdec.training.estimate import Estimate, estimate
from specdec.training.module import DrafterModule
from specdec.training.precision import KNOWN, precision
from specdec.training.work import FrozenModel, Work, step_work


@dataclass(frozen=True)
class Plan:
    """Arithmetic alone; bytes and operations of one process."""

    world: int
    strategy: str  # of the weights: one, ddp or fsdp2
    trainable: int
    frozen: int
    target_parameters: int
    rows: int  # of a batch
    seq_len: int
    accumulate: int
    memory: Estimate
    work: Work  # of a batch all of whose tokens are trained: the most
    reduced: int  # bytes of gradients that a process sends in an optimizer step, in a ring
    gathered: int  # bytes of weights that it is sent

    @property
    def global_rows(self) -> int:
        """Rows of an optimizer step."""
        return self.rows * self.accumulate * self.world

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.global_rows * self.seq_len

    @property
    def work_per_token(self) -> float:
        """Operations of one process for one of its tokens."""
        return self.work.total / (self.rows * self.seq_len)

    def steps_per_epoch(self, rows: int) -> int:
        """Optimizer steps that read ``rows`` rows once."""
        batches = math.ceil(math.ceil(rows / self.world) / self.rows)
        return math.ceil(batches / self.accumulate)


def plan(
    module: DrafterModule,
    rows: int,
    seq_len: int,
    world: int,
    strategy: str,
    trainer_precision: object,
    accumulate: int,
    model: PreTrainedModel | None = None,
) -> Plan:
    """Add it up.

    Args:
        trainer_precision: Lightning's.
        model: the target without weights, where it is at hand.

    Raises:
        ValueError: no such precision, the target has no config or is none, or design and target do not go together.
    """
    trained_in = precision(trainer_precision)
    if trained_in is None:
        raise ValueError(f"trainer.precision={trainer_precision}: plan knows {', '.join(KNOWN)}")
    source = module.target_source
    model = model or skeleton(source.directory(), source.revision, source.trust_remote_code)
    config = drafter_config(module, model)
    with torch.device("meta"):
        drafter = Drafter(config, torch.arange(config.draft_vocab_size, device="cpu"))
    embed, head = drafter.embed_tokens.weight.numel(), drafter.lm_head.weight.numel()
    parameters = sum(p.numel() for p in drafter.parameters())
    trainable = parameters - (0 if module.train_embed else embed) - (0 if module.train_head else head)
    dtype = trained_in.weights
    recipe, sharded = module.recipe, strategy == "fsdp2"
    wide, target_dtype = FrozenModel.of(model), DTYPES[source.dtype]
    target_parameters = sum(p.numel() for p in model.parameters())
    slots = rows * seq_len
    memory = estimate(
        config,
        parameters,
        trainable,
        rows,
        seq_len,
        recipe.steps,
        dtype=dtype,
        autocast=trained_in.autocast,
        target_bytes=target_parameters * target_dtype.itemsize,
        target_dtype=target_dtype,
        checkpointing=recipe.recompute,
        piece_bytes=recipe.piece_bytes,
        train_head=module.train_head,
        world=world,
        sharded=sharded,
        frozen_embedding=0 if module.train_embed else embed,
    )
    work = step_work(
        config,
        wide,
        rows,
        seq_len,
        recipe.steps,
        kept=slots,
        rows=slots * recipe.steps,
        teacher_rows=slots,
        whole_vocabulary=recipe.whole_vocabulary,
        train_embed=module.train_embed,
        train_head=module.train_head,
    )
    share = (world - 1) / world
    return Plan(
        world=world,
        strategy=strategy,
        trainable=trainable,
        frozen=parameters - trainable,
        target_parameters=target_parameters,
        rows=rows,
        seq_len=seq_len,
        accumulate=accumulate,
        memory=memory,
        work=work,
        # a ring sends everything but one share once for the sum and, where all want the result, once more
        reduced=int(share * trainable * dtype.itemsize * (accumulate if sharded else 2)),
        gathered=int(share * parameters * dtype.itemsize * accumulate) if sharded else 0,
    )


def drafter_config(module: DrafterModule, model: Any) -> DrafterConfig:
    """The design with a target's dimensions, from a model without weights.

    Raises:
        ValueError: design and target do not go together.
    """
    text = model.config.get_text_config(decoder=True)
    return DrafterConfig.for_target(
        module.spec,
        text,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        num_target_layers=text.num_hidden_layers,
        identity={"source": module.target_source.source},
    )
