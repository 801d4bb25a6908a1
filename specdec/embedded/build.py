"""The embedded target on disk: built once, cached by everything that determines it, checked whenever it is used."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import Corpus, corpus
from specdec.files import read_json, sha256, staged_directory, write_json
from specdec.host import multiplies_bfloat16
from specdec.provenance import provenance
from specdec.shared import cache_directory, locked

if TYPE_CHECKING:
    from specdec.embedded.pretrain import Pretrained

log = logging.getLogger(__name__)

RECORD = "embedded.json"
DEFAULT = EmbeddedConfig()
# modules whose code determines the weights
_RECIPE = ("embedded/corpus", "embedded/pretrain", "embedded/rows", "embedded/tokenizer", "optimizers")


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
    determinants = _determinants(config, sources)
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


def _determinants(config: EmbeddedConfig, sources: Corpus) -> dict[str, Any]:
    package = Path(__file__).parents[1]
    return {
        "config": dataclasses.asdict(config),
        "corpus": hashlib.sha256(json.dumps(sources.record()).encode()).hexdigest(),
        "recipe": {name: sha256(package / f"{name}.py") for name in _RECIPE},
        "bfloat16": multiplies_bfloat16(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "torch", "transformers")},
    }


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
    # Imported here: a cached target needs none of these, and they take seconds.
    from specdec.embedded.pretrain import pretrain
    from specdec.embedded.rows import stream_rows
    from specdec.embedded.tokenizer import train_tokenizer

    started, started_cpu = time.monotonic(), time.process_time()
    log.info("building the embedded target, %s tokens in %s", f"{config.tokens:,}", config.precision)
    texts, held_out_texts = ([source.text for source in part] for part in sources)
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    train_RT = stream_rows(tokenizer, texts, config.seq_len)
    held_out_RT = stream_rows(tokenizer, held_out_texts, config.seq_len)
    trained = pretrain(config, tokenizer, train_RT, held_out_RT)
    seconds = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - started_cpu}
    save_target(path, config, tokenizer, trained, seconds | {"determinants": determinants, "corpus": sources.record()})
    log.info("built the embedded target: held-out loss %.3f after %.0f s", trained.held_out_loss, seconds["seconds"])


def save_target(
    path: Path, config: EmbeddedConfig, tokenizer: Any, trained: "Pretrained", more: dict[str, Any]
) -> None:
    """Write what Hugging Face needs, and ``embedded.json`` with ``more`` in it, into an existing directory."""
    from specdec.target.loading import no_progress_bars

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
        **more,
    }
    write_json(path / RECORD, record)


def copy_target(source: Path, destination: Path) -> None:
    """Copy an embedded target into the existing directory ``destination``."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
