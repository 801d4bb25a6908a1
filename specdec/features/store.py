"""A cache of features on disk: shards that are mapped into memory, and an index of them with checksums.

Features are kept of packed rows. A row is found by its key, a hash of its ids and of where its documents begin: to the
last bit the features depend on the whole row, since kernels sum in an order of their own for every shape.

Legend: T tokens of a row, R of them before its padding, P tokens of a shard, N stored boundaries, H hidden, E rows of a
shard.
"""

import dataclasses
import hashlib
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.target import Target
from specdec.utils.config_diff import pairs, words
from specdec.utils.files import read_json, sha256, write_json

FORMAT = "specdec-features-5"
INDEX = "index.json"  # written last: a folder without it is no cache yet
UNFINISHED = "building.json"  # the index of what is written so far
REMEDY = "run the same specdec cache command again, which makes it anew"
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
INCIDENTAL = ("batch_size", "cache")  # of the data: they change no row


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that a cache's numbers depend on.

    Args:
        layers: boundaries stored, ascending: 0 the embeddings, b the residual stream after b layers, before the final
            norm; the final state, after it, is stored in any case.
        dtype: of what is stored.
        target_dtype: what the target ran in.
        target: its :attr:`specdec.target.Target.identity`.
        data: :func:`described`.
        engine: what ran the target.
        first_rows: how many rows of training, those that an epoch draws first; None if all are stored.
    """

    layers: tuple[int, ...]
    dtype: str
    target_dtype: str
    hidden_size: int
    target: Mapping[str, str | int | None]
    data: Mapping[str, Any]
    engine: str
    first_rows: int | None = None

    @classmethod
    def of(
        cls, target: Target, data: TokenData, layers: Sequence[int], dtype: str, engine: str,
        first_rows: int | None = None,
    ) -> Self:  # fmt: skip
        """For features of this data that are about to be written; ``dtype`` may be ``target``.

        Raises:
            ValueError: no such boundary.
        """
        if wrong := [b for b in layers if not 0 <= b <= target.num_layers]:
            raise ValueError(f"no layer boundary {wrong[0]}: this target has 0 to {target.num_layers}")
        own = str(target.dtype).removeprefix("torch.")
        return cls(
            layers=tuple(sorted(set(layers))),
            dtype=own if dtype == "target" else dtype,
            target_dtype=own,
            hidden_size=target.hidden_size,
            target=target.identity,
            data=described(data),
            engine=engine,
            first_rows=first_rows,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return (len(self.layers) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Lossless JSON-able data; ``Contract(**data)`` is the inverse, but for the tuple of layers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def described(data: TokenData) -> dict[str, Any]:
    """The arguments that decide which rows there are."""
    names = [name for name in inspect.signature(type(data).__init__).parameters if name not in INCIDENTAL]
    found = {name: vars(data)[name] for name in names if name in vars(data)}
    found["class"] = f"{type(data).__module__}.{type(data).__qualname__}"
    return json.loads(json.dumps(found, default=str))


class PackedRow(NamedTuple):
    """A row without the padding at its end."""

    ids_R: Tensor  # int64
    documents_R: Tensor  # int64
    key: bytes

    @property
    def tokens(self) -> int:
        """R."""
        return len(self.ids_R)

    def pieces(self) -> tuple[Tensor, ...]:
        """The ids of each document: positions restart there, and attention ends at its borders."""
        _, sizes = torch.unique_consecutive(self.documents_R, return_counts=True)
        return self.ids_R.split(sizes.tolist())


def packed_rows(batch: Batch) -> list[PackedRow]:
    """The rows of a batch, wherever it lies."""
    found = []
    for ids_T, documents_T in zip(batch.ids_BT.cpu(), batch.documents_BT.cpu(), strict=True):
        R = int((documents_T >= 0).sum())
        ids_R, documents_R = ids_T[:R].contiguous(), documents_T[:R].contiguous()
        key = hashlib.blake2b(ids_R.numpy().tobytes() + documents_R.numpy().tobytes(), digest_size=16).digest()
        found.append(PackedRow(ids_R, documents_R, key))
    return found


class ShardEntry(NamedTuple):
    """What the index says of a shard."""

    file: str
    tokens: int
    rows: int
    sha256: str

    def verify(self, directory: Path) -> None:
        """Raise ValueError if a byte of the file is not what was written."""
        if not (directory / self.file).exists() or sha256(directory / self.file) != self.sha256:
            raise ValueError(f"{directory / self.file}: it is gone, or its SHA-256 is not the one in {INDEX}: {REMEDY}")


class FeatureIndex(NamedTuple):
    """What there is in a cache."""

    contract: Contract
    shards: Sequence[ShardEntry]

    def write(self, path: Path) -> None:
        """Write it, with a hash of itself."""
        said = {"contract": self.contract.to_json(), "shards": [entry._asdict() for entry in self.shards]}
        write_json(path, {"format": FORMAT, "sha256": _digest(said), **said})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check it.

        Raises:
            ValueError: it is missing, damaged or of another format.
        """
        said = read_json(path)
        if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: not a feature cache of this version ({FORMAT}): run specdec cache again")
        if said.pop("sha256", None) != _digest(said):
            raise ValueError(f"{path}: it was changed or damaged (its own hash differs): run specdec cache again")
        contract = said["contract"]
        layers = tuple(contract["layers"])
        return cls(Contract(**contract | {"layers": layers}), [ShardEntry(**entry) for entry in said["shards"]])


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class Shard(NamedTuple):
    """A shard's tensors: the states of its rows, one row after another."""

    aux_PNH: Tensor
    final_PH: Tensor
    keys: Tensor  # uint8 (E, 16)
    sizes_E: Tensor  # int64, tokens of each row

    @classmethod
    def open(cls, directory: Path, entry: ShardEntry, contract: Contract) -> Self:
        """Map a shard into memory; only its keys are read.

        Raises:
            ValueError: it is gone, cut off, or not of the contract's shapes and dtype.
        """
        path = directory / entry.file
        try:
            with safe_open(path, framework="pt") as file:
                found = cls(**{name: file.get_tensor(name) for name in cls._fields})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: the shard is gone, damaged or cut off ({error}): {REMEDY}") from error
        P, N, H = entry.tokens, len(contract.layers), contract.hidden_size
        there = (found.aux_PNH.dtype, tuple(found.aux_PNH.shape), tuple(found.final_PH.shape))
        wanted = (DTYPES[contract.dtype], (P, N, H), (P, H))
        if there != wanted:
            raise ValueError(f"{path}: its states are {there}, the index says {wanted}: {REMEDY}")
        return found


