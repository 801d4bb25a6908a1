"""The files of a published checkpoint, read without running anything in them."""

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.drafter.io import FLOATS, WHOLE, measure
from specdec.export import tensors as named
from specdec.export.tensors import Raw, Weights
from specdec.utils import hub
from specdec.utils.reading import SUMS, check_sums, read_json, regular, sha256

OURS = "specdec.json"
FORMAT = "specdec-export"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FETCHED = (CONFIG, OURS, "*.safetensors", "*.index.json", "mask_embedding.pt")
# only with multi-head latent attention (MLA)
LATENT_DOWN = "layers.0.self_attn.kv_a_proj_with_mqa.weight"
QUERIES = "layers.0.self_attn.q_proj.weight"


class Checkpoint(NamedTuple):
    """The contents of a directory."""

    where: str
    raw: Raw  # ``config.json``
    tensors: Weights  # by name, see :func:`specdec.export.tensors.normalize_name`
    ours: Raw | None  # ``specdec.json``, which only our own exports have
    layer: str = ""  # the prefix of the first layer's names in the file
    eight_bits: str = ""  # the dtype of matrices that are read as the numbers they stand for


def fetch_checkpoint(source: str, revision: str | None) -> Path:
    """Return a local directory as it is, or fetch a repository of the Hugging Face Hub.

    Pickled weights are fetched only where there are no others.

    Raises:
        ValueError: there is no such repository.
    """
    directory = Path(source)
    if directory.is_dir():
        if not (directory / CONFIG).is_file() and any(directory.glob("*.gguf")):
            raise ValueError(
                f"{source}: a GGUF export, of which specdec reads nothing back: give the drafter that it was made "
                "from, or its export with --format vllm"
            )
        return directory
    if Path(source).is_file():
        raise ValueError(f"{source}: a file: give its directory, {Path(source).parent}")
    directory = hub.fetch(source, revision, FETCHED)
    if any(directory.glob("*.safetensors")):
        return directory
    return hub.fetch(source, revision, (*FETCHED, "*.bin"))


def check_unchanged(directory: Path) -> dict[str, str]:
    """Compare an export's files with their hashes, where it has any, and return the hashes by name.

    Raises:
        ValueError: a file differs; the message names it.
    """
    return check_sums(directory, f"export it again or, if you changed it on purpose, remove {SUMS}")


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint's directory.

    Raises:
        ValueError: a file is missing or damaged, or two tensors have one name.
    """
    raw = _read_object(directory / CONFIG)
    patterns = (WEIGHTS, "*.safetensors", "pytorch_model.bin", "*.bin")
    files = next(filter(None, (sorted(directory.glob(pattern)) for pattern in patterns)), None)
    if files is None:
        raise ValueError(f"{directory}: no {WEIGHTS}, nor another file of weights")
    tensors: Weights = {}
    layer = ""
    for file in files:
        for name, value in _read_tensors(file).items():
            normal = named.normalize_name(name)
            if normal in tensors:
                raise ValueError(f"{file}: {name} is there twice, under another spelling too")
            if normal is not None:
                tensors[normal] = value
            if normal in (QUERIES, LATENT_DOWN):
                layer = name.removesuffix(normal.removeprefix("layers.0."))
    stored = {str(tensors[name].dtype) for name in named.in_eight_bits(tensors)}
    try:
        tensors = named.dequantized(tensors, named.fp8_block(raw))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    hashes = check_unchanged(directory)
    ours = _read_object(directory / OURS) if (directory / OURS).is_file() else None
    if ours is not None:
        weights_sha256 = hashes.get(files[0].name) or sha256(files[0])
        if ours.get("weights_sha256") != weights_sha256:
            raise ValueError(
                f"{files[0]}: its SHA-256 is not that in {OURS}; if you changed the weights on purpose, remove {OURS}"
            )
    eight_bits = " and ".join(sorted(stored)).replace("torch.", "")
    return Checkpoint(str(directory), raw, tensors, ours, layer, eight_bits)


def _read_object(path: Path) -> Raw:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _read_tensors(file: Path) -> Weights:
    """Return a file's tensors, which take no more memory than it has bytes; ValueError if it is damaged or has more."""
    if file.suffix == ".safetensors":
        if unreadable := {header.dtype for header in measure(file).values()} - {
            *FLOATS,
            *WHOLE.values(),
            *named.FP8.values(),
        }:
            raise ValueError(
                f"{file}: weights of {unreadable.pop()}: only unquantized ones can be read"
            )
        return load_file(file)
    size = regular(file)
    try:
        # torch.save has written archives since 1.6, and never compresses them.
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > size:
                raise ValueError("it would unpack to more than it is")
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # A stranger's pickle may hold anything, so reading it may raise anything.
        reason = (" ".join(str(error).split()) or type(error).__name__)[:120].replace("\x1b[1m", "")
        raise ValueError(
            f"{file}: no file of plain weights, which is all that is read ({reason})"
        ) from error
    if not isinstance(loaded, dict) or not all(map(_is_plain, loaded, loaded.values())):
        raise ValueError(f"{file}: not a table of tensors")
    # Twice the size is allowed, for a head that shares its memory with the embedding.
    total = sum(value.nbytes for value in loaded.values())
    if total > 2 * size:
        raise ValueError(f"{file}: its {size:,} bytes are repeated into tensors of {total:,}")
    return dict(loaded)


def _is_plain(name: Any, value: Any) -> bool:
    """Return whether this is a named tensor whose numbers lie in the file."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and len(name) <= 500
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )
