"""A checkpoint's files, as this and other repositories publish them. Nothing in them is run."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.export.tensors import canonical
from specdec.utils.files import SUMS, check_sums, explain, read_json, sha256

OURS, FORMAT = "specdec.json", "specdec-export"
CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
WANTED = (CONFIG, OURS, "*.safetensors", "*.safetensors.index.json")  # of a repository on the Hub
# a file of a stranger may be anything, and so may what its reader stumbles over
UNREADABLE = (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError, AttributeError)
PICKLED = ("*.bin", "*.bin.index.json")


class Checkpoint(NamedTuple):
    """What a directory holds."""

    where: str
    raw: dict[str, Any]  # ``config.json``
    tensors: dict[str, Tensor]  # by name, see :func:`specdec.export.tensors.canonical`
    ours: dict[str, Any] | None  # ``specdec.json``, which only our own exports have


def check_unchanged(directory: Path) -> None:
    """Compare an export's files with their hashes, where it has any.

    Raises:
        ValueError: a bit of it is not as it was written; the message names the file.
    """
    if (directory / SUMS).exists():
        check_sums(directory, f"export it again or, if you changed it on purpose, remove {SUMS}")


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint's directory.

    Raises:
        ValueError: a file is missing, damaged or not what it should be, or two tensors have one name.
    """
    raw = _mapping(directory / CONFIG)
    files = _weights(directory)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, value in _tensors(file).items():
            known = canonical(name)
            if known in tensors:
                raise ValueError(f"{file}: {name} is there twice, under another spelling too")
            if known is not None:
                tensors[known] = value
    ours = _mapping(directory / OURS) if (directory / OURS).is_file() else None
    if ours is not None:
        if ours.get("format") != FORMAT:
            raise ValueError(f"{directory / OURS}: its format is not {FORMAT!r}")
        if ours.get("weights_sha256") != sha256(files[0]):
            raise ValueError(
                f"{files[0]}: its SHA-256 is not that in {OURS}; if you changed the weights on purpose, remove {OURS}"
            )
    check_unchanged(directory)
    return Checkpoint(str(directory), raw, tensors, ours)


def fetch(source: str, revision: str | None) -> Path:
    """A local directory as it is, or one fetched from the Hugging Face Hub; pickled weights only where no others are.

    Raises:
        ValueError: there is no such directory or repository.
    """
    if Path(source).is_dir():
        return Path(source)
    # only here: the Hub is rarely asked
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(source, revision=revision, allow_patterns=[*WANTED]))
        if not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(source, revision=revision, allow_patterns=[*WANTED, *PICKLED]))
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: no such directory, nor to be had from the Hugging Face Hub ({reason})") from error


def _mapping(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _weights(directory: Path) -> list[Path]:
    for name in SINGLE:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            listed = _mapping(index).get("weight_map")
            if not isinstance(listed, Mapping) or not all(isinstance(part, str) for part in listed.values()):
                raise ValueError(f"{index}: it has no weight_map from tensors to files")
            files = [directory / part for part in sorted(set(listed.values()))]
            if outside := [file for file in files if file.parent != directory]:
                raise ValueError(f"{index}: it names {outside[0]}, outside of its directory")
            return files
    found = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if len(found) != 1:
        raise ValueError(f"{directory}: no {' or '.join(SINGLE)}, and {len(found)} other weight files")
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or cut off ({error}): fetch it again") from error
    except OSError as error:
        raise explain(error, file) from error
    except UNREADABLE as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:120].replace("\x1b[1m", "")
        raise ValueError(f"{file}: no file of plain weights, which is all that is read ({reason})") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in loaded.items()
    ):
        raise ValueError(f"{file}: not a table of tensors")
    return dict(loaded)
