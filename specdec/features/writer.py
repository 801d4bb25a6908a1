"""Writing a cache: whole shards one after another, a journal of them, and the index last.

Legend: P tokens of a shard, M tokens of a row, N stored boundaries, H hidden.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from specdec.features.contract import DTYPES, Contract
from specdec.features.index import INDEX, JOURNAL, Index
from specdec.features.pieces import PackedRow
from specdec.features.shard import Contents, Entry, check_finite, open_shard, shard_name, verify_shard, write_shard
from specdec.shared import locked
from specdec.values import pairs, words

log = logging.getLogger(__name__)


class CacheWriter:
    """Takes rows in one order, whatever process brings them: what is on disk is never written twice.

    Args:
        directory: where; it may hold whole shards of the same contract, from which it goes on.
        shard_bytes: a shard's size at most, unless a single row is larger.

    Raises:
        ValueError: the folder holds a cache of something else, or a damaged shard.
    """

    def __init__(self, directory: Path, contract: Contract, shard_bytes: int) -> None:
        self.directory, self.contract = directory, contract
        self.capacity = max(1, shard_bytes // contract.token_bytes)
        self.shards: list[Entry] = []
        self.known: set[bytes] = set()  # keys of rows and pieces that are stored
        self._clear()
        for stale in directory.glob(".tmp-*"):
            stale.unlink()
        for earlier in (directory / JOURNAL, directory / INDEX):
            if earlier.exists():
                self._resume(earlier, Index.read(earlier))
                break

    @classmethod
    @contextlib.contextmanager
    def building(cls, directory: Path, contract: Contract, shard_bytes: int) -> Iterator[Self]:
        """A writer, while no other process has one here; the index appears if the block ends well."""
        with locked(directory / ".lock"):
            writer = cls(directory, contract, shard_bytes)
            yield writer
            writer.finish()

    def _resume(self, path: Path, earlier: Index) -> None:
        """Keep the shards up to the first that is gone or damaged: that one and the later ones are made again."""
        engines = (earlier.contract.engine, self.contract.engine)
        if engines[1] not in engines[0].split("; then "):  # of equal numbers up to rounding
            log.warning("%s: begun by %s, goes on by %s", path.parent, *engines)
            self.contract = dataclasses.replace(self.contract, engine="; then ".join(engines))
        else:
            self.contract = dataclasses.replace(self.contract, engine=engines[0])
        made, now = earlier.contract.to_json() | {"engine": ""}, self.contract.to_json() | {"engine": ""}
        if different := [f"{key} was {words(a)}, is {words(b)}" for key, a, b in pairs(made, now)]:
            raise ValueError(f"{path}: made for something else: {'; '.join(different)}; choose another --out")
        for entry in earlier.shards:
            shard = self.directory / entry.file
            try:
                verify_shard(shard, entry)
                keys = open_shard(shard, entry, self.contract).keys
            except ValueError as error:
                log.warning("made again from here on: %s", error)
                break
            self.known.update(bytes(key) for key in keys.numpy())
            self.shards.append(entry)
        if self.shards:
            log.info("%s: goes on after %d whole shards", self.directory, len(self.shards))

    def _clear(self) -> None:
        self._rows: list[tuple[PackedRow, Tensor, Tensor]] = []
        self._tokens = 0

    def holds(self, row: PackedRow) -> bool:
        """Whether the row is stored, or has nothing to store."""
        return not row.tokens or row.key in self.known

    def add(self, row: PackedRow, aux_MNH: Tensor, final_MH: Tensor) -> None:
        """Store a row's states, those of its pieces one after another.

        Raises:
            ValueError: they are not finite, or the disk is full.
        """
        if self._rows and self._tokens + row.tokens > self.capacity:
            self._flush()
        dtype = DTYPES[self.contract.dtype]
        self._rows.append((row, aux_MNH.to("cpu", dtype), final_MH.to("cpu", dtype)))
        self._tokens += row.tokens
        self.known.update((row.key, *row.piece_keys))

    def _flush(self) -> None:
        """Write what has gathered as a shard, then the journal."""
        keys, spans, ids, first = [], [], [], 0
        for row, _, _ in self._rows:
            start = first
            for key, (begin, end) in zip(row.piece_keys, row.spans, strict=True):
                keys.append(key)
                spans.append((first, end - begin))
                ids.append(row.ids_R[begin:end])
                first += end - begin
            keys.append(row.key)
            spans.append((start, row.tokens))
        contents = Contents(
            torch.cat([aux_MNH for _, aux_MNH, _ in self._rows]),
            torch.cat([final_MH for _, _, final_MH in self._rows]),
            torch.cat(ids),
            torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), -1),
            torch.tensor(spans, dtype=torch.int64),
        )
        path = self.directory / shard_name(len(self.shards))
        check_finite(str(path), contents, self.contract)
        pieces = sum(len(row.spans) for row, _, _ in self._rows)
        self.shards.append(write_shard(path, contents, pieces, len(self._rows)))
        Index(self.contract, self.shards).write(self.directory / JOURNAL)
        self._clear()

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            ValueError: there was not a token, or the disk is full.
        """
        if self._rows:
            self._flush()
        if not self.shards:
            raise ValueError(f"{self.directory}: the data has no tokens, there is nothing to store")
        Index(self.contract, self.shards).write(self.directory / INDEX)
        (self.directory / JOURNAL).unlink(missing_ok=True)
