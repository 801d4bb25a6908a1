"""One shard: a safetensors file of packed states, and where in it each piece and each row stands.

Legend: P tokens of the shard, N stored boundaries, H hidden, E entries.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.features.contract import DTYPES, Contract
from specdec.features.pieces import KEY
from specdec.files import explain, sha256, staged

METADATA = {"format": "specdec-features"}
NAME = re.compile(r"shard-[0-9]{5}\.safetensors")


class Entry(NamedTuple):
    """What ``index.json`` says of a shard."""

    file: str
    tokens: int
    pieces: int
    rows: int
    sha256: str

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Raises ``ValueError`` unless ``data`` is one, whose file lies in the cache's own folder."""
        if not isinstance(data, Mapping) or set(data) != set(cls._fields):
            raise ValueError(f"{where}: not the entry of a shard: {data!r}")
        if not isinstance(data["file"], str) or not NAME.fullmatch(data["file"]):
            raise ValueError(f"{where}: {data['file']!r} is no shard's name")
        if any(type(data[name]) is not int or data[name] < 1 for name in ("tokens", "pieces", "rows")):
            raise ValueError(f"{where}: {data['file']} has counts that are none: {dict(data)}")
        return cls(**data)


def shard_name(number: int) -> str:
    """``shard-00000.safetensors``."""
    return f"shard-{number:05}.safetensors"


class Contents(NamedTuple):
    """A shard's tensors."""

    aux_PNH: Tensor
    final_PH: Tensor
    ids_P: Tensor  # int64
    keys: Tensor  # uint8 (E, 16), of pieces and of whole rows
    spans: Tensor  # int64 (E, 2), first token and number of tokens


def write_shard(path: Path, contents: Contents, pieces: int, rows: int) -> Entry:
    """Write a shard, whole or not at all.

    Raises:
        ValueError: the disk is full, or the folder may not be written.
    """
    with staged(path) as temporary:
        try:
            save_file(contents._asdict(), temporary, metadata=METADATA)
        except SafetensorError as error:
            raise ValueError(f"{path}: the shard cannot be written: {error}") from error
        digest = sha256(temporary)
    return Entry(path.name, len(contents.ids_P), pieces, rows, digest)


def open_shard(path: Path, entry: Entry, contract: Contract) -> Contents:
    """Map a shard into memory; only its keys are read.

    Raises:
        ValueError: it is gone, cut off, or not of the contract's shapes and dtype.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(Contents._fields):
                raise ValueError(f"{path}: not a shard of features: it holds {', '.join(sorted(file.keys()))}")
            found = Contents(**{name: file.get_tensor(name) for name in Contents._fields})
    except FileNotFoundError as error:
        raise ValueError(f"{path}: the shard is gone: {REMEDY}") from error
    except OSError as error:
        raise explain(error, path) from error
    except SafetensorError as error:
        raise ValueError(f"{path}: the shard is damaged or cut off ({error}): {REMEDY}") from error
    P, N, H, E = entry.tokens, len(contract.layers), contract.hidden_size, len(found.keys)
    dtype = DTYPES[contract.dtype]
    wanted = {
        "aux_PNH": (dtype, (P, N, H)),
        "final_PH": (dtype, (P, H)),
        "ids_P": (torch.int64, (P,)),
        "keys": (torch.uint8, (E, KEY)),
        "spans": (torch.int64, (E, 2)),
    }
    for name, tensor in found._asdict().items():
        if (tensor.dtype, tuple(tensor.shape)) != wanted[name]:
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, the index says {wanted[name]}: {REMEDY}"
            )
    return found


def verify_shard(path: Path, entry: Entry) -> None:
    """Raise ValueError if a byte of the file is not what was written."""
    if not path.exists():
        raise ValueError(f"{path}: the shard is gone: {REMEDY}")
    if sha256(path) != entry.sha256:
        raise ValueError(f"{path}: its SHA-256 is not the one in index.json: {REMEDY}")


def check_finite(where: str, contents: Contents, contract: Contract) -> None:
    """Raise ValueError for NaN or infinite states, naming the first."""
    for n, boundary in enumerate(contract.layers):
        _finite(where, contents.aux_PNH[:, n], f"boundary {boundary}")
    _finite(where, contents.final_PH, "the final state")


def _finite(where: str, state_PH: Tensor, name: str) -> None:
    bad_P = ~state_PH.isfinite().all(-1)
    if bad_P.any():
        token = int(bad_P.nonzero()[0, 0])
        value = float(state_PH[token][~state_PH[token].isfinite()][0])
        raise ValueError(f"{where}: {name} of token {token} holds {value}: run the target in a wider dtype")


REMEDY = "run the same specdec cache command again, which makes it anew"
