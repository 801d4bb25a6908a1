"""The drafter at work: its static cache, and the two ways rows enter it.

Legend: M newly committed tokens, N aux layers, K frontier nodes, Q drafted nodes, H hidden.
"""

import torch
from torch import Tensor

from specdec.decoding.children import LIKELIEST, Children
from specdec.decoding.growth import Frontier, Growth
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter
from specdec.nn.cache import StaticCache
from specdec.nn.view import View


class Proposer:
    """A drafter, its cache and a growth, for one sequence.

    ``length`` counts the committed rows: row i holds the pair of the target's true feature i and token i + 1.

    Args:
        capacity: the longest sequence, drafts excluded.
    """

    def __init__(self, drafter: Drafter, growth: Growth, capacity: int) -> None:
        config, weight = drafter.config, drafter.lm_head.weight
        growth.check(config.draft_vocab_size)
        self.drafter, self.growth = drafter, growth
        self.capacity = capacity + growth.slots
        self.cache = StaticCache(
            config.num_layers, config.num_key_value_heads, self.capacity, config.head_dim, weight.dtype, weight.device
        )
        self.length = 0

    def extend(self, ids_M: Tensor, aux_1MNH: Tensor) -> Frontier:
        """Commit M tokens with the target's true features, over whatever had been guessed in their rows.

        Args:
            ids_M: the tokens that follow each feature; the last of them is the next root.
        """
        view = View.chain(self.length, len(ids_M), self.capacity, self.cache)
        step = self.drafter.step(ids_M[None], self.drafter.fuse(aux_1MNH), view)
        self.length += len(ids_M)
        return self._frontier(step.h_BTH[0, -1:], step.normed_BTH[0, -1:])

    def propose(self, root_1: Tensor, start: Frontier, children: Children = LIKELIEST) -> DraftTree:
        """Grow a proposal after the root, from what :meth:`extend` returned."""
        return self.growth.grow(root_1, start, self._expand, self.drafter.vocab, children)

    def _expand(self, ids_K: Tensor, h_KH: Tensor, seen_KQ: Tensor, depth_Q: Tensor) -> Frontier:
        view = View.append(self.length, seen_KQ, depth_Q, self.capacity, self.cache)
        step = self.drafter.step(ids_K[None], h_KH[None], view)
        return self._frontier(step.h_BTH[0], step.normed_BTH[0])

    def _frontier(self, h_KH: Tensor, normed_KH: Tensor) -> Frontier:
        logits_KD = self.drafter.logits(normed_KH)
        wide = torch.promote_types(logits_KD.dtype, torch.float32)
        return Frontier(h_KH, logits_KD.log_softmax(-1, dtype=wide))
