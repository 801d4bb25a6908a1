"""The drafter at work: its cache, how a text's rows enter it, and how a draft shape grows a proposal from it.

Legend: B sequences, M newly committed tokens, N aux layers, H hidden, K frontier nodes.
"""

from torch import Tensor

from specdec.decoding.accept import DraftTree
from specdec.decoding.shapes import ChildSampling, DraftShape
from specdec.drafter import Drafter
from specdec.drafting.mode import DrafterMemory, Expand, Frontier


class Proposer:
    """A drafter, its cache and a draft shape, for B sequences.

    Row i of a sequence holds the pair of the target's true feature i and token i + 1. What else a way of drafting keeps
    in the cache is its own affair: see :mod:`specdec.drafting`.

    Args:
        longest: tokens of the longest sequence, drafts excluded.

    Attributes:
        memory: the drafter and its cache, whose capacity is those tokens and the drafts or padding behind them.
    """

    def __init__(self, drafter: Drafter, shape: DraftShape, longest: int, batch: int = 1) -> None:
        shape.check(drafter.config)
        shape.prepare(drafter.lm_head.weight.device)
        self.shape = shape
        self.drafter = drafter
        self.drafting = drafter.config.drafting
        rows = shape.depth + self.drafting.extra_rows(shape.depth)
        capacity = longest + max(shape.slots, rows)
        self.memory = DrafterMemory(drafter, shape.depth, capacity, batch)

    def prefill(self, b: int, ids_1M: Tensor, aux_1MNH: Tensor) -> None:
        """Read the first M tokens of sequence ``b`` that have a feature before them."""
        h_1MH = self.drafter.fuse(aux_1MNH)
        self.drafting.prefill(self.memory, self.memory.cache.row(b), ids_1M, h_1MH)

    def extend(
        self, length_B: Tensor, ids_BM: Tensor, aux_BMNH: Tensor, count_B: Tensor
    ) -> Frontier:
        """Commit tokens with the target's true features, over whatever had been guessed in their rows.

        Args:
            length_B: int64, the rows committed so far.
            ids_BM: the tokens that follow each feature; the last that counts is the next root.
            count_B: int64, how many of the M count; the rest is padding, whose rows are free again.

        Returns:
            What the drafter says at the last of them; see :meth:`specdec.drafting.mode.DraftingMode.start`.
        """
        h_BMH = self.drafter.fuse(aux_BMNH)
        return self.drafting.start(self.memory, length_B, ids_BM, h_BMH, count_B)

    def propose(
        self, length_B: Tensor, root_B: Tensor, start: Frontier, children: ChildSampling
    ) -> DraftTree:
        """Grow a proposal after the roots, from what :meth:`extend` returned.

        Args:
            length_B: int64, the rows committed by now.
        """
        expand = self.drafting.expand(self.memory, start, length_B)
        return self.grow(self.shape, root_B, start, expand, children)

    def grow(
        self,
        shape: DraftShape,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        children: ChildSampling,
    ) -> DraftTree:
        """Grow a proposal of a shape after the roots; ``expand`` makes its levels."""
        return shape.grow(root_B, start.first(), expand, self.drafter.vocab, children)
