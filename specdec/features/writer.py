"""Writing a cache: whole shards one after another, an index of them after each, under its final name at the end.

Legend: R tokens of a row, N stored boundaries, H hidden.
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

from specdec.features.store import DTYPES, INDEX, UNFINISHED, Contract, FeatureIndex, PackedRow, Shard, ShardEntry
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
        self.known: set[bytes] = set()  # keys of rows that are stored
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

    def add(self, row: PackedRow, aux_RNH: Tensor, final_RH: Tensor) -> None:
        """Store a row's states.

        Raises:
            ValueError: they are not finite, or the disk is full.
        """
        if self._rows and sum(one.tokens for one, _, _ in self._rows) + row.tokens > self.capacity:
            self._flush()
        dtype = DTYPES[self.contract.dtype]
        self._rows.append((row, aux_RNH.to("cpu", dtype), final_RH.to("cpu", dtype)))
        self.known.add(row.key)

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
        rows, aux, final = zip(*self._rows, strict=True)
        shard = Shard(
            torch.cat(aux),
            torch.cat(final),
            torch.frombuffer(bytearray(b"".join(row.key for row in rows)), dtype=torch.uint8).view(len(rows), -1),
            torch.tensor([row.tokens for row in rows]),
        )
        path = self.directory / f"shard-{len(self.shards):05}.safetensors"
        states = dict(zip((f"boundary {b}" for b in self.contract.layers), shard.aux_PNH.unbind(1), strict=True))
        for name, state_PH in {**states, "the final state": shard.final_PH}.items():
            if not state_PH.isfinite().all():
                raise ValueError(f"{path}: {name} holds NaN or infinity: run the target in a wider dtype")
        with staged(path) as temporary:
            try:
                save_file(shard._asdict(), temporary)
            except SafetensorError as error:
                raise ValueError(f"{path}: the shard cannot be written: {error}") from error
            digest = sha256(temporary)
        self.shards.append(ShardEntry(path.name, len(shard.final_PH), len(rows), digest))
        FeatureIndex(self.contract, self.shards).write(self.directory / UNFINISHED)
        self._rows = []
