"""The embedded target: a small Llama, trained on the CPU with Muon and AdamW, built once and kept in the cache.

Legend: B rows of a batch, T tokens, R all rows.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec import __version__
from specdec.embedded.corpus import SEED, Corpus, corpus, stream_rows, train_tokenizer
from specdec.nn.optimizers import MuonAdamW
from specdec.utils.files import cache_directory, locked, staged_directory, write_json
from specdec.utils.machine import multiplies_bfloat16, provenance
from specdec.utils.progress import progress

log = logging.getLogger(__name__)

RECORD = "embedded.json"
EMBEDDING_STD = 0.2  # the embedding must not drown in what the layers add
HELD_OUT_TOKENS = 65_536  # how much of the held-out text is scored

Precision = Literal["bf16-mixed", "32-true"]


def native_precision() -> Precision:
    """``bf16-mixed`` where this CPU multiplies bfloat16 matrices in hardware, ``32-true`` elsewhere."""
    return "bf16-mixed" if multiplies_bfloat16() else "32-true"


@dataclass(frozen=True)
class EmbeddedConfig:
    """A small Llama and its training: with the corpus, the versions and what the CPU multiplies, it determines
    the weights."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    max_position_embeddings: int = 2048  # it is trained on the first seq_len of them
    seq_len: int = 256  # tokens of a training row
    batch_size: int = 8
    tokens: int = 780_000  # to train on, rounded down to whole steps
    lr: float = 3e-3  # peak learning rate of the layers' matrices, trained with Muon
    lr_rest: float = 1e-2  # of embedding, head and norms, trained with AdamW
    warmup: float = 0.03  # share of the steps with a rising learning rate; it falls linearly to zero afterwards
    seed: int = SEED  # of the split of the corpus, the initial weights and the order of rows
    precision: Precision = field(default_factory=native_precision)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step learns from."""
        return self.batch_size * self.seq_len

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.tokens // self.tokens_per_step


DEFAULT = EmbeddedConfig()


def embedded_target(config: EmbeddedConfig = DEFAULT, cache_dir: Path | None = None) -> Path:
    """The directory of a small Llama trained on the standard library, which is built now unless it is cached.

    The directory holds what Hugging Face needs (config, generation config, float32 safetensors, tokenizer) and
    ``embedded.json``: configuration, versions, held-out loss, speed. Processes that ask at the same time wait for one
    of them to build.

    Args:
        config: shape and training.
        cache_dir: by default :func:`cache_directory`.

    Raises:
        ValueError: Python has no library sources, the cache may not be written, or the disk is full.
    """
    sources = corpus(config.seed)
    determinants = {
        "config": dataclasses.asdict(config),
        "corpus": sources.sha256,
        "bfloat16": multiplies_bfloat16(),
        "python": platform.python_version(),
        "specdec": __version__,
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")},
    }
    key = hashlib.sha256(json.dumps(determinants, sort_keys=True).encode()).hexdigest()[:16]
    path = (cache_directory() if cache_dir is None else cache_dir) / f"embedded-{key}"
    if path.exists():
        return path
    with locked(path.with_name(path.name + ".lock")):
        if not path.exists():  # unless another process was first
            with staged_directory(path) as staging:
                _build(config, sources, determinants, staging)
    return path


def _build(config: EmbeddedConfig, sources: Corpus, determinants: dict[str, Any], path: Path) -> None:
    log.info("building the embedded target, %s tokens in %s", f"{config.tokens:,}", config.precision)
    texts, held_out_texts = ([source.text for source in part] for part in sources)
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    train_RT = stream_rows(tokenizer, texts, config.seq_len)
    held_out_RT = stream_rows(tokenizer, held_out_texts, config.seq_len)
    model, held_out_loss, seconds = pretrain(config, tokenizer, train_RT, held_out_RT)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    tokens = config.steps * config.tokens_per_step
    record = {
        **determinants,
        "held_out_loss": held_out_loss,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "parameters": model.num_parameters(),
        "provenance": provenance(seed=config.seed),
    }
    write_json(path / RECORD, record)
    log.info("built the embedded target: held-out loss %.3f after %.0f s", held_out_loss, seconds)


def llama(config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32; the weights depend on ``config.seed`` alone, the global generator stays put."""
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        intermediate_size=config.intermediate, max_position_embeddings=config.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        attn_implementation="eager",  # on CPUs its training is a fifth faster than with SDPA
    )  # fmt: skip
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
) -> tuple[LlamaForCausalLM, float, float]:
    """Train a model on ``config.steps`` batches of rows, then score it on held-out rows.

    Args:
        config: shape and training.
        tokenizer: for the ids of ``<s>`` and ``</s>``.
        train_RT: int64 rows, as :func:`specdec.embedded.corpus.stream_rows` cuts them; all are read in random order,
            then all again in another.
        held_out_RT: rows that are only scored; about :data:`HELD_OUT_TOKENS` tokens of them, evenly spaced.

    Returns:
        The model; its mean cross-entropy on held-out text, in nats per token; seconds that the steps took.
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

    generator, wanted = torch.Generator().manual_seed(config.seed), config.steps * config.batch_size
    passes = -(-wanted // len(train_RT))
    order = torch.cat([torch.randperm(len(train_RT), generator=generator) for _ in range(passes)])[:wanted]
    started = time.monotonic()
    with progress("pretraining", "tokens", config.steps * config.tokens_per_step) as done:
        for rows_BT in train_RT[order.view(config.steps, config.batch_size)]:
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
    return model, total / count, seconds
