"""Content addresses: a hash of what decides a job's numbers, so that what is there is never made again.

A fit's key has its whole config but the settings that have no say in numbers (logging, validation, checkpoints, where
things lie; :func:`specdec.training.run_directory.changes_numbers`), what the names in it stand for (target, data, a
drafter to start from), the seed, and the code. A measure's key has its fit's, its settings, the prompts and the code.
The code is specdec's version and git commit, and the versions of Python and the libraries; a checkout with changes
counts as code of its own, whatever the changes are. Neither has an arm's name, threads, or the machine.
"""

import functools
import glob
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from specdec.data.rows import HUB, hub_fingerprint
from specdec.studies.arms import Arm
from specdec.target import TargetSource
from specdec.training.run_directory import changes_numbers
from specdec.utils import imports
from specdec.utils.config import canonical
from specdec.utils.files import sha256
from specdec.utils.machine import provenance

DIGITS = 16  # of a key, hexadecimal
LIBRARIES = ("specdec", "torch", "lightning", "transformers", "tokenizers")
OF_A_TARGET = (".safetensors", ".json", ".jinja", ".model", ".py")  # weights, configuration, tokenizer, code


def key_of(kind: str, decisive: Any) -> str:
    """The address of a job of this kind, of what decides its numbers."""
    modules = {}
    for name in imports.flags()[1].split(",") if imports.flags() else []:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, f"{name} has been imported"
        file = Path(found.origin)
        modules[name] = contents(str(file.parent if file.name == "__init__.py" else file))
    return digest([kind, decisive, code(), modules])[:DIGITS]


@functools.cache
def code() -> dict[str, Any]:
    """Which code runs, Python included, of whose library the embedded data is."""
    found = provenance()
    versions = {name: found["versions"][name] for name in LIBRARIES}
    return {name: found[name] for name in ("git_commit", "git_dirty", "python")} | {"versions": versions}


def digest(value: Any) -> str:
    """SHA-256, hexadecimal, of JSON-able data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def fit_decisive(arm: Arm, features: str, seed: int) -> Any:
    """What decides the numbers of a fit.

    Args:
        features: ``cached`` or ``on_the_fly``: the numbers are equal up to rounding, not always to the last bit.

    Raises:
        ValueError: a file that the config names cannot be read.
    """
    config = _decisive(canonical(arm.config))
    model = {**config["model"], "target": target_contents(arm.target), "start": contents(config["model"]["start"])}
    if features == "cached":
        model["features"] = features
    return {**config, "model": model, "data": contents(config["data"]), "seed": seed}


@functools.lru_cache(maxsize=16)
def target_contents(source: TargetSource) -> Any:
    """Which model it is: hashes of a directory's weights, configuration and tokenizer, or the commit of a Hub id.

    The dtype belongs to it, for it decides numbers; where its layers lie does not.

    Raises:
        ValueError: it cannot be read.
    """
    place = Path(source.directory())
    if place.is_dir():
        files = [file for file in sorted(place.iterdir()) if file.suffix in OF_A_TARGET]
        return [source.dtype, {file.name: _file_hash(file) for file in files}]
    found = try_to_load_from_cache(source.source, "config.json", revision=source.revision)
    commit = Path(found).parent.name if isinstance(found, str) else source.revision
    return [source.dtype, source.source, commit]


def contents(value: Any) -> Any:
    """A config's group with every name of files, directories and Hub data replaced by what they hold.

    Raises:
        ValueError: a file cannot be read.
    """
    if isinstance(value, dict):
        return {key: contents(child) for key, child in value.items()}
    if isinstance(value, list):
        return [contents(child) for child in value]
    if not isinstance(value, str):
        return value
    if value.startswith(HUB):
        return [value, hub_fingerprint(value)]
    path = Path(value)
    if path.is_file():
        return [path.suffix, _file_hash(path)]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return [[file.relative_to(path).as_posix(), _file_hash(file)] for file in files]
    if glob.has_magic(value) and (found := sorted(glob.glob(value, recursive=True))):
        return [contents(file) for file in found if Path(file).is_file()]
    return value


def _decisive(value: Any, key: str = "") -> Any:
    """Without the settings that change no number; ``init_args`` does not count in their names."""
    if not isinstance(value, dict):
        return value
    inner = {name: key if name == "init_args" else f"{key}.{name}" if key else name for name in value}
    return {name: _decisive(child, inner[name]) for name, child in value.items()
            if name == "init_args" or changes_numbers(inner[name])}  # fmt: skip


def _file_hash(path: Path) -> str:
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _hash_of(path: Path, size: int, changed: int) -> str:
    """Once for every state of a file."""
    return sha256(path)
