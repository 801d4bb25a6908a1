"""Training of the embedded target: next-token prediction on the CPU, Muon with AdamW, linear warm-up and decay.

Legend: B rows of a batch, T tokens, R all rows.
"""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.embedded.build import EmbeddedConfig
from specdec.nn.optimizers import MuonAdamW
from specdec.utils.progress import progress

EMBEDDING_STD = 0.2  # the embedding must not drown in what the layers add
HELD_OUT_TOKENS = 65_536  # how much of the held-out text is scored


class Pretrained(NamedTuple):
    """A trained model."""

    model: LlamaForCausalLM
    held_out_loss: float
    """Mean cross-entropy on held-out text, nats per token."""
    seconds: float
    """Wall time of the optimiser steps."""


def llama(config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32; the weights depend on ``config.seed`` alone, the global generator stays put."""
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        attn_implementation="eager",  # on CPUs its training is a fifth faster than with SDPA
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(shape)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    for layer in model.model.layers:  # every layer starts as the identity, which shortens training by far
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def pretrain(
    config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast, train_RT: Tensor, held_out_RT: Tensor
) -> Pretrained:
    """Train a model on ``config.steps`` batches of rows, then score it on held-out rows.

    Args:
        config: shape and training.
        tokenizer: for the ids of ``<s>`` and ``</s>``.
        train_RT: int64 rows, as :func:`specdec.embedded.corpus.stream_rows` cuts them; all are read in random order,
            then all again in another.
        held_out_RT: rows that are only scored; about :data:`HELD_OUT_TOKENS` tokens of them, evenly spaced.
    """
    model = llama(config, tokenizer).train()
    rising = math.ceil(config.warmup * config.steps)
    optimizer = MuonAdamW(model.named_parameters(), lr=config.lr, lr_rest=config.lr_rest)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / rising if step < rising else (config.steps - step) / (config.steps - rising),
    )

    def loss(rows_BT: Tensor) -> Tensor:
        """Mean cross-entropy of a row's tokens after its first; a float32 scalar."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.precision == "bf16-mixed"):
            logits_BTV = model(rows_BT[:, :-1], use_cache=False).logits
        return cross_entropy(logits_BTV.flatten(0, 1).float(), rows_BT[:, 1:].flatten())

    started = time.monotonic()
    with progress("pretraining", "tokens", config.steps * config.tokens_per_step) as done:
        for rows_BT in train_RT[_order(len(train_RT), config)]:
            optimizer.zero_grad()
            loss(rows_BT).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done(config.tokens_per_step)
    seconds = time.monotonic() - started
    model.eval()
    count = min(len(held_out_RT), max(1, HELD_OUT_TOKENS // config.seq_len))
    scored_RT = held_out_RT[torch.arange(count) * len(held_out_RT) // count]
    with torch.inference_mode():
        total = sum(float(loss(rows_BT)) * len(rows_BT) for rows_BT in scored_RT.split(config.batch_size))
    return Pretrained(model, total / count, seconds)


def _order(rows: int, config: EmbeddedConfig) -> Tensor:
    """Numbers of the rows of every batch, int64 (steps, B)."""
    generator, wanted = torch.Generator().manual_seed(config.seed), config.steps * config.batch_size
    passes = -(-wanted // rows)
    order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])[:wanted]
    return order.view(config.steps, config.batch_size)
