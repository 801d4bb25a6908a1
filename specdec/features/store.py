"""A cache of features on disk: its shards of whole rows, their index and checksums, and its reader.

Features are kept of packed rows. A row is found by its key, a hash of its ids and of where its documents begin: to the
last bit the features depend on the whole row, since kernels sum in another order for every shape.

Legend: R tokens of a row before its padding, P tokens of a shard, N stored boundaries, H hidden, E rows of a shard.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.data import Batch
from specdec.features.contract import Column, Contract
from specdec.utils.config import differences, to_text
from specdec.utils.files import write_json
from specdec.utils.reading import explained, open_regular, read_json, sha256
from specdec.utils.text import how_many

FORMAT = "specdec-features-6"
INDEX = "index.json"  # written last: a folder without it is no cache yet
UNFINISHED = "building.json"  # the index of what is written so far
REMEDY = "run the same specdec cache command again, which makes it again"


class PackedRow(NamedTuple):
    """A row without the padding at its end."""

    ids_R: Tensor  # int64
    documents_R: Tensor  # int64
    key: bytes

    @classmethod
    def of(cls, ids_R: Tensor, documents_R: Tensor) -> Self:
        """The row of these tokens; its key is a hash of both, int64."""
        content = ids_R.numpy().tobytes() + documents_R.numpy().tobytes()
        return cls(ids_R, documents_R, hashlib.blake2b(content, digest_size=16).digest())

    @classmethod
    def of_document(cls, ids_R: Tensor) -> Self:
        """The row of one document's tokens, int64."""
        return cls.of(ids_R.contiguous(), torch.zeros_like(ids_R))

    @property
    def tokens(self) -> int:
        """R."""
        return len(self.ids_R)

    def pieces(self) -> tuple[Tensor, ...]:
        """The ids of each document: positions restart there, and attention ends at its borders."""
        _, sizes = torch.unique_consecutive(self.documents_R, return_counts=True)
        return self.ids_R.split(sizes.tolist())


def each_row(batch: Batch) -> Iterator[PackedRow]:
    """The rows of a batch on any device, one by one: all rows of the data need not be in memory twice."""
    for ids_T, documents_T in zip(batch.ids_BT.cpu(), batch.documents_BT.cpu(), strict=True):
        R = int((documents_T >= 0).sum())
        ids_R = ids_T[:R].long().contiguous()
        documents_R = documents_T[:R].long().contiguous()
        yield PackedRow.of(ids_R, documents_R)


class ShardEntry(NamedTuple):
    """What the index says of a shard."""

    file: str
    tokens: int
    rows: int
    sha256: str

    def verify(self, directory: Path) -> None:
        """Raise ValueError if a byte of the file is not what was written."""
        if not (directory / self.file).exists() or sha256(directory / self.file) != self.sha256:
            raise ValueError(
                f"{directory / self.file}: it is gone, or its SHA-256 is not the one in {INDEX}: {REMEDY}"
            )


class FeatureIndex(NamedTuple):
    """What there is in a cache."""

    contract: Contract
    shards: Sequence[ShardEntry]

    def write(self, path: Path) -> None:
        """Write it, with a hash of itself."""
        content = {
            "contract": self.contract.to_json(),
            "shards": [entry._asdict() for entry in self.shards],
        }
        write_json(path, {"format": FORMAT, "sha256": _digest(content), **content})

    @classmethod
    def of(cls, directory: Path) -> Self:
        """That of a cache; ValueError if there is none, or none that is finished."""
        if not directory.is_dir():
            raise ValueError(
                f"{directory}: no such directory: make it with specdec cache --out {directory}"
            )
        if not (directory / INDEX).exists() and any(directory.glob("part-*")):
            raise ValueError(
                f"{directory}: not all parts of the cache are finished: run specdec cache for the others"
            )
        if not (directory / INDEX).exists() and (directory / UNFINISHED).exists():
            raise ValueError(
                f"{directory}: the cache is not finished: run the same specdec cache command again"
            )
        return cls.read(directory / INDEX)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check it.

        Raises:
            ValueError: it is missing, damaged or of another format.
        """
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(
                f"{path}: not a feature cache of this version ({FORMAT}): run specdec cache again"
            )
        if content.pop("sha256", None) != _digest(content):
            raise ValueError(
                f"{path}: it was changed or damaged (its own hash differs): run specdec cache again"
            )
        contract = content["contract"] | {"layers": tuple(content["contract"]["layers"])}
        return cls(Contract(**contract), [ShardEntry(**entry) for entry in content["shards"]])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class RowPlace(NamedTuple):
    """Where a row's states lie."""

    path: Path
    starts: tuple[int, ...]  # bytes of the file before its part of each column
    crc32: int


