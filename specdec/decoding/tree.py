"""Draft trees.

Legend: B sequences, N nodes, the root included, D draft vocabulary.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec.decoding.rules import Drafts
from specdec.drafter import DraftVocab


class DraftTree(NamedTuple):
    """Tokens proposed after the last committed one of every sequence; node 0, the root, is that committed token.

    Parents precede their children, siblings stand in the order they were drawn, and the root is its own parent. Any
    other node that is its own parent is padding: trees of a batch have the same number of nodes.
    """

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64
    q_BND: Tensor | None = None  # the law that a node's children were drawn from, zeros at leaves; None if not drawn

    @classmethod
    def of_roots(cls, root_B: Tensor) -> Self:
        """Nothing proposed: the last tokens, (B,) int64, alone."""
        return cls(root_B[:, None], torch.zeros_like(root_B)[:, None])

    def drafts(self, vocab: DraftVocab) -> Drafts:
        """What an acceptance rule judges."""
        return Drafts(self.tokens_BN, self.parents_BN, self.q_BND, vocab.target_ids_D)

    def padded(self, nodes: int) -> "DraftTree":
        """With padding up to so many nodes, the root included."""
        (B, N), device = self.tokens_BN.shape, self.tokens_BN.device
        if nodes == N:
            return self
        more_BM = torch.arange(N, nodes, device=device).expand(B, -1)
        q_BND = self.q_BND
        if q_BND is not None:
            q_BND = torch.cat([q_BND, q_BND.new_zeros(B, nodes - N, q_BND.shape[-1])], 1)
        root_BM = self.tokens_BN[:, :1].expand_as(more_BM)
        return DraftTree(torch.cat([self.tokens_BN, root_BM], 1), torch.cat([self.parents_BN, more_BM], 1), q_BND)
