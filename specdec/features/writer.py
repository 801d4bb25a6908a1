"""Writing a cache: whole shards one after another, an index of them after each, under its final name at the end.

Legend: P tokens of a shard, M tokens of a row's pieces, N stored boundaries, H hidden.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.features.contract import DTYPES, Contract
from specdec.features.store import INDEX, UNFINISHED, FeatureIndex, PackedRow, Shard, ShardEntry
from specdec.utils.config_diff import pairs, words
from specdec.utils.files import locked, sha256, staged

log = logging.getLogger(__name__)


class CacheWriter:
    """Takes rows in one order, whatever process brings them: what is on disk is never written twice.

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
        self.known: set[bytes] = set()  # keys of rows and pieces that are stored
        self._rows: list[tuple[PackedRow, Tensor, Tensor]] = []
        for stale in directory.glob(".tmp-*"):
            stale.unlink()
        for earlier in (directory / UNFINISHED, directory / INDEX):
            if earlier.exists():
                self._resume(earlier, FeatureIndex.read(earlier))
                break

    @classmethod
    @contextlib.contextmanager
    def building(cls, directory: Path, contract: Contract, shard_bytes: int) -> Iterator[Self]:
        """A writer, while no other process has one here; the index appears if the block ends well."""
        with locked(directory / ".lock"):
            writer = cls(directory, contract, shard_bytes)
            yield writer
            writer.finish()

    def _resume(self, path: Path, earlier: FeatureIndex) -> None:
        """Keep the shards up to the first that is gone or damaged: that one and the later ones are made again."""
        changes = pairs(earlier.contract.to_json(), self.contract.to_json())
        if different := [f"{key} was {words(a)}, is {words(b)}" for key, a, b in changes]:
            raise ValueError(f"{path}: made for something else: {'; '.join(different)}; choose another --out")
        for entry in earlier.shards:
            try:
                entry.verify(self.directory)
                keys = Shard.open(self.directory, entry, self.contract).keys
            except ValueError as error:
                log.warning("made again from here on: %s", error)
                break
            self.known.update(bytes(key) for key in keys.numpy())
            self.shards.append(entry)
        if self.shards:
            log.info("%s: goes on after %d whole shards", self.directory, len(self.shards))

    def holds(self, row: PackedRow) -> bool:
        """Whether the row is stored, or has nothing to store."""
        return not row.tokens or row.key in self.known

    def add(self, row: PackedRow, aux_MNH: Tensor, final_MH: Tensor) -> None:
        """Store a row's states, those of its pieces one after another.

        Raises:
            ValueError: they are not finite, or the disk is full.
        """
        if self._rows and sum(one.tokens for one, _, _ in self._rows) + row.tokens > self.capacity:
            self._flush()
        dtype = DTYPES[self.contract.dtype]
        self._rows.append((row, aux_MNH.to("cpu", dtype), final_MH.to("cpu", dtype)))
        self.known.update((row.key, *row.piece_keys))

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            ValueError: there was not a token, or the disk is full.
        """
        if self._rows:
            self._flush()
        if not self.shards:
            raise ValueError(f"{self.directory}: the data has no tokens, there is nothing to store")
        FeatureIndex(self.contract, self.shards).write(self.directory / INDEX)
        (self.directory / UNFINISHED).unlink(missing_ok=True)

    def _flush(self) -> None:
        """Write what has gathered as a shard, then the index of all so far."""
        keys, spans, ids, end = [], [], [], 0
        for row, _, _ in self._rows:
            start = end
            for key, (first, last) in zip(row.piece_keys, row.spans, strict=True):
                keys.append(key)
                spans.append((end, last - first))
                ids.append(row.ids_R[first:last])
                end += last - first
            keys.append(row.key)
            spans.append((start, row.tokens))
        shard = Shard(
            torch.cat([aux_MNH for _, aux_MNH, _ in self._rows]),
            torch.cat([final_MH for _, _, final_MH in self._rows]),
            torch.cat(ids),
            torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), -1),
            torch.tensor(spans, dtype=torch.int64),
        )
        path = self.directory / f"shard-{len(self.shards):05}.safetensors"
        states = zip(shard.aux_PNH.unbind(1), self.contract.layers, strict=True)
        for state_PH, name in [*((x, f"boundary {b}") for x, b in states), (shard.final_PH, "the final state")]:
            if not (good_P := state_PH.isfinite().all(-1)).all():
                token = int((~good_P).nonzero()[0, 0])
                value = float(state_PH[token][~state_PH[token].isfinite()][0])
                raise ValueError(f"{path}: {name} of token {token} holds {value}: run the target in a wider dtype")
        with staged(path) as temporary:
            try:
                save_file(shard._asdict(), temporary)
            except SafetensorError as error:
                raise ValueError(f"{path}: the shard cannot be written: {error}") from error
            digest = sha256(temporary)
        pieces = sum(len(row.spans) for row, _, _ in self._rows)
        self.shards.append(ShardEntry(path.name, end, pieces, len(self._rows), digest))
        FeatureIndex(self.contract, self.shards).write(self.directory / UNFINISHED)
        self._rows = []
