"""Batches of packed rows, and a loader of them whose place can be saved and restored exactly.

The order of rows is a function of seed and epoch, so a place is an epoch and a number of batches.
`torchdata.StatefulDataLoader` is not used: a place at the very end of an epoch restores there as an exhausted iterator,
from which Lightning 2.6 runs an epoch without a batch.

Legend: B rows, T tokens of a row, N documents.
"""

import functools
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.utils.text import how_many

PAD_DOCUMENT = -1  # the document number of padding
BLANK = -1  # stands for a row of padding
Item = TypeVar("Item")


class Document(NamedTuple):
    """One tokenized text or conversation."""

    ids_T: Tensor  # int64
    loss_mask_T: Tensor  # bool, True where token x_j is supervised


class Batch(NamedTuple):
    """Rows of one length: whole or cut documents, then padding."""

    ids_BT: Tensor  # int64, 0 in padding; int32 of rows at rest
    loss_mask_BT: Tensor  # bool, True where token x_j is supervised; False in padding
    documents_BT: Tensor  # the same integers, number of the document within the row, -1 in padding

    def int64(self) -> "Batch":
        """Return the same batch with ids and documents as int64, as a model takes them."""
        return Batch(self.ids_BT.long(), self.loss_mask_BT, self.documents_BT.long())

    def sections(self, sizes: Sequence[int]) -> Iterator["Batch"]:
        """Yield batches of this many rows each, one after another, without a copy."""
        for columns in zip(*(column.split(list(sizes)) for column in self), strict=True):
            yield Batch(*columns)

    def pieces(self, rows: int = 1 << 10) -> Iterator["Batch"]:
        """Yield batches of this many rows.

        What is computed of rows that are mapped into memory must not take the memory of all at once.
        """
        count = len(self.ids_BT)
        return self.sections([min(rows, count - start) for start in range(0, count, rows)])


def generator(*key: int) -> torch.Generator:
    """Return a random generator that depends on nothing but the numbers given."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def split(items: Sequence[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, validation) items in their own order; which ones depends on ``seed`` and their number alone.

    Raises:
        ValueError: the fraction is not between 0 and 1, or one of the parts would be empty.
    """
    held = held_out(len(items), fraction, seed).tolist()
    train = [item for item, apart in zip(items, held, strict=True) if not apart]
    return train, [item for item, apart in zip(items, held, strict=True) if apart]


def held_out(count: int, fraction: float, seed: int) -> Tensor:
    """Which of this many items are set aside for validation, bool; see :func:`split`."""
    if not 0 < fraction < 1:
        raise ValueError(
            f"val_fraction is {fraction}: give validation files (val), or a fraction between 0 and 1"
        )
    held = max(1, round(count * fraction))
    if held >= count:
        raise ValueError(
            f"{how_many(count, 'document')} cannot be split with val_fraction {fraction}: "
            "give validation files (val), more documents or a smaller fraction"
        )
    apart = torch.zeros(count, dtype=torch.bool)
    apart[torch.randperm(count, generator=generator(seed))[:held]] = True
    return apart


def content_of(rows: Batch) -> str:
    """Return a hash of ids, masks and documents, 16 hexadecimal digits; all of it is read."""
    digest = hashlib.sha256()
    for column in rows:
        digest.update(f"{column.dtype} {list(column.shape)}\n".encode())
        for piece in column.split(1 << 12):
            digest.update(piece.contiguous().numpy())
    return digest.hexdigest()[:16]


def order(count: int, seed: int, epoch: int) -> Tensor:
    """The numbers of all rows as they are drawn in an epoch, whatever was drawn from any other generator before."""
    return torch.randperm(count, generator=generator(seed, epoch))


