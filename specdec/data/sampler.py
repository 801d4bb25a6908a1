"""The order of rows: a function of seed and epoch alone, so that a run can go on in the middle of an epoch."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from specdec.data.split import generator

BLANK = -1  # stands for a row of padding, see `EpochSampler`


class EpochSampler(Sampler[int]):
    """One process's row numbers in epoch ``epoch``, from place ``start`` on; the loader sets both.

    Every process draws the same number of rows; when they do not come out even, the last processes draw a blank
    row instead of a repeated one.

    Args:
        count: rows in all.
        shuffle: False gives the rows in their own order in every epoch.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1) -> None:
        if count < 1:
            raise ValueError("there are no rows to draw from: give more data")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist among {world_size} processes")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.epoch = self.start = 0

    def order(self, epoch: int) -> list[int]:
        """This process's rows in that epoch."""
        rows = torch.arange(self.count)
        if self.shuffle:
            rows = torch.randperm(self.count, generator=generator(self.seed, epoch))
        blanks = torch.full((-self.count % self.world_size,), BLANK)
        return torch.cat([rows, blanks])[self.rank :: self.world_size].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch)[self.start :])

    def __len__(self) -> int:
        return -(-self.count // self.world_size)
