"""A cache of features on disk: shards of whole rows, and an index of them with checksums.

Features are kept of packed rows. A row is found by its key, a hash of its ids and of where its documents begin: to the
last bit the features depend on the whole row, since kernels sum in an order of their own for every shape.

Legend: R tokens of a row before its padding, P tokens of a shard, N stored boundaries, H hidden, E rows of a shard.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.target import Target
from specdec.utils.config import class_name, pairs, words
from specdec.utils.files import explained, locked, read_json, sha256, staged, write_json
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

FORMAT = "specdec-features-6"
INDEX = "index.json"  # written last: a folder without it is no cache yet
UNFINISHED = "building.json"  # the index of what is written so far
REMEDY = "run the same specdec cache command again, which makes it anew"
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
INCIDENTAL = ("batch_size",)  # of the data: it changes no row


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
        target_dtype = str(target.dtype).removeprefix("torch.")
        return cls(
            layers=tuple(sorted(set(layers))), dtype=target_dtype if dtype == "target" else dtype,
            target_dtype=target_dtype, hidden_size=target.hidden_size, target=target.identity, data=described(data),
            engine=engine, first_rows=first_rows,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a token's states at the boundaries, and of its final state."""
        each = self.hidden_size * DTYPES[self.dtype].itemsize
        return len(self.layers) * each, each

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return sum(self.sizes)

    def differences(self, now: Self) -> str:
        """What was otherwise in this one, in words; nothing if all is the same."""
        changes = pairs(self.to_json(), now.to_json())
        return "; ".join(f"{key} was {words(a)}, is {words(b)}" for key, a, b in changes)

    def to_json(self) -> dict[str, Any]:
        """JSON-able data; ``Contract(**data)`` is the inverse, but for the tuple of layers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def described(data: TokenData) -> dict[str, Any]:
    """The arguments that decide which rows there are."""
    names = [name for name in inspect.signature(type(data).__init__).parameters if name not in INCIDENTAL]
    found = {name: vars(data)[name] for name in names if name in vars(data)}
    return json.loads(json.dumps(found | {"class": class_name(type(data))}, default=str))


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
    """The rows of a batch on any device."""
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
        content = {"contract": self.contract.to_json(), "shards": [entry._asdict() for entry in self.shards]}
        write_json(path, {"format": FORMAT, "sha256": _digest(content), **content})

    @classmethod
    def of(cls, directory: Path) -> Self:
        """That of a cache; ValueError if there is none, or none that is finished."""
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory: make it with specdec cache --out {directory}")
        if not (directory / INDEX).exists() and any(directory.glob("part-*")):
            raise ValueError(f"{directory}: not all parts of the cache are finished: run specdec cache for the others")
        if not (directory / INDEX).exists() and (directory / UNFINISHED).exists():
            raise ValueError(f"{directory}: the cache is not finished: run the same specdec cache command again")
        return cls.read(directory / INDEX)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check it.

        Raises:
            ValueError: it is missing, damaged or of another format.
        """
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: not a feature cache of this version ({FORMAT}): run specdec cache again")
        if content.pop("sha256", None) != _digest(content):
            raise ValueError(f"{path}: it was changed or damaged (its own hash differs): run specdec cache again")
        contract = content["contract"] | {"layers": tuple(content["contract"]["layers"])}
        return cls(Contract(**contract), [ShardEntry(**entry) for entry in content["shards"]])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class RowPlace(NamedTuple):
    """Where a row's states lie."""

    path: Path
    starts: tuple[int, int]  # bytes of the file before its ``aux_PNH`` and its ``final_PH``
    crc32: int


def crc32(*states: Tensor) -> int:
    """Of their bytes, one after another: 4 GB a second, where SHA-256 takes in two."""
    found = 0
    for state in states:
        found = zlib.crc32(_bytes(state), found)
    return found


def _bytes(state: Tensor) -> memoryview:
    return state.view(torch.uint8).numpy().data


