"""Tokenised conversations on disk, kept by everything that determines them and checked whenever they are read."""

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdec.data.chat import Encoded
from specdec.data.packing import Document
from specdec.data.rows import HUB, find_sources, hub_fingerprint
from specdec.utils.files import cache_directory, locked, read_json, sha256, staged_directory, write_json

log = logging.getLogger(__name__)

VERSION = 1  # raise it whenever a change of this package gives other tokens or masks
TOKENS, RECORD = "tokens.safetensors", "tokens.json"


def determinants(
    patterns: str | Sequence[str], layout: str | None, broken: str, tokenizer: Any, max_length: int
) -> dict[str, Any]:
    """Whatever can change the tokens: the sources' content, the tokenizer, its template, and versions.

    Raises:
        ValueError: a source is missing or unreadable.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return {
        "version": VERSION,
        "sources": [_content(source) for source in find_sources(patterns)],
        "layout": layout,
        "broken": broken,
        "max_length": max_length,
        "tokenizer": _hash([backend, tokenizer.special_tokens_map]),
        "template": _hash(tokenizer.chat_template),
        **{name: importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")},
    }


def cached(found: dict[str, Any], make: Callable[[], Encoded]) -> Encoded:
    """What was kept under these determinants, or what ``make`` gives, which is kept from now on.

    Processes that ask at the same time wait for one of them to make it. A damaged entry is made anew.

    Raises:
        ValueError: the cache may not be written, or the disk is full.
    """
    path = cache_directory() / "tokens" / _hash(found)[:16]
    if (kept := _read(path)) is not None:
        return kept
    try:
        with locked(path.with_name(path.name + ".lock")):
            if (kept := _read(path)) is not None:  # another process may have been first
                return kept
            encoded = make()
            with staged_directory(path, replace=True) as staging:
                _write(staging, encoded, found)
    except ValueError as error:
        if str(error).startswith(str(path.parent.parent)):
            raise ValueError(f"{error}; choose another place with SPECDEC_CACHE, or --data.cache false") from error
        raise
    log.info("%d conversations as tokens are kept in %s", len(encoded.documents), path)
    return encoded


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _content(source: str) -> list[str]:
    """What is read, wherever it lies: kind and hash."""
    if source.startswith(HUB):
        return ["hub", hub_fingerprint(source)]
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return ["saved", _hash([[str(file.relative_to(path)), sha256(file)] for file in files])]
    return [path.suffix.lower(), sha256(path)]


def _write(path: Path, encoded: Encoded, found: dict[str, Any]) -> None:
    ids, masks = (list(column) for column in zip(*encoded.documents, strict=True))
    tensors = {
        "ids": torch.cat(ids).int(),
        "loss_mask": torch.cat(masks),
        "sizes": torch.tensor([len(ids_T) for ids_T in ids]),
        "lengths": encoded.lengths_N.contiguous(),
        "supervised": encoded.supervised_N.contiguous(),
    }
    save_file(tensors, path / TOKENS)
    write_json(path / RECORD, {"sha256": sha256(path / TOKENS), "left_out": encoded.left_out, "determinants": found})


def _read(path: Path) -> Encoded | None:
    """The entry; None if there is none, or none that is whole."""
    if not path.exists():
        return None
    try:
        record = read_json(path / RECORD)
        if sha256(path / TOKENS) != record["sha256"]:
            raise ValueError(f"{path / TOKENS}: has changed since it was written")
        tensors = load_file(path / TOKENS)
        sizes = tensors["sizes"].tolist()
        columns = (tensors["ids"].long().split(sizes), tensors["loss_mask"].split(sizes))
        documents = [Document(*pair) for pair in zip(*columns, strict=True)]
        encoded = Encoded(documents, tensors["lengths"], tensors["supervised"], record["left_out"])
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        log.warning("%s is damaged and will be made anew: %s", path, " ".join(str(error).split()))
        return None
    log.info("%d conversations as tokens come from %s", len(documents), path)
    return encoded
