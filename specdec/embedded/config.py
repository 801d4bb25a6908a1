"""What the embedded target is: its shape, and how it is trained."""

import math
from dataclasses import dataclass, field, fields

from specdec.host import multiplies_bfloat16

SMALLEST_VOCABULARY = 2 + 256  # the special tokens and every byte
PRECISIONS = ("bf16-mixed", "32-true")


def native_precision() -> str:
    """``bf16-mixed`` where this CPU multiplies bfloat16 matrices in hardware, ``32-true`` elsewhere."""
    return "bf16-mixed" if multiplies_bfloat16() else "32-true"


@dataclass(frozen=True)
class EmbeddedConfig:
    """A small Llama and its training, complete: with the corpus, the versions and what the CPU multiplies it determines
    the weights.

    Args:
        vocab_size: tokens of the tokenizer.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        heads: attention heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of a head, even.
        intermediate: width of the MLP.
        max_position_embeddings: positions the model accepts; it is trained on the first ``seq_len`` of them.
        seq_len: tokens of a training row.
        batch_size: rows of a training step.
        tokens: training budget in tokens, rounded down to whole steps.
        lr: peak learning rate of the layers' matrices, trained with Muon.
        lr_rest: peak learning rate of embedding, head and norms, trained with AdamW.
        warmup: share of the steps with a rising learning rate; it falls linearly to zero afterwards.
        seed: of the split of the corpus, the initial weights and the order of rows.
        precision: ``bf16-mixed`` or ``32-true``; by default what this CPU is fast at.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    max_position_embeddings: int = 2048
    seq_len: int = 256
    batch_size: int = 8
    tokens: int = 780_000
    lr: float = 3e-3
    lr_rest: float = 1e-2
    warmup: float = 0.03
    seed: int = 0
    precision: str = field(default_factory=native_precision)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type is int and one.name != "seed" and value < 1:
                raise ValueError(f"{one.name} is {value}: it must be at least 1")
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: byte-level BPE needs at least {SMALLEST_VOCABULARY}, "
                "every byte and two special tokens"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of kv_heads, which is {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions need an even number")
        if self.seq_len > self.max_position_embeddings:
            raise ValueError(
                f"seq_len is {self.seq_len}: it must not exceed max_position_embeddings, "
                f"which is {self.max_position_embeddings}"
            )
        if self.tokens < self.tokens_per_step:
            raise ValueError(
                f"tokens is {self.tokens}: one step takes batch_size x seq_len = {self.tokens_per_step} tokens"
            )
        for name, rate in (("lr", self.lr), ("lr_rest", self.lr_rest)):
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} is {rate}: it must be a positive number")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}: it is a share of the steps, from 0 to below 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}: it must lie from 0 to 2**32 - 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}: choose one of {', '.join(PRECISIONS)}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step learns from."""
        return self.batch_size * self.seq_len

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.tokens // self.tokens_per_step
