"""Where training gets the target's features from: the target itself in the step, or a cache on disk.

Legend: B batch, T tokens, N boundaries, H hidden, R tokens up to the last that is no padding.
"""

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.features.contract import DTYPES, Contract, described
from specdec.features.store import FeatureStore, PackedRow, each_row
from specdec.nn.view import View
from specdec.target import Target, TargetOutput
from specdec.target.rounding import compare_boundary, median_error, own_states
from specdec.utils.numbers import Side, check_numbers

log = logging.getLogger(__name__)

SPOT_TOKENS = 512  # of a row that are worked out again, at most


class FeatureSource:
    """Features of batches, in the target's dtype on its device; those of padding are undefined."""

    # how many training rows it has, those that an epoch draws first; None if all
    first_rows: int | None = None
    # how many validation rows it has, in their order; None if all
    first_val_rows: int | None = None
    ahead: int = 0  # of how many batches it wants to know beyond the one under way

    def prefetch(self, batch: Batch) -> None:
        """A batch that comes, after those that were prefetched before: it may be fetched."""

    def wait(self, batch: Batch) -> None:
        """The batch comes now."""

    def cancel(self, batch: Batch) -> None:
        """A batch that was prefetched does not come."""

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """As :meth:`specdec.target.Target.forward` of ``View.packed``, for rows of packed documents."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """Let go of what is not needed between runs; the source may be used again.

        Args:
            failed: this process ends by an error; the others may never come to this call.
        """


class Features:
    """Base of the ways to features: a frozen spec."""

    made_ahead: ClassVar[bool] = False  # then parts of a target are enough
    answers: ClassVar[bool] = False  # whether the target answers the data's conversations, too

    def check_data(self, data: TokenData) -> None:
        """Raise ValueError for data whose conversations would have no answers, or that have nothing to answer."""
        name = type(data).__name__
        if data.unanswered and not self.answers:
            raise ValueError(
                f"data {name} holds conversations that are still to be answered, and features {type(self).__name__} "
                "answer none: set model.features=Answered, or run specdec regenerate and train on its file with "
                "data=ChatData"
            )
        if self.answers and not data.unanswered:
            raise ValueError(
                f"features {type(self).__name__} answer the conversations of data UnansweredData, not of {name}: set "
                "data=UnansweredData, or model.features=Streamed to train on the text as it is"
            )

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """The source of a run that reads these boundaries of this data; parts of a target learn which one they are of.

        Raises:
            ValueError: it has no features of this target, these boundaries or this data.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OnTheFly(Features, FeatureSource):
    """The target runs in the training step, without gradient.

    Args:
        rows: rows that it reads together: those of the ``batch``, or this many. One makes a row's features independent
            of the rows next to it whatever the kernels do, and so equal to those of a cache to the last bit.
    """

    rows: Side | Literal["batch"] = "batch"

    def __post_init__(self) -> None:
        check_numbers(OnTheFly, vars(self), "model.features.")

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """Itself: there is nothing to open."""
        return self

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """The whole batch, or groups of rows, each up to its last token that is no padding."""
        if self.rows == "batch":
            return target.forward(batch.ids_BT, View.packed(batch.documents_BT), layers, final_norm)
        B, T = batch.ids_BT.shape
        weight = target.embedding_weight()
        aux_BTNH = weight.new_zeros(B, T, len(layers), target.hidden_size)
        final_BTH = weight.new_zeros(B, T, target.hidden_size)
        for start in range(0, B, self.rows):
            group = slice(start, start + self.rows)
            ids_GT = batch.ids_BT[group]
            documents_GT = batch.documents_BT[group]
            R = int((documents_GT >= 0).sum(1).max())
            if R:
                out = target.forward(
                    ids_GT[:, :R], View.packed(documents_GT[:, :R]), layers, final_norm
                )
                aux_BTNH[group, :R], final_BTH[group, :R] = out
        return TargetOutput(aux_BTNH, final_BTH)


