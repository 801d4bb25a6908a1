"""Features from a cache on disk, the next batch's read while the present one is trained on.

Legend: B batch, T tokens, N asked boundaries, H hidden.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from specdec.data import Batch, TokenData
from specdec.features.contract import DTYPES, described
from specdec.features.pieces import PackedRow, packed_rows
from specdec.features.source import Features, Source
from specdec.features.spot_check import spot_check
from specdec.features.store import Store
from specdec.target import Target, TargetOutput
from specdec.values import words

log = logging.getLogger(__name__)

Keys = tuple[bytes, ...]


@dataclass(frozen=True)
class Cached(Features):
    """Features that ``specdec cache`` has stored.

    Args:
        directory: the cache.
        verify: check every shard before the first step, instead of each when it is first read from.
    """

    directory: str
    verify: bool = False

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> Source:
        """Check target, boundaries, data and, on one piece, the numbers themselves.

        Raises:
            ValueError: the cache is not of this target, or lacks a boundary or a row.
        """
        store = Store(Path(self.directory), described(data))
        source = CachedSource(store, target, layers, final_norm)
        for rows in (data.first_rows(store.contract.first_rows), data.splits.validation):
            for row in packed_rows(rows):
                store.find(row)
        if self.verify:
            store.verify()
        spot_check(store, target)
        contract = store.contract
        log.info(
            "features: %s, %d tokens in %d shards, boundaries %s in %s, by %s", self.directory,
            sum(entry.tokens for entry in store.index.shards), len(store.index.shards), list(contract.layers),
            contract.dtype, contract.engine,
        )  # fmt: skip
        return source


class CachedSource(Source):
    """Reads batches; one thread reads ahead.

    Raises:
        ValueError: the cache is of another target or dtype, or a boundary was not stored.
    """

    def __init__(self, store: Store, target: Target, layers: Sequence[int], final_norm: bool) -> None:
        self.store, self.dtype = store, target.dtype
        contract, where = store.contract, store.directory
        if contract.target["fingerprint"] != target.identity["fingerprint"]:
            raise ValueError(
                f"{where}: made with another target, {words(contract.target['source'])} of fingerprint "
                f"{words(contract.target['fingerprint'])}; this one is {words(target.identity['source'])} of "
                f"{words(target.identity['fingerprint'])}"
            )
        own = str(target.dtype).removeprefix("torch.")
        if contract.target_dtype != own:
            raise ValueError(
                f"{where}: made with the target in {contract.target_dtype}, which runs in {own} here: set "
                f"model.target.dtype={contract.target_dtype}, or run specdec cache again"
            )
        self.final_norm = final_norm
        stored = [b for b in layers if b < target.num_layers or not final_norm]
        if missing := [b for b in stored if b not in contract.layers]:
            raise ValueError(
                f"{where}: boundaries {missing} are not stored, only {list(contract.layers)}: run specdec cache with "
                f"--layers {words(sorted({*stored, *contract.layers}))!r} into another directory"
            )
        if contract.dtype != own:
            log.warning("%s: states of %s, rounded to %s when they were stored", where, own, contract.dtype)
        self.layers, self.first_rows = tuple(layers), contract.first_rows
        self.taps = [contract.layers.index(b) for b in stored]
        self._thread = ThreadPoolExecutor(1, "features")
        self._ahead: dict[Keys, Future[TargetOutput]] = {}
        self._lock = threading.Lock()

    def announce(self, batch: Batch) -> None:
        """Read it in the thread; at most the present batch and the next are kept.

        Behind a run's last batch comes one that nobody asks for, which a cache of the first rows need not have.
        """
        rows = packed_rows(batch)
        if self.first_rows is not None and not all(map(self.store.holds, rows)):
            return
        with self._lock:
            while len(self._ahead) > 1:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[_keys(rows)] = self._thread.submit(self._read, rows, batch.ids_BT.shape[1])

    def ready(self, batch: Batch) -> None:
        """Wait for the thread, or read what nobody announced."""
        rows = packed_rows(batch)
        if _keys(rows) not in self._ahead:
            self.announce(batch)
        if (ahead := self._ahead.get(_keys(rows))) is not None:
            ahead.result()

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """The stored states of every row."""
        if (tuple(layers), final_norm) != (self.layers, self.final_norm):
            raise ValueError(f"{self.store.directory}: opened for boundaries {list(self.layers)}, not {list(layers)}")
        rows = packed_rows(batch)
        with self._lock:
            ahead = self._ahead.pop(_keys(rows), None)
        found = self._read(rows, batch.ids_BT.shape[1]) if ahead is None else ahead.result()
        return TargetOutput(*(x.to(target.device, self.dtype, non_blocking=True) for x in found))

    def close(self) -> None:
        """End the thread, and forget what it has read."""
        with self._lock:
            self._thread.shutdown(cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, "features")  # starts none before it is needed
            self._ahead.clear()

    def _read(self, rows: list[PackedRow], T: int) -> TargetOutput:
        contract = self.store.contract
        zeros = partial(torch.zeros, dtype=DTYPES[contract.dtype], pin_memory=torch.cuda.is_available())
        aux_BTNH = zeros(len(rows), T, len(self.layers), contract.hidden_size)
        final_BTH = zeros(len(rows), T, contract.hidden_size)
        for row, aux_TNH, final_TH in zip(rows, aux_BTNH, final_BTH, strict=True):
            self.store.read(row, self.taps, aux_TNH, final_TH)
        if len(self.taps) < len(self.layers):  # the last boundary, after the final norm
            aux_BTNH[:, :, -1] = final_BTH
        return TargetOutput(aux_BTNH, final_BTH)


def _keys(rows: list[PackedRow]) -> Keys:
    return tuple(row.key for row in rows)
