"""The drafter at work: its cache, the two ways rows enter it, and how a chain and EAGLE-2's dynamic tree grow from it.

Legend: B sequences, M newly committed tokens, N aux layers, K frontier nodes, Q drafted nodes so far, C candidates, H
hidden, D draft vocabulary; of a tree, N its nodes with the root.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.decoding.accept import DraftTree
from specdec.decoding.shapes import ChildSampling, DraftShape
from specdec.drafter import Drafter, Step
from specdec.drafting.mode import Frontier
from specdec.nn.backend import wide
from specdec.nn.cache import StaticCache
from specdec.nn.view import Spans, View


class Proposer:
    """A drafter, its cache and a shape, for B sequences.

    Row i of a sequence holds the pair of the target's true feature i and token i + 1. A parallel drafter's rows of
    masks, one for each draft but the first, run with those that are committed. A block drafter's rows hold a feature
    alone; behind them stand the root and a mask for each draft.

    Args:
        longest: tokens of the longest sequence, drafts excluded.

    Attributes:
        ahead: rows of masks, with the root if it has one of its own; none of a drafter that reads its own drafts.
        capacity: key slots of a sequence: those tokens, and the drafts or the padding behind the new rows.
    """

    def __init__(self, drafter: Drafter, shape: DraftShape, longest: int, batch: int = 1) -> None:
        config = drafter.config
        weight = drafter.lm_head.weight
        shape.check(config)
        shape.prepare(weight.device)
        self.drafter = drafter
        self.shape = shape
        in_turn = shape.depth - 1 if config.recurrence.parallel else 0
        self.ahead = config.recurrence.masks + 1 if config.recurrence.masks else in_turn
        self.capacity = longest + max(shape.slots, shape.depth + self.ahead)
        self.cache = StaticCache(
            config.num_layers, config.num_key_value_heads, self.capacity, config.head_dim, weight.dtype, weight.device,
            batch,
        )  # fmt: skip

    def prefill(self, b: int, ids_1M: Tensor, aux_1MNH: Tensor) -> None:
        """The first M tokens of sequence ``b`` that have a feature before them."""
        zero_1 = torch.zeros_like(ids_1M[0, :1])
        # a root runs with it, and leaves a key that is written over
        if self.drafter.config.recurrence.masks:
            self.block(
                zero_1,
                ids_1M[:, -1:],
                self.drafter.fuse(aux_1MNH),
                zero_1 + ids_1M.shape[1],
                self.cache.row(b),
            )
            return
        view = View.chain(zero_1, ids_1M.shape[1], self.capacity, self.cache.row(b))
        asked_11 = torch.zeros_like(ids_1M[:, :1])  # it runs for its keys, nobody reads its output
        self.drafter.step(ids_1M, self.drafter.fuse(aux_1MNH), view._replace(wanted_BM=asked_11))

    def extend(
        self, length_B: Tensor, ids_BM: Tensor, aux_BMNH: Tensor, count_B: Tensor
    ) -> Frontier:
        """Commit tokens with the target's true features, over whatever had been guessed in their rows.

        Args:
            length_B: int64, the rows committed so far.
            ids_BM: the tokens that follow each feature; the last that counts is the next root.
            count_B: int64, how many of the M are meant; the rest is padding, whose rows are free again.

        Returns:
            What the drafter says at the last of them; and a parallel one at every row of masks, so that K levels stand
            where else K nodes do.
        """
        h_BMH = self.drafter.fuse(aux_BMNH)
        wanted_BK = (count_B - 1).clamp_min(0)[:, None]
        if self.drafter.config.recurrence.masks:
            root_B1 = ids_BM.gather(1, wanted_BK)
            masks = self.drafter.following(root_B1).expand(-1, self.ahead - 1)
            return self.block(length_B, torch.cat([root_B1, masks], 1), h_BMH, count_B, self.cache)
        if self.ahead:
            order_M = torch.arange(ids_BM.shape[1] + self.ahead, device=ids_BM.device)
            fresh_BM = order_M <= wanted_BK
            ids_BM = F.pad(ids_BM, (0, self.ahead))
            h_BMH = F.pad(h_BMH, (0, 0, 0, self.ahead))
            ids_BM = torch.where(fresh_BM, ids_BM, self.drafter.following(ids_BM))
            h_BMH = torch.where(fresh_BM[..., None], h_BMH, self.drafter.recurrence(h_BMH, h_BMH))
            wanted_BK = wanted_BK + order_M[: self.ahead + 1]
        view = View.chain(length_B, ids_BM.shape[1], self.capacity, self.cache)._replace(
            wanted_BM=wanted_BK
        )
        return self._frontier(self.drafter.step(ids_BM, h_BMH, view))

    def block(
        self, length_B: Tensor, ids_BK: Tensor, h_BMH: Tensor, count_B: Tensor, cache: StaticCache
    ) -> Frontier:
        """Commit features, of which the first ``count_B`` are meant, and run root and masks behind them, which see all
        of these and each other; what the drafter says at the masks."""
        order_M, order_K = (torch.arange(x.shape[1], device=ids_BK.device) for x in (h_BMH, ids_BK))
        end_B1 = (length_B + count_B)[:, None]
        K = ids_BK.shape[1]
        # what is not meant lies behind the block, where nobody looks
        padded_BM = (order_M >= count_B[:, None]) * K
        slots_BT = torch.cat([length_B[:, None] + order_M + padded_BM, end_B1 + order_K], 1)
        last_BK = (end_B1 + K - 1).expand(-1, K)
        visible = Spans(torch.zeros_like(last_BK), last_BK, self.capacity)
        columns_BS = torch.arange(self.capacity, device=ids_BK.device).expand(len(slots_BT), -1)
        step = self.drafter.step(
            ids_BK, h_BMH, View(slots_BT, visible, columns_BS, slots_BT, cache)
        )
        wanted = slice(1, 1 + self.shape.depth)  # the root itself says nothing
        return self._frontier(Step(*(x[:, wanted] for x in step)))

    def propose(
        self, length_B: Tensor, root_B: Tensor, start: Frontier, children: ChildSampling
    ) -> DraftTree:
        """Grow a proposal after the roots, from what :meth:`extend` returned.

        Args:
            length_B: int64, the rows committed by now.
        """
        expand = (
            functools.partial(_level, start)
            if self.ahead
            else functools.partial(self.expand, length_B)
        )
        first = Frontier(*(x[:, :1] for x in start))
        return self.shape.grow(root_B, first, expand, self.drafter.vocab, children)

    def expand(
        self, length_B: Tensor, ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor
    ) -> Frontier:
        """One level of drafting, with the drafter's own features in place of the target's; see :data:`Expand`."""
        view = View.append(length_B, seen_BKQ, depth_BQ, self.capacity, self.cache)
        return self._frontier(self.drafter.step(ids_BK, h_BKH, view))

    def _frontier(self, step: Step) -> Frontier:
        logits_BKD = self.drafter.logits(step.normed_BTH)
        return Frontier(step.h_BTH, logits_BKD.to(wide(logits_BKD.dtype)))


def _level(
    levels: Frontier, ids_BK: Tensor, h_BKH: Tensor, seen_BKQ: Tensor, depth_BQ: Tensor
) -> Frontier:
    """An :data:`Expand` of levels that are there already: all nodes of one level have the same to say."""
    at_1 = depth_BQ.flatten()[-1:] + 1
    return Frontier(*(x.index_select(1, at_1).expand(-1, ids_BK.shape[1], -1) for x in levels))