@dataclass(frozen=True)
class Cached(Features):
    """Features that ``specdec cache`` has stored.

    Args:
        directory: the cache. A row's checksum is compared as it is read.
    """

    made_ahead = True
    directory: str

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """Check target, boundaries, data and, on one row, the numbers themselves.

        Raises:
            ValueError: the cache is not of this target, or lacks a boundary or a row.
        """
        store = FeatureStore(Path(self.directory), described(data))
        source = CachedSource(store, target, layers, final_norm)
        contract = store.contract
        parts = (
            data.first_rows(contract.first_rows),
            data.first_validation_rows(contract.first_val_rows),
        )
        for row in itertools.chain(*map(each_row, parts)):
            store.check(row)
        if target.whole:
            row = next(each_row(parts[0]))
            columns = store.contract.empty(row.tokens)
            store.read(row, range(len(store.contract.layers)), *columns)
            spot_check(store.contract, self.directory, columns, target, row)
        else:
            log.warning(
                "the cache's numbers are taken as they are: parts of a target cannot work one out again"
            )
        log.info(
            "features: %s, boundaries %s, by %s",
            self.directory,
            store.contract.layers,
            store.contract.engine,
        )
        return source


class RowSource(FeatureSource):
    """Gets batches row by row, in a thread: those ahead while one is trained on.

    Args:
        contract: of what it gets.
        where: it comes from, for messages.

    Raises:
        ValueError: that is of another target or dtype, or lacks a boundary.
    """

    def __init__(
        self,
        contract: Contract,
        where: str,
        target: Target,
        layers: Sequence[int],
        final_norm: bool,
        ahead: int,
    ) -> None:
        if not target.is_of(contract.target):
            raise ValueError(
                f"{where}: made with another target, {contract.target['source']}, or other weights or "
                "another tokenizer of it"
            )
        if not target.whole:
            target.take_identity(contract.target)
        dtype = str(target.dtype).removeprefix("torch.")
        if contract.target_dtype != dtype:
            raise ValueError(
                f"{where}: made with the target in {contract.target_dtype}, which runs in {dtype} here: set "
                f"model.target.dtype={contract.target_dtype}, or run specdec cache again"
            )
        stored = stored_boundaries(target, layers, final_norm)
        if missing := [b for b in stored if b not in contract.layers]:
            raise ValueError(
                f"{where}: boundaries {missing} are not stored, only {list(contract.layers)}: run specdec cache with "
                f"--layers {' '.join(map(str, sorted({*stored, *contract.layers})))} into another directory"
            )
        if contract.dtype != dtype:
            log.warning("%s: states of %s, rounded to %s", where, dtype, contract.dtype)
        self.contract = contract
        self.where = where
        self.ahead = ahead
        self.dtype = target.dtype
        self.final_norm = final_norm
        self.layers = tuple(layers)
        self.taps = [contract.layers.index(b) for b in stored]
        self._thread = ThreadPoolExecutor(1, "features")
        self._prefetched: dict[tuple[bytes, ...], Future[list[Tensor]]] = {}

    def copy(self, row: PackedRow, *columns_T: Tensor) -> None:
        """Put what there is of a row's R tokens first into its columns; called by the thread, and by training's own.

        Raises:
            ValueError: it cannot be had.
        """
        raise NotImplementedError

    def prefetch(self, batch: Batch) -> None:
        """Have the thread read it."""
        if (keys := row_keys(batch)) not in self._prefetched:
            self._prefetched[keys] = self._thread.submit(self._read, batch)

    def wait(self, batch: Batch) -> None:
        """Wait until it is read."""
        wait([reading] if (reading := self._prefetched.get(row_keys(batch))) else [])

    def cancel(self, batch: Batch) -> None:
        """Do not read it, or not keep it."""
        if reading := self._prefetched.pop(row_keys(batch), None):
            reading.cancel()

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """The states of every row."""
        if (tuple(layers), final_norm) != (self.layers, self.final_norm):
            raise ValueError(
                f"{self.where}: opened for boundaries {list(self.layers)}, not {list(layers)}"
            )
        ahead = self._prefetched.pop(row_keys(batch), None)
        columns = self._read(batch) if ahead is None else ahead.result()
        on_device = [column.to(target.device, non_blocking=True) for column in columns]
        aux_BTNH, final_BTH = self.contract.decode(on_device, self.dtype)
        if len(self.taps) < len(self.layers):  # the last boundary, after the final norm
            aux_BTNH[:, :, -1] = final_BTH
        return TargetOutput(aux_BTNH, final_BTH)

    def close(self, failed: bool = False) -> None:
        """End the thread, and forget what it has read."""
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "features")  # starts none before it is needed
        self._prefetched.clear()

    def empty_columns(self, batch: Batch) -> list[Tensor]:
        """Columns of a batch's rows, (B, T, ...), yet to be filled."""
        pinned = torch.cuda.is_available()
        return [
            torch.zeros(*batch.ids_BT.shape, *column.shape, dtype=column.dtype, pin_memory=pinned)
            for column in self.contract.columns(len(self.layers)).values()
        ]

    def _read(self, batch: Batch) -> list[Tensor]:
        columns = self.empty_columns(batch)
        for n, row in enumerate(each_row(batch)):
            if row.tokens:
                self.copy(row, *(column[n] for column in columns))
        return columns