def shard_rows(path: Path, token_bytes: tuple[int, int]) -> dict[bytes, RowPlace]:
    """A shard's rows by key; ``token_bytes``: of a token in ``aux_PNH`` and in ``final_PH``.

    Raises:
        ValueError: it is gone or cut off.
    """
    try:
        with safe_open(path, framework="pt", backend="pread") as file, path.open("rb") as stream:
            keys, sizes_E, crcs_E = (file.get_tensor(name) for name in ("keys", "sizes_E", "crcs_E"))
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            aux, final = (8 + length + header[name]["data_offsets"][0] for name in ("aux_PNH", "final_PH"))
            before_E = (sizes_E.cumsum(0) - sizes_E).tolist()
            places = [
                RowPlace(path, (aux + before * token_bytes[0], final + before * token_bytes[1]), crc)
                for before, crc in zip(before_E, crcs_E.tolist(), strict=True)
            ]
            return dict(zip(map(bytes, keys.numpy()), places, strict=True))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: the shard is gone, damaged or cut off ({error}): {REMEDY}") from error


def check_beside(directory: Path, folder: str, contract: Contract) -> None:
    """Raise ValueError where a cache, or a part of one in ``folder``, may not be made: ``directory`` holds another
    cache, another number of parts, or parts of something else."""
    parts = {path.name: path for path in directory.glob("part-*-of-*")}
    number = folder.rpartition("-")[2]
    whole = next(directory.glob("shard-*"), None)
    if odd := [name for name in parts if folder == "." or name.rpartition("-")[2] != number] or (
        [whole.name] if whole and folder != "." else []
    ):
        raise ValueError(f"{directory}: holds {odd[0]}, of a cache that was made otherwise: choose another --out")
    for name, path in parts.items():
        for index in filter(Path.exists, (path / INDEX, path / UNFINISHED)):
            if different := FeatureIndex.read(index).contract.differences(contract):
                raise ValueError(f"{directory}: {name} was made for something else: {different}")


def merge(directory: Path, parts: Sequence[str]) -> list[str]:
    """Write one index over the parts of a cache, folders within it, if all are finished; else the names of those that
    are not."""
    if missing := [name for name in parts if not (directory / name / INDEX).exists()]:
        return missing
    found = [FeatureIndex.read(directory / name / INDEX) for name in parts]
    shards = [
        entry._replace(file=f"{name}/{entry.file}")
        for name, one in zip(parts, found, strict=True)
        for entry in one.shards
    ]
    FeatureIndex(found[0].contract, shards).write(directory / INDEX)
    return []


class FeatureStore:
    """Features by row, each compared with its checksum as it is read. No shard is mapped into memory: one that is cut
    off would be a SIGBUS.

    Args:
        data: what reads it, as :func:`described` says; for messages.

    Raises:
        ValueError: there is no cache, it is not finished, or a shard is gone or damaged.
    """

    def __init__(self, directory: Path, data: Mapping[str, Any]) -> None:
        self.directory, self.data = directory, data
        self.contract, self.entries = FeatureIndex.of(directory)
        self._places: dict[bytes, RowPlace] = {}
        for entry in self.entries:
            self._places |= shard_rows(directory / entry.file, self.contract.sizes)

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
        changes = pairs(dict(self.contract.data), dict(self.data))
        reason = "; ".join(f"{name} was {words(a)}, is {words(b)}" for name, a, b in changes)
        reason = reason or "its files or the tokenizer have changed since"
        if (first := self.contract.first_rows) is not None:
            reason += f"; of training the first {how_many(first, 'row')} alone"
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

    def read(self, row: PackedRow, taps: Sequence[int], aux_TNH: Tensor, final_TH: Tensor) -> None:
        """Copy a row's states to ``aux_TNH``, of the stored boundaries numbered ``taps``, and to ``final_TH``.

        Raises:
            ValueError: the row is not there, or damaged.
        """
        if not row.tokens:
            return
        self.check(row)
        place, R, N = self._places[row.key], row.tokens, len(self.contract.layers)
        path = place.path
        direct = aux_TNH.shape[1] == N and [*taps] == [*range(N)]  # no copy
        aux_RNH = aux_TNH[:R] if direct else aux_TNH.new_empty(R, N, self.contract.hidden_size)
        states = aux_RNH, final_TH[:R]
        with explained(path), path.open("rb", buffering=0) as file:
            for start, state in zip(place.starts, states, strict=True):
                file.seek(start)
                if state.numel() and file.readinto(_bytes(state)) != state.nbytes:
                    raise ValueError(f"{path}: it is cut off: {REMEDY}")
        if crc32(*states) != place.crc32:
            raise ValueError(f"{path}: a row's CRC-32 is not the one that was written with it: {REMEDY}")
        for n, tap in enumerate(() if direct else taps):
            aux_TNH[:R, n] = aux_RNH[:, tap]


