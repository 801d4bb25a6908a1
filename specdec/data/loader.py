"""Packed rows behind a data loader whose place in the data can be saved and restored exactly.

The order of rows is a function of seed and epoch, so a place is an epoch and a number of batches, whatever workers
have fetched ahead. `torchdata.StatefulDataLoader` is not used: a place at the very end of an epoch restores there as
an exhausted iterator, from which Lightning 2.6 runs an epoch without a batch.
"""

import functools
import hashlib
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from specdec.data.batch import PAD_DOCUMENT, Batch, Row, collate
from specdec.data.sampler import BLANK, EpochSampler


class Rows(Dataset[Row]):
    """Packed rows one at a time; number -1 is a row of nothing but padding."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.ids_BT)

    def __getitem__(self, index: int) -> Row:
        if index == BLANK:
            ids_T = torch.zeros_like(self.rows.ids_BT[0])
            return Row(ids_T, torch.zeros_like(ids_T, dtype=torch.bool), torch.full_like(ids_T, PAD_DOCUMENT))
        return Row(*(column[index] for column in self.rows))


def _leave_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal: a worker fetches on until the run has ended its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Companion:
    """Told of batches before they are used, so that what belongs to them can be fetched; this one fetches nothing."""

    def announce(self, batch: Batch) -> None:
        """This batch comes after the present one."""

    def ready(self, batch: Batch) -> None:
        """Return when nothing of this batch has to be waited for."""


class ResumableLoader(DataLoader[Row]):
    """Batches of rows for one process, another order in each epoch; an epoch's last batch may be smaller.

    An epoch ends when the loader is iterated over anew after a batch was drawn, or after its last batch. Its own
    random generator keeps it from drawing on the global one.

    Args:
        companion: told of each batch while the one before it is in use.

    Raises:
        ValueError: there are no rows, or a number is out of range.
    """

    stack = staticmethod(collate)

    def __init__(
        self,
        rows: Batch,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        companion: Companion = Companion(),  # noqa: B008  it holds nothing
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: it must be 0 or more")
        self.rows_per_batch, self.companion = batch_size, companion
        self.order = self.make_order(rows, seed, shuffle, rank, world_size)
        self.epoch = self.batches = 0  # the place: batches drawn in this epoch
        self.moved = False  # since the last iteration began, or since the place was restored
        super().__init__(
            Rows(rows),
            # no sampler: under trainer.overfit_batches Lightning would replace it
            batch_sampler=BatchSampler(self.order, batch_size, drop_last=False),
            num_workers=num_workers,
            collate_fn=self.stack,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator().manual_seed(seed),
        )

    def make_order(self, rows: Batch, seed: int, shuffle: bool, rank: int, world_size: int) -> EpochSampler:
        """Which rows this process draws."""
        return EpochSampler(len(rows.ids_BT), seed, shuffle, rank, world_size)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # batches are what collate makes
        if self.moved or self.batches == len(self):
            self.epoch, self.batches, self.moved = self.epoch + 1, 0, False
        self.order.epoch, self.order.start = self.epoch, self.batches * self.rows_per_batch
        batches = super().__iter__()
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            if following is not None:
                self.companion.announce(following)
            self.companion.ready(batch)
            self.batches, self.moved = self.batches + 1, True
            yield batch
            batch = following

    def _identity(self) -> dict[str, Any]:
        of = self.order
        return {
            "rows": of.count,
            "seed": of.seed,
            "shuffle": of.shuffle,
            "processes": of.world_size,
            "batch_size": self.rows_per_batch,
            "content": self._content,
        }

    @functools.cached_property
    def _content(self) -> str:
        """Hash of ids, masks and documents; all of it is read once."""
        found = hashlib.sha256()
        for column in self.dataset.rows:  # type: ignore[attr-defined]
            found.update(f"{column.dtype} {list(column.shape)}\n".encode())
            for rows in column.split(1 << 12):
                found.update(rows.contiguous().numpy())
        return found.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """The place, and what the order of batches depends on; the same on every process."""
        return {"epoch": self.epoch, "batches": self.batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a saved place; from an epoch's end, with the next epoch.

        Raises:
            ValueError: the place belongs to other data, another seed, batch size or number of processes.
        """
        now = self._identity()
        before = {name: value for name, value in state.items() if name not in ("epoch", "batches")}
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"the data cannot be resumed: {name} was {before.get(name)} in the checkpoint and is "
                    f"{now.get(name)} now; resume with the same data, seq_len, packing, batch_size, seed and number "
                    "of processes"
                )
        self.epoch, self.batches, self.moved = state["epoch"], state["batches"], False