class CachedSource(RowSource):
    """Reads from the disk; ValueError as :class:`RowSource`."""

    def __init__(
        self, store: FeatureStore, target: Target, layers: Sequence[int], final_norm: bool
    ) -> None:
        super().__init__(store.contract, str(store.directory), target, layers, final_norm, ahead=1)
        self.store = store
        self.first_rows = store.contract.first_rows
        self.first_val_rows = store.contract.first_val_rows

    def prefetch(self, batch: Batch) -> None:
        """Have the thread read it, unless it is the one behind a run's last, which a cache of the first rows need not
        have."""
        if all(map(self.store.holds, each_row(batch))):
            super().prefetch(batch)

    def copy(self, row: PackedRow, *columns_T: Tensor) -> None:
        self.store.read(row, self.taps, *columns_T)


def stored_boundaries(target: Target, layers: Sequence[int], final_norm: bool) -> list[int]:
    """Those of ``layers`` that are not the final state, which there is of every token."""
    return [b for b in layers if b < target.num_layers or not final_norm]


@torch.no_grad()
def spot_check(
    contract: Contract, where: str, columns: Sequence[Tensor], target: Target, row: PackedRow
) -> None:
    """Compare a row's columns with the target, boundary by boundary, so that a wrong tap shows before the first step.

    Raises:
        ValueError: they differ by more than rounding, or another boundary is nearer than the one that is named.
    """
    M = min(row.tokens, SPOT_TOKENS)
    aux_RNH, final_RH = contract.decode(columns, torch.float32)
    ids_1M, documents_1M = (x[None, :M].to(target.device) for x in (row.ids_R, row.documents_R))
    outputs = target.forward(ids_1M, View.packed(documents_1M), range(target.num_layers + 1))
    *allowed, allowed_final, _ = own_states(target, DTYPES[contract.dtype]).allowed
    own_MH = {b: [state_MH] for b, state_MH in enumerate(outputs.aux_BTNH[0].unbind(1))}
    for n, boundary in enumerate(contract.layers):
        difference = compare_boundary(boundary, [aux_RNH[:M, n]], own_MH)
        if not difference.fits(allowed[boundary]):
            raise ValueError(
                f"{where}: what is stored for boundary {boundary} is not the target's (off by {difference.error:.1e}, "
                f"allowed {allowed[boundary]:.1e}; the nearest other is boundary {difference.nearest}, off by "
                f"{difference.nearest_error:.1e}): run specdec cache again"
            )
    final_error = median_error(final_RH[:M], outputs.final_BTH[0])
    if not final_error <= allowed_final:
        raise ValueError(
            f"{where}: the final state is not the target's (off by {final_error:.1e}): run specdec cache again"
        )


def row_keys(batch: Batch) -> tuple[bytes, ...]:
    """The keys of a batch's rows, which stand for its tokens and documents."""
    return tuple(row.key for row in each_row(batch))
