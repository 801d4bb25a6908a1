"""Batches of rows of similar length, as long as their longest row asks for.

Legend: B rows, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.data.batch import PAD_DOCUMENT, Batch, Row, collate
from specdec.data.loader import ResumableLoader
from specdec.data.sampler import BLANK, EpochSampler
from specdec.data.split import generator

MULTIPLE = 64  # tokens that a batch's length is rounded up to: few shapes for compiled kernels
WINDOW = 64  # batches that are sorted together; what lies in a batch is another thing in each epoch


def real_tokens(rows: Batch) -> Tensor:
    """Tokens of each row up to its padding; (R,) int64."""
    return (rows.documents_BT != PAD_DOCUMENT).sum(-1)


def width(longest: int, seq_len: int) -> int:
    """Tokens of a batch whose longest row has so many."""
    return min(seq_len, max(1, -(-longest // MULTIPLE)) * MULTIPLE)


def collate_short(rows: Sequence[Row]) -> Batch:
    """Rows stacked, without the padding that all of them end in."""
    batch = collate(rows)
    T = width(int(real_tokens(batch).max()), batch.ids_BT.shape[1])
    return Batch(*(column[:, :T].contiguous() for column in batch))


class BucketSampler(EpochSampler):
    """As :class:`EpochSampler`, but rows of a batch, of all processes together, have similar lengths.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch of one process.
    """

    def __init__(
        self,
        lengths: Tensor,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(len(lengths), seed, shuffle, rank, world_size)
        self.lengths, self.together = lengths, batch_size * world_size

    def order(self, epoch: int) -> list[int]:
        """This process's rows in that epoch; the batch that is not full comes last."""
        if not self.shuffle:
            return super().order(epoch)
        random = generator(self.seed, epoch)
        shuffled = torch.randperm(self.count, generator=random)
        batches: list[Tensor] = []
        for window in shuffled.split(self.together * WINDOW):
            longest_first = self.lengths[window].argsort(descending=True, stable=True)
            batches += window[longest_first].split(self.together)
        short = [batches.pop()] if len(batches[-1]) < self.together else []
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]
        blanks = torch.full((-self.count % self.world_size,), BLANK)
        return torch.cat([*mixed, *short, blanks])[self.rank :: self.world_size].tolist()


class BucketLoader(ResumableLoader):
    """Batches of rows of similar length."""

    stack = staticmethod(collate_short)

    def make_order(self, rows: Batch, seed: int, shuffle: bool, rank: int, world_size: int) -> EpochSampler:
        """By the rows' lengths."""
        return BucketSampler(real_tokens(rows), self.rows_per_batch, seed, shuffle, rank, world_size)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "packing": "bucket"}


def padding_share(rows: Batch, batch_size: int, seed: int) -> float:
    """Share of padding in the batches of the first epoch of one process."""
    lengths = real_tokens(rows)
    order = torch.tensor(BucketSampler(lengths, batch_size, seed).order(0))
    batches = lengths[order].split(batch_size)
    read = sum(len(one) * width(int(one.max()), rows.ids_BT.shape[1]) for one in batches)
    return 1 - int(lengths.sum()) / read
