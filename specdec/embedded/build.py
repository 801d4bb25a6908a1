"""The embedded target on disk: built once, cached by everything that determines it, checked whenever it is used."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import shutil
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec import __version__
from specdec.embedded.corpus import Corpus, corpus, stream_rows, train_tokenizer
from specdec.utils.files import cache_directory, locked, read_json, sha256, staged_directory, write_json
from specdec.utils.machine import multiplies_bfloat16, provenance
from specdec.utils.progress import no_progress_bars

log = logging.getLogger(__name__)

RECORD = "embedded.json"
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
            if one.type is int and one.name != "seed" and getattr(self, one.name) < 1:
                raise ValueError(f"{one.name} is {getattr(self, one.name)}: it must be at least 1")
        for name, good, wanted in (
            (
                "vocab_size",
                self.vocab_size >= SMALLEST_VOCABULARY,
                f"at least {SMALLEST_VOCABULARY}, all bytes and two",
            ),
            ("heads", self.heads % self.kv_heads == 0, f"a multiple of kv_heads, which is {self.kv_heads}"),
            ("head_dim", self.head_dim % 2 == 0, "even, for rotary positions"),
            ("seq_len", self.seq_len <= self.max_position_embeddings, "at most max_position_embeddings"),
            ("tokens", self.tokens >= self.tokens_per_step, f"at least one step's, {self.tokens_per_step}"),
            ("lr", 0 < self.lr < math.inf, "a positive number"),
            ("lr_rest", 0 < self.lr_rest < math.inf, "a positive number"),
            ("warmup", 0 <= self.warmup < 1, "a share of the steps, from 0 to below 1"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")

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
    ``embedded.json``: configuration, corpus, versions, held-out loss, time. A damaged directory is built anew.
    Processes that ask at the same time wait for one of them to build.

    Args:
        config: shape and training.
        cache_dir: by default :func:`cache_directory`.

    Raises:
        ValueError: Python has no library sources, the cache may not be written, or the disk is full.
    """
    sources = corpus(config.seed)
    determinants = {
        "config": dataclasses.asdict(config),
        "corpus": hashlib.sha256(json.dumps(sources.record()).encode()).hexdigest(),
        "bfloat16": multiplies_bfloat16(),
        "python": platform.python_version(),
        "specdec": __version__,
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")},
    }
    key = hashlib.sha256(json.dumps(determinants, sort_keys=True).encode()).hexdigest()[:16]
    path = (cache_directory() if cache_dir is None else cache_dir) / f"embedded-{key}"
    if _whole(path):
        return path
    with locked(path.with_name(path.name + ".lock")):
        if not _whole(path):  # unless another process was first
            with staged_directory(path, replace=True) as staging:
                _build(config, sources, determinants, staging)
    return path


def read_record(path: Path) -> dict[str, Any]:
    """The ``embedded.json`` of an embedded target.

    Raises:
        ValueError: it is missing or not JSON.
    """
    return read_json(path / RECORD)


@dataclass(frozen=True)
class PretrainConfig(EmbeddedConfig):
    """The options of ``specdec pretrain``: an :class:`EmbeddedConfig`, and where to.

    Args:
        out: copy the model here, beside the cache.
    """

    out: Path | None = None


def build_target(config: PretrainConfig) -> None:
    """Train a small Llama on the Python standard library's sources, with no download, and say how good it is.

    Example: specdec pretrain --num_layers 2 --out runs/assistant

    Raises:
        ValueError: a number is out of range, ``--out`` exists or may not be written, or there is no corpus.
    """
    target = EmbeddedConfig(**{one.name: getattr(config, one.name) for one in fields(EmbeddedConfig)})
    if config.out is None:
        path = embedded_target(target)
    else:
        path = config.out
        with staged_directory(path) as staging:  # before the training: it refuses a place that will not do
            shutil.copytree(embedded_target(target), staging, dirs_exist_ok=True)
    record = read_record(path)
    text = f"{path}: held-out loss {record['held_out_loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s"
    Console().print(text, soft_wrap=True, markup=False, highlight=False)


def _whole(path: Path) -> bool:
    """Whether ``path`` holds every file it was built with, unchanged."""
    if not path.exists():
        return False
    try:
        files = read_record(path)["files"]
        damaged = [name for name, digest in files.items() if sha256(path / name) != digest]
    except (ValueError, KeyError, OSError) as error:
        log.warning("%s is damaged and will be built anew: %s", path, error)
        return False
    if damaged:
        log.warning("%s is damaged and will be built anew: %s changed", path, ", ".join(damaged))
    return not damaged


def _build(config: EmbeddedConfig, sources: Corpus, determinants: dict[str, Any], path: Path) -> None:
    from specdec.embedded.pretrain import pretrain  # takes seconds, and a cached target needs none of it

    started, started_cpu = time.monotonic(), time.process_time()
    log.info("building the embedded target, %s tokens in %s", f"{config.tokens:,}", config.precision)
    texts, held_out_texts = ([source.text for source in part] for part in sources)
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    train_RT = stream_rows(tokenizer, texts, config.seq_len)
    trained = pretrain(config, tokenizer, train_RT, stream_rows(tokenizer, held_out_texts, config.seq_len))
    tokenizer.save_pretrained(path)
    with no_progress_bars():
        trained.model.save_pretrained(path)
    for file in path.iterdir():
        file.chmod(0o644)  # safetensors makes its file for the owner alone
    tokens = config.steps * config.tokens_per_step
    record = {
        "config": dataclasses.asdict(config),
        "held_out_loss": trained.held_out_loss,
        "tokens": tokens,
        "tokens_per_second": tokens / trained.seconds,
        "parameters": trained.model.num_parameters(),
        "files": {file.name: sha256(file) for file in sorted(path.iterdir())},
        "provenance": provenance(seed=config.seed),
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - started_cpu,
        "determinants": determinants,
        "corpus": sources.record(),
    }
    write_json(path / RECORD, record)
    log.info("built the embedded target: held-out loss %.3f after %.0f s", trained.held_out_loss, record["seconds"])
