"""A proposer as its rounds use it, which keeps count of the committed rows itself.

Legend: B sequences, M newly committed tokens, N aux layers, H hidden.
"""

import torch
from torch import Tensor

from specdec.decoding import ChildSampling, DraftShape, DraftTree, Proposer
from specdec.drafter import Drafter
from specdec.drafting.mode import Frontier
from tests.decoding.trees import LIKELIEST


class Drafting(Proposer):
    """B sequences, all empty at first."""

    def __init__(self, drafter: Drafter, growth: DraftShape, capacity: int, batch: int = 1) -> None:
        super().__init__(drafter, growth, capacity, batch)
        self.length_B = torch.zeros(batch, dtype=torch.int64)

    def commit(self, ids_BM: Tensor, aux_BMNH: Tensor, count_B: Tensor | None = None) -> Frontier:
        """Rows behind those committed before; all M unless counts are given."""
        if count_B is None:
            count_B = torch.full_like(self.length_B, ids_BM.shape[1])
        start = self.extend(self.length_B, ids_BM, aux_BMNH, count_B)
        self.length_B = self.length_B + count_B
        return start

    def draft(
        self, root_B: Tensor, start: Frontier, children: ChildSampling = LIKELIEST
    ) -> DraftTree:
        """A proposal after what is committed."""
        return self.propose(self.length_B, root_B, start, children)

    def rows(self, b: int = 0) -> Tensor:
        """Keys and values of a sequence's committed rows, (2 x layers, 1, g, rows, d)."""
        one = self.memory.cache.row(b)
        return torch.stack(one.keys_BgSd + one.values_BgSd)[..., : int(self.length_B[b]), :]