class Mix(NamedTuple):
    """Rows of several sources, one source after another, and how many of each an epoch draws."""

    rows: tuple[int, ...]  # of each source
    drawn: tuple[int, ...]  # in an epoch; as many as there are rows in all

    def order(self, seed: int, epoch: int) -> Tensor:
        """The numbers of an epoch's rows as they are drawn.

        A source is gone through again and again, each time in another order; an epoch continues where the last one
        stopped.
        """
        parts = []
        first_row = 0
        for source, (rows, drawn) in enumerate(zip(self.rows, self.drawn, strict=True)):
            begin = epoch * drawn
            passes = range(begin // rows, (begin + drawn - 1) // rows + 1)
            through = [
                torch.randperm(rows, generator=generator(seed, source, turn)) for turn in passes
            ]
            begin -= passes.start * rows
            parts.append(first_row + torch.cat(through)[begin : begin + drawn])
            first_row += rows
        return torch.cat(parts)[order(first_row, seed, epoch)]


def batch_counts(sections: Sequence[int], batch_size: int, world_size: int) -> list[int]:
    """Batches that each section of rows makes, whose batches hold no row of another one."""
    shares = [math.ceil(rows / world_size) for rows in sections]
    return [math.ceil(share / batch_size) for share in shares]


class Reader(Protocol):
    """Told of batches before they are handed out, so that it can fetch what belongs to them."""

    ahead: int
    """How many batches it hears of beyond the one that is handed out."""

    def prefetch(self, batch: Batch) -> None:
        """It will be handed out, after those that were prefetched before."""

    def wait(self, batch: Batch) -> None:
        """It is handed out next."""

    def cancel(self, batch: Batch) -> None:
        """It was prefetched, and will not be handed out."""


class ResumableLoader:
    """Batches of rows for one process, another order in each epoch; an epoch's last batch may be smaller.

    The rows are in memory or mapped, so there is nothing for worker processes to do. Every process draws the same
    number of rows; when they do not come out even, the last processes draw a blank row instead of a repeated one. An
    epoch ends when the loader is iterated over again after a batch was drawn, or after its last batch.

    Args:
        shuffle: False gives the rows in their own order in every epoch.
        reader: told of every batch of an epoch; None if no one needs to know.
        mix: of which sources the rows are, and how many of each an epoch draws; None draws every row once.
        sections: rows of each section where, without ``shuffle``, no batch may hold rows of two; empty for one section.
        content: returns the hash of the rows, where somebody has it; None to make it.

    Raises:
        ValueError: there are no rows, or ``batch_size`` is below 1.
    """

    def __init__(
        self, rows: Batch, batch_size: int, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1,
        reader: Reader | None = None, mix: Mix | None = None, sections: Sequence[int] = (),
        content: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        if batch_size < 1 or not len(rows.ids_BT):
            raise ValueError(
                f"batch_size is {batch_size}, of {how_many(len(rows.ids_BT), 'row')}: at least 1 of 1 is needed"
            )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.reader = reader
        self.mix = mix if shuffle else None
        self.sections = [len(rows.ids_BT)] if shuffle or not sections else list(sections)
        self.content = content
        self.epoch = self.batches = 0  # the place: batches drawn in this epoch
        self.moved = False  # since the last iteration began, or since the place was restored

    def numbers(self, epoch: int) -> Tensor:
        """This process's rows in that epoch, int64; -1 is a blank one."""
        return torch.cat(self._shares(epoch))

    def _shares(self, epoch: int) -> list[Tensor]:
        """This process's rows of each section."""
        count = len(self.rows.ids_BT)
        if self.mix is not None:
            rows = self.mix.order(self.seed, epoch)
        else:
            rows = order(count, self.seed, epoch) if self.shuffle else torch.arange(count)
        return [
            torch.cat([part, torch.full((-len(part) % self.world_size,), BLANK)])[
                self.rank :: self.world_size
            ]
            for part in rows.split(self.sections)
        ]

    def fetch(self, numbers_B: Tensor) -> Any:
        """Rows by their numbers, a :class:`Batch`."""
        batch = Batch(*(column[numbers_B.clamp(min=0)] for column in self.rows))
        for column, nothing in zip(batch, (0, False, PAD_DOCUMENT), strict=True):
            column[numbers_B == BLANK] = nothing
        return batch.int64()

    def __len__(self) -> int:
        return sum(batch_counts(self.sections, self.batch_size, self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        if self.moved or self.batches == len(self):
            self.epoch = self.epoch + 1
            self.batches = 0
            self.moved = False
        batches = [
            numbers_B
            for share in self._shares(self.epoch)
            for numbers_B in share.split(self.batch_size)
        ]
        left = map(self.fetch, batches[self.batches :])
        prefetched: deque[Any] = deque()
        try:
            while True:
                for item in itertools.islice(
                    left, 1 + (self.reader.ahead if self.reader else 0) - len(prefetched)
                ):
                    prefetched.append(item)
                    self.announce(item)
                if not prefetched:
                    return
                batch = self.hand_out(prefetched.popleft())
                self.batches = self.batches + 1
                self.moved = True
                yield batch
        finally:  # also of an epoch that is cut short
            for item in prefetched:
                self.take_back(item)

    def announce(self, batch: Any) -> None:
        """Tell the reader what :meth:`fetch` returned for a batch that comes."""
        if self.reader is not None:
            self.reader.prefetch(batch)

    def hand_out(self, batch: Any) -> Batch:
        """Return the batch, which comes now."""
        if self.reader is not None:
            self.reader.wait(batch)
        fetched: Batch = batch
        return fetched

    def take_back(self, batch: Any) -> None:
        """Tell the reader that a batch does not come."""
        if self.reader is not None:
            self.reader.cancel(batch)

    @functools.cached_property
    def _content(self) -> str:
        """Hash of the rows; all of them are read once."""
        return content_of(self.rows) if self.content is None else self.content()

    def state_dict(self) -> dict[str, Any]:
        """The place, and what the order of batches depends on; the same on every process."""
        return {
            "epoch": self.epoch, "batches": self.batches, "rows": len(self.rows.ids_BT), "seed": self.seed,
            "shuffle": self.shuffle, "processes": self.world_size, "batch_size": self.batch_size,
            "content": self._content, "mix": None if self.mix is None else [list(self.mix.rows), list(self.mix.drawn)],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue from a saved place; from an epoch's end, with the next epoch.

        Raises:
            ValueError: the place belongs to other data, another seed, batch size or number of processes.
        """
        for name, now in self.state_dict().items():
            if name not in ("epoch", "batches") and state.get(name) != now:
                raise ValueError(
                    f"the data cannot be resumed: {name} was {state.get(name)} in the checkpoint and is {now} now; "
                    "resume with the same data, weights, seq_len, batch_size, seed and number of processes"
                )
        self.epoch = state["epoch"]
        self.batches = state["batches"]
        self.moved = False
