"""The drafter at work: its static cache, and the two ways rows enter it.

Legend: B sequences, M newly committed tokens, N aux layers, K frontier nodes, Q drafted nodes, H hidden.
"""

import torch
from torch import Tensor

from specdec.decoding.children import LIKELIEST, Children
from specdec.decoding.growth import Frontier, Growth
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter, Step
from specdec.nn.cache import StaticCache
from specdec.nn.view import View


class Proposer:
    """A drafter, its cache and a growth, for B sequences.

    Row i of a sequence holds the pair of the target's true feature i and token i + 1.

    Args:
        longest: tokens of the longest sequence, drafts excluded.

    Attributes:
        beyond: how many key slots may be in use behind a sequence's committed rows.
        capacity: key slots of a sequence.
    """

    def __init__(self, drafter: Drafter, growth: Growth, longest: int, batch: int = 1) -> None:
        config, weight = drafter.config, drafter.lm_head.weight
        growth.check(config.draft_vocab_size)
        growth.prepare(weight.device)
        self.drafter, self.growth = drafter, growth
        self.beyond = max(growth.slots, growth.depth)  # the latter for padding behind the new rows
        self.capacity = longest + self.beyond
        self.cache = StaticCache(
            config.num_layers, config.num_key_value_heads, self.capacity, config.head_dim, weight.dtype, weight.device,
            batch,
        )  # fmt: skip

    def prefill(
        self, b: int, ids_1M: Tensor, aux_1MNH: Tensor, first_1: Tensor | None = None, columns: int | None = None
    ) -> None:
        """M tokens of sequence ``b`` that have a feature before them.

        Args:
            first_1: int64, the row of the first; None for row 0.
            columns: as in :meth:`extend`.
        """
        zero_1 = torch.zeros_like(ids_1M[0, :1])
        view = View.chain(
            zero_1 if first_1 is None else first_1, ids_1M.shape[1], columns or self.capacity, self.cache.row(b)
        )._replace(asked_BM=zero_1[None])
        self.drafter.step(ids_1M, self.drafter.fuse(aux_1MNH), view)  # for its keys

    def extend(
        self, length_B: Tensor, ids_BM: Tensor, aux_BMNH: Tensor, count_B: Tensor, columns: int | None = None
    ) -> Frontier:
        """Commit tokens with the target's true features, over whatever had been guessed in their rows.

        Args:
            length_B: int64, the rows committed so far.
            ids_BM: the tokens that follow each feature; the last that counts is the next root.
            count_B: int64, how many of the M are meant; the rest is padding, whose rows are free again.
            columns: how many of the key slots to look at; all for None.
        """
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        view = View.chain(length_B, ids_BM.shape[1], columns or self.capacity, self.cache)._replace(asked_BM=last_B1)
        return self._frontier(self.drafter.step(ids_BM, self.drafter.fuse(aux_BMNH), view))

    def propose(
        self,
        length_B: Tensor,
        root_B: Tensor,
        start: Frontier,
        children: Children = LIKELIEST,
        columns: int | None = None,
    ) -> DraftTree:
        """Grow a proposal after the roots, from what :meth:`extend` returned.

        Args:
            length_B: int64, the rows committed by now.
            columns: as in :meth:`extend`.
        """

        def expand(ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor) -> Frontier:
            return self.expand(length_B, ids_BK, h_BKH, seen_BKQ, depth_BQ, columns)

        return self.growth.grow(root_B, start, expand, self.drafter.vocab, children)

    def expand(
        self,
        length_B: Tensor,
        ids_BK: Tensor,
        h_BKH: Tensor,
        seen_BKQ: Tensor,
        depth_BQ: Tensor,
        columns: int | None = None,
    ) -> Frontier:
        """One level of drafting; see :data:`Expand`, and :meth:`extend` for ``columns``."""
        view = View.append(length_B, seen_BKQ, depth_BQ, columns or self.capacity, self.cache)
        return self._frontier(self.drafter.step(ids_BK, h_BKH, view))

    def _frontier(self, step: Step) -> Frontier:
        logits_BKD = self.drafter.logits(step.normed_BTH)
        wide = torch.promote_types(logits_BKD.dtype, torch.float32)
        return Frontier(step.h_BTH, logits_BKD.to(wide))
