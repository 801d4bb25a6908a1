"""Where training gets the target's features from: the target itself in the step, or a cache on disk.

Legend: B batch, T tokens, N boundaries, H hidden, R tokens up to the last that is no padding.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from specdec.data import Batch, TokenData
from specdec.features.store import DTYPES, FeatureIndex, FeatureStore, PackedRow, described, packed_rows
from specdec.nn.view import View
from specdec.target import Target, TargetOutput
from specdec.target.rounding import apart, own_states
from specdec.utils.numbers import Side, check_numbers

log = logging.getLogger(__name__)

SPOT_TOKENS = 512  # of a row that are worked out again, at most


class FeatureSource:
    """Features of batches, in the target's dtype on its device; those of padding are undefined."""

    first_rows: int | None = None  # how many training rows it has, those that an epoch draws first; None if all
    prefetch: Callable[[Batch, Batch | None], None] | None = None
    """Called with a batch and the following one, or None, before the batch is handed out: to read ahead."""

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """As :meth:`specdec.target.Target.forward` of ``View.packed``, for rows of packed documents."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is not needed between runs; the source may be used again."""


class Features:
    """Base of the ways to features: a frozen spec."""

    def introduce(self, target: Target) -> None:
        """Tell parts of a target which one they are of; ValueError if these features need it whole."""
        raise ValueError(
            f"model.target.parts: features {type(self).__name__} run the target's layers: use features Cached, or set "
            "parts to false"
        )

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> FeatureSource:
        """The source of a run that reads these boundaries of this data.

        Raises:
            ValueError: it has no features of this target, these boundaries or this data.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OnTheFly(Features, FeatureSource):
    """The target runs in the training step, without gradient.

    Args:
        rows: rows that it reads together: those of the ``batch``, or so many. One makes a row's features independent
            of the rows beside it whatever the kernels do, hence those of a cache to the last bit.
    """

    rows: Side | Literal["batch"] = "batch"

    def __post_init__(self) -> None:
        check_numbers(OnTheFly, vars(self), "model.features.")

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> FeatureSource:
        """Itself: there is nothing to open."""
        return self

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """The whole batch, or groups of rows, each up to its last token that is no padding."""
        if self.rows == "batch":
            return target.forward(batch.ids_BT, View.packed(batch.documents_BT), layers, final_norm)
        B, T = batch.ids_BT.shape
        weight = target.embedding_weight()
        aux_BTNH = weight.new_zeros(B, T, len(layers), target.hidden_size)
        final_BTH = weight.new_zeros(B, T, target.hidden_size)
        for start in range(0, B, self.rows):
            group = slice(start, start + self.rows)
            ids_GT, documents_GT = batch.ids_BT[group], batch.documents_BT[group]
            R = int((documents_GT >= 0).sum(1).max())
            if R:
                out = target.forward(ids_GT[:, :R], View.packed(documents_GT[:, :R]), layers, final_norm)
                aux_BTNH[group, :R], final_BTH[group, :R] = out
        return TargetOutput(aux_BTNH, final_BTH)


@dataclass(frozen=True)
class Cached(Features):
    """Features that ``specdec cache`` has stored.

    Args:
        directory: the cache. A row's checksum is compared as it is read.
    """

    directory: str

    def introduce(self, target: Target) -> None:
        """They are of the target that the cache was made with; ValueError if that has others."""
        target.take_identity(FeatureIndex.of(Path(self.directory)).contract.target)

    def open(self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool) -> FeatureSource:
        """Check target, boundaries, data and, on one row, the numbers themselves.

        Raises:
            ValueError: the cache is not of this target, or lacks a boundary or a row.
        """
        store = FeatureStore(Path(self.directory), described(data))
        source = CachedSource(store, target, layers, final_norm)
        rows = [*packed_rows(data.first_rows(store.contract.first_rows)), *packed_rows(data.splits.validation)]
        for row in rows:
            store.check(row)
        if target.whole:
            spot_check(store, target, rows[0])
        else:
            log.warning("the cache's numbers are taken as they are: parts of a target cannot work one out again")
        log.info("features: %s, boundaries %s, by %s", self.directory, store.contract.layers, store.contract.engine)
        return source


class CachedSource(FeatureSource):
    """Reads batches; one thread reads the next while the present one is trained on.

    Raises:
        ValueError: the cache is of another target or dtype, or a boundary was not stored.
    """

    def __init__(self, store: FeatureStore, target: Target, layers: Sequence[int], final_norm: bool) -> None:
        contract, where = store.contract, store.directory
        if not target.is_of(contract.target):
            raise ValueError(f"{where}: made with another target, {contract.target['source']}, or other weights of it")
        dtype = str(target.dtype).removeprefix("torch.")
        if contract.target_dtype != dtype:
            raise ValueError(
                f"{where}: made with the target in {contract.target_dtype}, which runs in {dtype} here: set "
                f"model.target.dtype={contract.target_dtype}, or run specdec cache again"
            )
        stored = [b for b in layers if b < target.num_layers or not final_norm]
        if missing := [b for b in stored if b not in contract.layers]:
            raise ValueError(
                f"{where}: boundaries {missing} are not stored, only {list(contract.layers)}: run specdec cache with "
                f"--layers {' '.join(map(str, sorted({*stored, *contract.layers})))} into another directory"
            )
        if contract.dtype != dtype:
            log.warning("%s: states of %s, rounded to %s when they were stored", where, dtype, contract.dtype)
        self.store, self.dtype, self.final_norm, self.layers = store, target.dtype, final_norm, tuple(layers)
        self.first_rows = contract.first_rows
        self.taps = [contract.layers.index(b) for b in stored]
        self._thread = ThreadPoolExecutor(1, "features")
        self._ahead: dict[tuple[bytes, ...], Future[TargetOutput]] = {}

    def prefetch(self, batch: Batch, following: Batch | None) -> None:
        """Read the following batch in the thread and wait for this one; no more than these two are kept.

        Behind a run's last batch comes one that is not trained on, which a cache of the first rows need not have.
        """
        before, self._ahead = self._ahead, {}
        for one in (batch, following):
            rows = [] if one is None else packed_rows(one)
            if one is not None and all(map(self.store.holds, rows)):
                keys = _keys(rows)
                self._ahead[keys] = before.get(keys) or self._thread.submit(self._read, rows, one.ids_BT.shape[1])
        wait(list(self._ahead.values())[:1])

    def __call__(self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool) -> TargetOutput:
        """The stored states of every row."""
        if (tuple(layers), final_norm) != (self.layers, self.final_norm):
            raise ValueError(f"{self.store.directory}: opened for boundaries {list(self.layers)}, not {list(layers)}")
        rows = packed_rows(batch)
        ahead = self._ahead.pop(_keys(rows), None)
        found = self._read(rows, batch.ids_BT.shape[1]) if ahead is None else ahead.result()
        return TargetOutput(*(x.to(target.device, self.dtype, non_blocking=True) for x in found))

    def close(self) -> None:
        """End the thread, and forget what it has read."""
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


@torch.no_grad()
def spot_check(store: FeatureStore, target: Target, row: PackedRow) -> None:
    """Compare a stored row with the target, boundary by boundary, so that a wrong tap shows before the first step.

    Raises:
        ValueError: they differ by more than rounding, or another boundary is nearer than the one that is named.
    """
    contract, where, M = store.contract, store.directory, min(row.tokens, SPOT_TOKENS)
    zeros = partial(torch.zeros, row.tokens, dtype=DTYPES[contract.dtype])
    aux_RNH, final_RH = zeros(len(contract.layers), target.hidden_size), zeros(target.hidden_size)
    store.read(row, range(len(contract.layers)), aux_RNH, final_RH)
    ids_1M, documents_1M = (x[None, :M].to(target.device) for x in (row.ids_R, row.documents_R))
    own = target.forward(ids_1M, View.packed(documents_1M), range(target.num_layers + 1))
    *allowed, allowed_final, _ = own_states(target, DTYPES[contract.dtype]).allowed
    for n, boundary in enumerate(contract.layers):
        off = [float(apart(aux_RNH[:M, n], state_MH).median()) for state_MH in own.aux_BTNH[0].unbind(1)]
        nearest = min(range(len(off)), key=off.__getitem__)
        if off[boundary] > allowed[boundary] or off[nearest] < off[boundary] / 2:
            raise ValueError(
                f"{where}: what is stored for boundary {boundary} is not the target's (off by {off[boundary]:.1e}, "
                f"allowed {allowed[boundary]:.1e}; nearest is boundary {nearest}, off by {off[nearest]:.1e}): "
                "run specdec cache again"
            )
    if (far := float(apart(final_RH[:M], own.final_BTH[0]).median())) > allowed_final:
        raise ValueError(f"{where}: the final state is not the target's (off by {far:.1e}): run specdec cache again")


def _keys(rows: list[PackedRow]) -> tuple[bytes, ...]:
    return tuple(row.key for row in rows)
