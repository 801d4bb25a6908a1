"""A cache of features on disk: shards that are mapped into memory, and an index of them with checksums.

Features are kept of pieces of documents. A piece is a run of one document number in a packed row: positions restart
there and attention ends at its borders, so its features depend on its ids alone, up to rounding. To the last bit they
also depend on the row around it, since kernels sum in an order of their own for every shape; so a row has a key, too.

Legend: T tokens of a row, R of them up to the last that is no padding, P tokens of a shard, N stored boundaries,
H hidden, E keys of a shard.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.data import Batch
from specdec.features.contract import DTYPES, Contract
from specdec.utils.config_diff import pairs, words
from specdec.utils.files import read_json, sha256, write_json

FORMAT = "specdec-features-4"
INDEX = "index.json"  # written last: a folder without it is no cache yet
UNFINISHED = "building.json"  # the index of what is written so far
KEY = 16  # bytes of a key
REMEDY = "run the same specdec cache command again, which makes it anew"


class PackedRow(NamedTuple):
    """A row without the padding at its end."""

    ids_R: Tensor  # int64
    documents_R: Tensor  # int64
    spans: tuple[tuple[int, int], ...]  # (start, end) of its pieces
    key: bytes
    piece_keys: tuple[bytes, ...]

    @classmethod
    def of(cls, ids_T: Tensor, documents_T: Tensor) -> Self:
        """The row of these tokens, on the CPU."""
        R = real_length(documents_T)
        ids_R, documents_R = ids_T[:R], documents_T[:R]
        borders = (documents_R[1:] != documents_R[:-1]).nonzero()[:, 0].add(1).tolist()
        runs = zip([0, *borders], [*borders, R], strict=True)
        spans = tuple((start, end) for start, end in runs if R and documents_R[start] >= 0)
        keys = tuple(_hash(ids_R[start:end].contiguous().numpy().tobytes()) for start, end in spans)
        where = torch.tensor(spans, dtype=torch.int64).numpy().tobytes()
        return cls(ids_R, documents_R, spans, _hash(b"row", where, *keys), keys)

    @property
    def tokens(self) -> int:
        """Tokens that features are kept of."""
        return sum(end - start for start, end in self.spans)


def real_length(documents_T: Tensor) -> int:
    """R: tokens up to the last that is no padding."""
    real_R = (documents_T >= 0).nonzero()[:, 0]
    return int(real_R[-1]) + 1 if len(real_R) else 0


def packed_rows(batch: Batch) -> list[PackedRow]:
    """The rows of a batch, wherever it lies."""
    ids_BT, documents_BT = batch.ids_BT.cpu(), batch.documents_BT.cpu()
    return [PackedRow.of(ids_T, documents_T) for ids_T, documents_T in zip(ids_BT, documents_BT, strict=True)]


class ShardEntry(NamedTuple):
    """What the index says of a shard."""

    file: str
    tokens: int
    pieces: int
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


class Shard(NamedTuple):
    """A shard's tensors: packed states, and where in them each piece and each row stands."""

    aux_PNH: Tensor
    final_PH: Tensor
    ids_P: Tensor  # int64
    keys: Tensor  # uint8 (E, 16), of pieces and of whole rows
    spans: Tensor  # int64 (E, 2), first token and number of tokens

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
        there = (found.aux_PNH.dtype, tuple(found.aux_PNH.shape), tuple(found.final_PH.shape), len(found.ids_P))
        wanted = (DTYPES[contract.dtype], (P, N, H), (P, H), P)
        if there != wanted:
            raise ValueError(f"{path}: its states are {there}, the index says {wanted}: {REMEDY}")
        return found


Span = tuple[int, int, int]
"""Where the states of a piece, or of a whole row, stand: shard, first token, number of tokens."""


class FeatureStore:
    """Features by row. A shard's checksum is compared when it is first read from.

    Args:
        data: what reads it, as :func:`specdec.features.contract.described` tells; for messages.

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
        self._found: dict[bytes, Span] = {}
        self._shards = [Shard.open(directory, entry, self.contract) for entry in self.index.shards]
        self._verified: set[int] = set()
        self._verifying = threading.Lock()
        for number, shard in enumerate(self._shards):
            for key, (start, tokens) in zip(shard.keys.numpy(), shard.spans.tolist(), strict=True):
                self._found.setdefault(bytes(key), (number, start, tokens))

    def holds(self, row: PackedRow) -> bool:
        """Whether :meth:`find` finds it."""
        return row.key in self._found or all(key in self._found for key in row.piece_keys)

    def find(self, row: PackedRow) -> list[Span]:
        """Where a row's pieces stand: together, as they were packed when the cache was made, or each by itself.

        Raises:
            ValueError: a piece of it is not there; the message says what the cache was made from.
        """
        if row.key not in self._found:
            return [self._piece(key, end - begin) for key, (begin, end) in zip(row.piece_keys, row.spans, strict=True)]
        number, start, _ = self._found[row.key]
        spans = []
        for begin, end in row.spans:
            spans.append((number, start, end - begin))
            start += end - begin
        return spans

    def _piece(self, key: bytes, tokens: int) -> Span:
        if key not in self._found:
            self.verify()  # it may be the cache that is damaged
            made, now = self.contract.data, self.data
            different = [f"{name} was {words(a)}, is {words(b)}" for name, a, b in pairs(dict(made), dict(now))]
            reason = "; ".join(different) or "its files or the tokenizer have changed since"
            if (first := self.contract.first_rows) is not None:
                reason += f"; of training the first {first:,} rows alone"
            raise ValueError(
                f"{self.directory}: no features of a piece of {tokens} tokens: the cache was made from other data "
                f"({reason}); run specdec cache with the present data"
            )
        return self._found[key]

    def shard(self, number: int) -> Shard:
        """A shard whose every byte has been checked, once."""
        if number not in self._verified:
            with self._verifying:
                if number not in self._verified:
                    self.index.shards[number].verify(self.directory)
                    self._verified.add(number)
        return self._shards[number]

    def verify(self) -> None:
        """Check every byte of every shard.

        Raises:
            ValueError: one is gone or damaged; the message names it.
        """
        for number in range(len(self._shards)):
            self.shard(number)

    def read(self, row: PackedRow, taps: Sequence[int], aux_TNH: Tensor, final_TH: Tensor) -> None:
        """Copy a row's states to ``aux_TNH``, of the stored boundaries numbered ``taps``, and to ``final_TH``.

        Raises:
            ValueError: a piece is not there, or its shard is damaged.
        """
        for (begin, end), (number, start, tokens) in zip(row.spans, self.find(row), strict=True):
            shard, stop = self.shard(number), start + tokens
            if not torch.equal(shard.ids_P[start:stop], row.ids_R[begin:end]):
                raise ValueError(f"{self.directory / self.index.shards[number].file}: holds other tokens than it says")
            for n, tap in enumerate(taps):
                aux_TNH[begin:end, n] = shard.aux_PNH[start:stop, tap]
            final_TH[begin:end] = shard.final_PH[start:stop]


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY).digest()


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
