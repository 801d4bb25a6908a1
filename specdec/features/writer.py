"""Writing a cache of features: shards of whole rows one after another, alone or as a part of one cache.

Legend: R tokens of a row, P tokens of a shard, N boundaries, H hidden, E rows of a shard.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.features.contract import Contract
from specdec.features.store import (
    INDEX,
    UNFINISHED,
    FeatureIndex,
    PackedRow,
    ShardEntry,
    crc32,
    shard_rows,
)
from specdec.utils.files import staged
from specdec.utils.locks import locked
from specdec.utils.reading import sha256
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

SHARD_BYTES = 512_000_000


def part_folder(number: int, parts: int) -> str:
    """Where a part is written, within the cache's directory."""
    return "." if parts == 1 else f"part-{number + 1}-of-{parts}"


def check_beside(directory: Path, folder: str, contract: Contract) -> None:
    """Raise ValueError where a cache, or a part of one in ``folder``, may not be made: ``directory`` holds another
    cache, another number of parts, or parts of something else."""
    parts = {path.name: path for path in directory.glob("part-*-of-*")}
    number = folder.rpartition("-")[2]
    whole = next(directory.glob("shard-*"), None)
    if odd := [name for name in parts if folder == "." or name.rpartition("-")[2] != number] or (
        [whole.name] if whole and folder != "." else []
    ):
        raise ValueError(
            f"{directory}: holds {odd[0]}, of a cache that was made otherwise: choose another --out"
        )
    for name, path in parts.items():
        for index in filter(Path.exists, (path / INDEX, path / UNFINISHED)):
            if different := FeatureIndex.read(index).contract.differences(contract):
                raise ValueError(f"{directory}: {name} was made for something else: {different}")


def merge(directory: Path, parts: Sequence[str]) -> list[str]:
    """Write one index over the parts of a cache, folders within it, if all are finished; else the names of those that
    are not."""
    if missing := [name for name in parts if not (directory / name / INDEX).exists()]:
        return missing
    indices = [FeatureIndex.read(directory / name / INDEX) for name in parts]
    shards = [
        entry._replace(file=f"{name}/{entry.file}")
        for name, index in zip(parts, indices, strict=True)
        for entry in index.shards
    ]
    FeatureIndex(indices[0].contract, shards).write(directory / INDEX)
    return []


class CacheWriter:
    """Writes whole shards one after another, an index of them after each, and in the end the index's final name.

    Rows come in one order, whatever process brings them: what is on disk is never written twice. A shard is written in
    a thread while the next one gathers.

    Args:
        directory: where; it may hold whole shards of the same contract, from which it resumes.
        shard_bytes: a shard's size at most, unless a single row is larger.

    Raises:
        ValueError: the folder holds a cache of something else.
    """

    def __init__(self, directory: Path, contract: Contract, shard_bytes: int) -> None:
        self.directory = directory
        self.contract = contract
        self.capacity = max(1, shard_bytes // contract.token_bytes)
        self.shards: list[ShardEntry] = []
        self.known: set[bytes] = set()  # keys of rows that are stored
        self._rows: list[tuple[PackedRow, tuple[Tensor, ...]]] = []
        self._thread = ThreadPoolExecutor(1, "shards")
        self._written = Future[None]()
        self._written.set_result(None)
        if earlier := [
            path for path in (directory / UNFINISHED, directory / INDEX) if path.exists()
        ]:
            self._resume(earlier[0])

    @classmethod
    @contextlib.contextmanager
    def building(cls, directory: Path, contract: Contract, shard_bytes: int) -> Iterator[Self]:
        """A writer, while no other process has one here; the index appears if the block ends well."""
        with locked(directory / ".lock"):
            writer = cls(directory, contract, shard_bytes)
            try:
                yield writer
                writer.finish()
            finally:
                writer._thread.shutdown()

    def _resume(self, path: Path) -> None:
        """Keep the shards up to the first that is gone or damaged: that one and the later ones are made again."""
        earlier = FeatureIndex.read(path)
        if different := earlier.contract.differences(self.contract):
            raise ValueError(f"{path}: made for something else: {different}; choose another --out")
        for entry in earlier.shards:
            try:
                entry.verify(self.directory)
                rows = shard_rows(self.directory / entry.file, self.contract.columns())
            except ValueError as error:
                log.warning("made again from here on: %s", error)
                break
            self.known.update(rows)
            self.shards.append(entry)
        if self.shards:
            log.info(
                "%s: resumes after %s", self.directory, how_many(len(self.shards), "whole shard")
            )

    def add(self, row: PackedRow, aux_RNH: Tensor, final_RH: Tensor) -> None:
        """Store a row's states.

        Raises:
            ValueError: they are not finite, or the disk is full.
        """
        self.add_columns(row, self.contract.encode(aux_RNH, final_RH))

    def add_columns(self, row: PackedRow, columns: tuple[Tensor, ...]) -> None:
        """The same of states that are encoded."""
        waiting = sum(earlier.tokens for earlier, _ in self._rows)
        if self._rows and waiting + row.tokens > self.capacity:
            self._flush()
        self._rows.append((row, columns))
        self.known.add(row.key)

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            ValueError: states are not finite, or the disk is full.
        """
        self.flush()
        FeatureIndex(self.contract, self.shards).write(self.directory / INDEX)
        (self.directory / UNFINISHED).unlink(missing_ok=True)

    def flush(self) -> None:
        """Write what has gathered as a shard, and wait for it; ValueError as :meth:`finish`."""
        if self._rows:
            self._flush()
        self._written.result()

    def _flush(self) -> None:
        """Have the thread write what has gathered, when it is done with the shard before."""
        self._written.result()
        self._written = self._thread.submit(self._write, self._rows)
        self._rows = []

    def _write(self, gathered: list[tuple[PackedRow, tuple[Tensor, ...]]]) -> None:
        """A shard, then the index of all so far."""
        rows, columns = zip(*gathered, strict=True)
        whole = {
            name: torch.cat(parts)
            for name, parts in zip(self.contract.columns(), zip(*columns, strict=True), strict=True)
        }
        keys = torch.frombuffer(
            bytearray(b"".join(row.key for row in rows)), dtype=torch.uint8
        ).view(len(rows), -1)
        sizes_E = torch.tensor([row.tokens for row in rows])
        crcs_E = torch.tensor([crc32(*row_columns) for row_columns in columns])
        path = self.directory / f"shard-{len(self.shards):05}.safetensors"
        with staged(path) as temporary:
            try:
                save_file(whole | {"keys": keys, "sizes_E": sizes_E, "crcs_E": crcs_E}, temporary)
            except SafetensorError as error:
                raise ValueError(f"{path}: the shard cannot be written: {error}") from error
            digest = sha256(temporary)
        self.shards.append(ShardEntry(path.name, int(sizes_E.sum()), len(rows), digest))
        FeatureIndex(self.contract, self.shards).write(self.directory / UNFINISHED)