def crc32(*columns: Tensor) -> int:
    """Of their bytes, one after another: 4 GB a second, where SHA-256 takes in two."""
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(raw(column).data, checksum)
    return checksum


def raw(column: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor, which they share."""
    return column.view(-1).view(torch.uint8).numpy()


# of dtypes in safetensors
NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
}


def shard_rows(path: Path, columns: Mapping[str, Column]) -> dict[bytes, RowPlace]:
    """A shard's rows by key.

    Raises:
        ValueError: it is gone or cut off.
    """
    try:
        with (
            open_regular(path) as stream,
            safe_open(path, framework="pt", backend="pread") as file,
        ):
            keys, sizes_E, crcs_E = (
                file.get_tensor(name) for name in ("keys", "sizes_E", "crcs_E")
            )
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            for name, column in columns.items():
                if header[name]["dtype"] != NAMES[column.dtype]:
                    raise ValueError(
                        f"{name} is {header[name]['dtype']}, not {NAMES[column.dtype]}"
                    )
            starts = [8 + length + header[name]["data_offsets"][0] for name in columns]
            sizes = [column.token_bytes for column in columns.values()]
            before_E = (sizes_E.cumsum(0) - sizes_E).tolist()
            places = [
                RowPlace(
                    path,
                    tuple(at + first * size for at, size in zip(starts, sizes, strict=True)),
                    crc,
                )
                for first, crc in zip(before_E, crcs_E.tolist(), strict=True)
            ]
            return dict(zip(map(bytes, keys.numpy()), places, strict=True))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: the shard is gone, damaged or cut off ({error}): {REMEDY}"
        ) from error


class FeatureStore:
    """Features by row, each compared with its checksum as it is read. No shard is mapped into memory: one that is cut
    off would be a SIGBUS.

    Args:
        data: what reads it, as :func:`described` says; for messages.

    Raises:
        ValueError: there is no cache, it is not finished, or a shard is gone or damaged.
    """

    def __init__(self, directory: Path, data: Mapping[str, Any]) -> None:
        self.directory = directory
        self.data = data
        self.contract, self.entries = FeatureIndex.of(directory)
        self._places: dict[bytes, RowPlace] = {}
        for entry in self.entries:
            self._places |= shard_rows(directory / entry.file, self.contract.columns())

    def holds(self, row: PackedRow) -> bool:
        """Whether the row can be read; one without a token can."""
        return row.key in self._places or not row.tokens

    def check(self, row: PackedRow) -> None:
        """Refuse a row that the cache does not hold.

        Raises:
            ValueError: the row is not there; the message says what the cache was made from.
        """
        if self.holds(row):
            return
        self.verify()  # it may be the cache that is damaged
        changes = differences(dict(self.contract.data), dict(self.data))
        reason = "; ".join(f"{name} was {to_text(a)}, is {to_text(b)}" for name, a, b in changes)
        reason = reason or "its files or the tokenizer have changed since"
        if (first := self.contract.first_rows) is not None:
            reason += f"; of training the first {how_many(first, 'row')} alone"
        if (first := self.contract.first_val_rows) is not None:
            reason += f"; of validation the first {how_many(first, 'row')} alone"
        raise ValueError(
            f"{self.directory}: no features of a row of {how_many(row.tokens, 'token')}: the cache was made from other "
            f"data ({reason}); run specdec cache with the present data"
        )

    def verify(self) -> None:
        """Check every byte of every shard.

        Raises:
            ValueError: one is gone or damaged; the message names it.
        """
        for entry in self.entries:
            entry.verify(self.directory)

    def read(self, row: PackedRow, taps: Sequence[int], *columns: Tensor) -> None:
        """Copy a row's columns, of the stored boundaries numbered ``taps``, to those of T tokens.

        Raises:
            ValueError: the row is not there, or damaged.
        """
        if not row.tokens:
            return
        self.check(row)
        path, starts, checksum = self._places[row.key]
        buffers = self.contract.empty(row.tokens)
        with open_regular(path) as file, explained(path):
            for start, buffer in zip(starts, buffers, strict=True):
                file.seek(start)
                if buffer.numel() and file.readinto(raw(buffer).data) != buffer.nbytes:
                    raise ValueError(f"{path}: it is cut off: {REMEDY}")
        if crc32(*buffers) != checksum:
            raise ValueError(
                f"{path}: a row's CRC-32 is not the one that was written with it: {REMEDY}"
            )
        for name, column, buffer in zip(self.contract.columns(), columns, buffers, strict=True):
            there = column[: row.tokens]
            if name.startswith("final"):
                there.copy_(buffer)
            else:
                for n, tap in enumerate(taps):
                    there[:, n] = buffer[:, tap]
