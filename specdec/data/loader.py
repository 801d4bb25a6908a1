"""Packed rows behind a data loader whose place in the data can be saved and restored exactly.

The order of rows is a function of seed and epoch, so a place is an epoch and a number of batches, whatever workers
have fetched ahead. `torchdata.StatefulDataLoader` is not used: a place at the very end of an epoch restores there as
an exhausted iterator, from which Lightning 2.6 runs an epoch without a batch.
"""

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


class ResumableLoader(DataLoader[Row]):
    """Batches of rows for one process, another order in each epoch; an epoch's last batch may be smaller.

    An epoch ends when the loader is iterated over anew after a batch was drawn, or after its last batch. Its own
    random generator keeps it from drawing on the global one.

    Raises:
        ValueError: there are no rows, or a number is out of range.
    """

    def __init__(
        self,
        rows: Batch,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: it must be 0 or more")
        self.order = EpochSampler(len(rows.ids_BT), seed, shuffle, rank, world_size)
        self.rows_per_batch = batch_size
        self.epoch = self.batches = 0  # the place: batches drawn in this epoch
        self.moved = False  # since the last iteration began, or since the place was restored
        super().__init__(
            Rows(rows),
            # no sampler: under trainer.overfit_batches Lightning would replace it
            batch_sampler=BatchSampler(self.order, batch_size, drop_last=False),
            num_workers=num_workers,
            collate_fn=collate,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator().manual_seed(seed),
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # batches are what collate makes
        if self.moved or self.batches == len(self):
            self.epoch, self.batches, self.moved = self.epoch + 1, 0, False
        self.order.epoch, self.order.start = self.epoch, self.batches * self.rows_per_batch
        for batch in super().__iter__():
            self.batches, self.moved = self.batches + 1, True
            yield batch

    def _identity(self) -> dict[str, Any]:
        of = self.order
        return {
            "rows": of.count,
            "seed": of.seed,
            "shuffle": of.shuffle,
            "processes": of.world_size,
            "batch_size": self.rows_per_batch,
        }

    def state_dict(self) -> dict[str, Any]:
        """The place, and what the order of batches depends on; the same on every process."""
        return {"epoch": self.epoch, "batches": self.batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a saved place; from an epoch's end, with the next epoch.

        Raises:
            ValueError: the place belongs to other data, another seed, batch size or number of processes.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the data cannot be resumed: {name} was {state[name]} in the checkpoint and is {value} now; "
                    "resume with the same data, seq_len, batch_size, seed and number of processes"
                )
        self.epoch, self.batches, self.moved = state["epoch"], state["batches"], False
