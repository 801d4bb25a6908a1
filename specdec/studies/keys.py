"""The key of a job: a hash of what decides its numbers, so that no job is run twice.

Of a fit that is its config without settings that change no number
(:func:`specdec.training.run_directory.decisive_settings`), the contents of target, data and start, the seed, and the
code: versions, git commit, whether the checkout has changes, and the files of the package. Of a measure it is its fit's
key, its settings, the prompts and the code. Names of arms, threads and the machine do not count.
"""

import dataclasses
import functools
import glob
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from specdec.data.rows import HUB, hub_fingerprint
from specdec.studies.arms import Arm
from specdec.target import TargetSource
from specdec.training.run_directory import decisive_settings
from specdec.utils.config import normalize_config
from specdec.utils.machine import allowed_modules, code_version
from specdec.utils.reading import digest, sha256

DIGITS = 16  # of a key, hexadecimal
# weights, configuration, tokenizer, code
OF_A_TARGET = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".py")


def key_of(kind: str, decisive: Any) -> str:
    """The key of a job, from its kind and what decides its numbers."""
    return digest([kind, decisive, code_version(), allowed_modules()])[:DIGITS]


def fit_decisive(arm: Arm, features: str) -> dict[str, Any]:
    """Return what decides, with its seed, the numbers of a fit to the last bit, whether features are ``cached`` or
    ``on_the_fly`` included."""
    config = decisive_settings(normalize_config(arm.config))
    model = {
        **config["model"],
        "target": target_contents(arm.target),
        "start": content_hashes(config["model"]["start"]),
    }
    if features == "cached":
        model["features"] = features
    return {**config, "model": model, "data": content_hashes(config["data"])}


@functools.lru_cache(maxsize=16)
def target_contents(source: TargetSource) -> Any:
    """The model's dtype, and hashes of its weights, configuration and tokenizer on disk, or a Hub id's commit."""
    if source.adapter is not None:
        alone = dataclasses.replace(source, adapter=None)
        return [
            target_contents(alone),
            target_contents(dataclasses.replace(alone, source=source.adapter)),
        ]
    place = Path(source.directory())
    if place.exists():
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        return [
            source.dtype,
            {file.name: _file_hash(file) for file in files if file.suffix in OF_A_TARGET},
        ]
    cached = try_to_load_from_cache(source.source, "config.json", revision=source.revision)
    commit = Path(cached).parent.name if isinstance(cached, str) else source.revision
    return [source.dtype, source.source, commit]


def content_hashes(value: Any) -> Any:
    """A config's group with every name of files, directories and Hub data replaced by hashes of what they hold."""
    if isinstance(value, dict):
        return {key: content_hashes(child) for key, child in value.items()}
    if isinstance(value, list):
        return [content_hashes(child) for child in value]
    if not isinstance(value, str):
        return value
    if value.startswith(HUB):
        return [value, hub_fingerprint(value)]
    path = Path(value)
    if path.is_file():
        return [path.suffix, _file_hash(path)]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts
        )
        return [[file.relative_to(path).as_posix(), _file_hash(file)] for file in files]
    if glob.has_magic(value) and (matches := sorted(glob.glob(value, recursive=True))):
        return [content_hashes(file) for file in matches if Path(file).is_file()]
    return value


def _file_hash(path: Path) -> str:
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _hash_of(path: Path, size: int, changed: int) -> str:
    """Hash every state of a file once."""
    return sha256(path)