class FeatureStore:
    """Features by row. A shard's checksum is compared when it is first read from.

    Args:
        data: what reads it, as :func:`described` tells; for messages.

    Raises:
        ValueError: there is no cache, it is not finished, or a shard is gone or damaged.
    """

    def __init__(self, directory: Path, data: Mapping[str, Any]) -> None:
        self.directory, self.data = directory, data
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory: make it with specdec cache --out {directory}")
        if not (directory / INDEX).exists() and (directory / UNFINISHED).exists():
            raise ValueError(f"{directory}: the cache is not finished: run the same specdec cache command again")
        self.index = FeatureIndex.read(directory / INDEX)
        self.contract = self.index.contract
        self._found: dict[bytes, tuple[int, int]] = {}  # of a row its shard, and its first token there
        self._shards = [Shard.open(directory, entry, self.contract) for entry in self.index.shards]
        self._verified: set[int] = set()
        self._verifying = threading.Lock()
        for number, shard in enumerate(self._shards):
            starts = (shard.sizes_E.cumsum(0) - shard.sizes_E).tolist()
            self._found |= {bytes(key): (number, start) for key, start in zip(shard.keys.numpy(), starts, strict=True)}

    def holds(self, row: PackedRow) -> bool:
        """Whether :meth:`find` finds it."""
        return row.key in self._found or not row.tokens

    def find(self, row: PackedRow) -> tuple[int, int]:
        """The shard that has a row, and the row's first token in it.

        Raises:
            ValueError: it is not there; the message says what the cache was made from.
        """
        if row.key not in self._found:
            self.verify()  # it may be the cache that is damaged
            changes = pairs(dict(self.contract.data), dict(self.data))
            different = [f"{name} was {words(a)}, is {words(b)}" for name, a, b in changes]
            reason = "; ".join(different) or "its files or the tokenizer have changed since"
            if (first := self.contract.first_rows) is not None:
                reason += f"; of training the first {first:,} rows alone"
            raise ValueError(
                f"{self.directory}: no features of a row of {row.tokens} tokens: the cache was made from other data "
                f"({reason}); run specdec cache with the present data"
            )
        return self._found[row.key]

    def verify(self) -> None:
        """Check every byte of every shard.

        Raises:
            ValueError: one is gone or damaged; the message names it.
        """
        for number in range(len(self._shards)):
            self._verify(number)

    def _verify(self, number: int) -> None:
        """Check every byte of a shard, once; both the reading thread and the training step may ask."""
        with self._verifying:
            if number not in self._verified:
                self.index.shards[number].verify(self.directory)
                self._verified.add(number)

    def read(self, row: PackedRow, taps: Sequence[int], aux_TNH: Tensor, final_TH: Tensor) -> None:
        """Copy a row's states to ``aux_TNH``, of the stored boundaries numbered ``taps``, and to ``final_TH``.

        Raises:
            ValueError: the row is not there, or its shard is damaged.
        """
        if not row.tokens:
            return
        number, start = self.find(row)
        self._verify(number)
        shard, here = self._shards[number], slice(start, start + row.tokens)
        for n, tap in enumerate(taps):
            aux_TNH[: row.tokens, n] = shard.aux_PNH[here, tap]
        final_TH[: row.tokens] = shard.final_PH[here]