class CacheWriter:
    """Writes whole shards one after another, an index of them after each, and in the end the index's final name.

    Rows come in one order, whatever process brings them: what is on disk is never written twice.

    Args:
        directory: where; it may hold whole shards of the same contract, from which it goes on.
        shard_bytes: a shard's size at most, unless a single row is larger.

    Raises:
        ValueError: the folder holds a cache of something else.
    """

    def __init__(self, directory: Path, contract: Contract, shard_bytes: int) -> None:
        self.directory, self.contract = directory, contract
        self.capacity = max(1, shard_bytes // contract.token_bytes)
        self.shards: list[ShardEntry] = []
        self.known: set[bytes] = set()  # keys of rows that are stored
        self._rows: list[tuple[PackedRow, Tensor, Tensor]] = []
        if earlier := [path for path in (directory / UNFINISHED, directory / INDEX) if path.exists()]:
            self._resume(earlier[0])

    @classmethod
    @contextlib.contextmanager
    def building(cls, directory: Path, contract: Contract, shard_bytes: int) -> Iterator[Self]:
        """A writer, while no other process has one here; the index appears if the block ends well."""
        with locked(directory / ".lock"):
            writer = cls(directory, contract, shard_bytes)
            yield writer
            writer.finish()

    def _resume(self, path: Path) -> None:
        """Keep the shards up to the first that is gone or damaged: that one and the later ones are made again."""
        earlier = FeatureIndex.read(path)
        if different := earlier.contract.differences(self.contract):
            raise ValueError(f"{path}: made for something else: {different}; choose another --out")
        for entry in earlier.shards:
            try:
                entry.verify(self.directory)
                rows = shard_rows(self.directory / entry.file, self.contract.sizes)
            except ValueError as error:
                log.warning("made again from here on: %s", error)
                break
            self.known.update(rows)
            self.shards.append(entry)
        if self.shards:
            log.info("%s: goes on after %s", self.directory, how_many(len(self.shards), "whole shard"))

    def add(self, row: PackedRow, aux_RNH: Tensor, final_RH: Tensor) -> None:
        """Store a row's states.

        Raises:
            ValueError: they are not finite, or the disk is full.
        """
        if self._rows and sum(one.tokens for one, _, _ in self._rows) + row.tokens > self.capacity:
            self._flush()
        dtype = DTYPES[self.contract.dtype]
        aux_RNH, final_RH = (state.to("cpu", dtype).contiguous() for state in (aux_RNH, final_RH))
        self._rows.append((row, aux_RNH, final_RH))
        self.known.add(row.key)

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            ValueError: states are not finite, or the disk is full.
        """
        if self._rows:
            self._flush()
        FeatureIndex(self.contract, self.shards).write(self.directory / INDEX)
        (self.directory / UNFINISHED).unlink(missing_ok=True)

    def _flush(self) -> None:
        """Write what has gathered as a shard, then the index of all so far."""
        rows, aux, final = zip(*self._rows, strict=True)
        aux_PNH, final_PH = torch.cat(aux), torch.cat(final)
        keys = torch.frombuffer(bytearray(b"".join(row.key for row in rows)), dtype=torch.uint8).view(len(rows), -1)
        sizes_E = torch.tensor([row.tokens for row in rows])
        crcs_E = torch.tensor([crc32(*states) for states in zip(aux, final, strict=True)])
        small = {"keys": keys, "sizes_E": sizes_E, "crcs_E": crcs_E}
        path = self.directory / f"shard-{len(self.shards):05}.safetensors"
        names = (*(f"boundary {b}" for b in self.contract.layers), "the final state")
        for name, state_PH in zip(names, (*aux_PNH.unbind(1), final_PH), strict=True):
            if not state_PH.isfinite().all():
                raise ValueError(f"{path}: {name} holds NaN or infinity: run the target in a wider dtype")
        with staged(path) as temporary:
            try:
                save_file({"aux_PNH": aux_PNH, "final_PH": final_PH, **small}, temporary)
            except SafetensorError as error:
                raise ValueError(f"{path}: the shard cannot be written: {error}") from error
            digest = sha256(temporary)
        self.shards.append(ShardEntry(path.name, len(final_PH), len(rows), digest))
        FeatureIndex(self.contract, self.shards).write(self.directory / UNFINISHED)
        self._rows = []
