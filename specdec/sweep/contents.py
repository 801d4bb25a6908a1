"""What names in a config stand for: the contents of data files, directories and targets, wherever they lie."""

import functools
import glob
import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from specdec.data.hub import PREFIX, hub_fingerprint
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import corpus
from specdec.embedded.source import TargetSource
from specdec.files import sha256
from specdec.target.loading import TOKENIZER_FILES
from specdec.values import is_part

OF_A_TARGET = (
    "config.json", "model.safetensors.index.json", "chat_template.jinja", "special_tokens_map.json", *TOKENIZER_FILES,
)  # fmt: skip


def digest(value: Any) -> str:
    """SHA-256, hexadecimal, of JSON-able data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@functools.lru_cache(maxsize=16)
def target_contents(source: TargetSource) -> Any:
    """Which model it is: hashes of a directory's weights, configuration and tokenizer, or the commit of a Hub id.

    The dtype belongs to it, for it decides numbers; where its layers lie does not.

    Raises:
        ValueError: it cannot be read.
    """
    place = Path(source.directory())
    if place.is_dir():
        files = [file for file in sorted(place.iterdir()) if file.name in OF_A_TARGET or file.suffix == ".safetensors"]
        files += sorted(place.glob("*.py")) if source.trust_remote_code else []
        return [source.dtype, {file.name: _sha256(file, *_stamp(file)) for file in files}]
    found = try_to_load_from_cache(source.source, "config.json", revision=source.revision)
    commit = Path(found).parent.name if isinstance(found, str) else source.revision
    return [source.dtype, source.source, commit]


def contents(value: Any) -> Any:
    """A config's group with every name of files, directories and Hub data replaced by what they hold.

    Raises:
        ValueError: a file cannot be read.
    """
    if is_part(value) and value["class_path"].rpartition(".")[2] == "EmbeddedData":
        return {**value, "corpus": _corpus()}
    if isinstance(value, dict):
        return {key: contents(child) for key, child in value.items()}
    if isinstance(value, list):
        return [contents(child) for child in value]
    return _held(value) if isinstance(value, str) else value


def _held(name: str) -> Any:
    if name.startswith(PREFIX):
        return [name, hub_fingerprint(name)]
    path = Path(name)
    if path.is_file():
        return [path.suffix, _sha256(path, *_stamp(path))]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return [[file.relative_to(path).as_posix(), _sha256(file, *_stamp(file))] for file in files]
    if glob.has_magic(name) and (found := sorted(glob.glob(name, recursive=True))):
        return [_held(file) for file in found if Path(file).is_file()]
    return name


@functools.cache
def _corpus() -> str:
    return digest(corpus(EmbeddedConfig().seed).record())


@functools.lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
