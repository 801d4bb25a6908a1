"""A chain that ends where the drafter is unsure.

Legend: B sequences, N tree nodes with the root, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.decoding.accept import DraftTree
from specdec.decoding.shapes import ChildSampling, DraftShape
from specdec.drafter import DraftVocab
from specdec.drafting.mode import Expand, Frontier
from specdec.utils.numbers import Depth, Share


@dataclass(frozen=True)
class AdaptiveChain(DraftShape):
    """One token after another, as long as the drafter is confident; ``depth`` draft tokens at most.

    The confidence in a draft is what the drafter's confidence head says, if it has one (DSpark), and otherwise the
    largest probability of the distribution that the drafter has for it, at temperature 1. Sequences of a batch end
    where they do alone; the batch's pass is as long as its longest chain.

    Args:
        depth: the most draft tokens.
        min_product: no draft is made after those whose confidences have a smaller product. That product estimates the
            probability that all drafts so far are accepted, without which the next is in vain.
        min_probability: a draft of less confidence ends the chain and is left out, as by llama.cpp's ``p_min``. The
            drafter has run for it in vain; a product ends the chain before that.
    """

    depth: Depth = 8
    min_product: Share = 0.3
    min_probability: Share = 0.0

    in_order: ClassVar[bool] = True

    @property
    def nodes_drafted(self) -> int:
        return self.depth

    @property
    def sizes(self) -> Sequence[int]:
        # several in any case, because growing always reads from the device how long a chain is
        least = 1 if self.min_probability or self.depth == 1 else 2
        return range(least, self.depth + 2)

    @property
    def slots(self) -> int:
        return self.depth - 1

    @property
    def name(self) -> str:
        thresholds = [
            f"{what} {least:g}"
            for what, least in (
                ("product", self.min_product),
                ("probability", self.min_probability),
            )
            if least
        ]
        return f"chain of up to {self.depth}" + (
            f" ({', '.join(thresholds)})" if thresholds else ""
        )

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        order_N = torch.arange(self.depth + 1, device=root_B.device)
        tokens = [root_B]
        drawn = []
        count_B = torch.zeros_like(root_B)
        drafting_B = torch.ones_like(root_B, dtype=torch.bool)
        product_B = torch.ones_like(start.logits_BKD[:, 0, 0])
        frontier = start
        for level in range(self.depth):
            if level:  # a draft sees all before it
                seen_1Q = torch.ones(1, level, dtype=torch.bool, device=root_B.device)
                frontier = expand(tokens[-1][:, None], frontier.h_BKH, seen_1Q, order_N[:level])
            # Whether there is a draft here depends on the drafts before it and on the distribution it will be drawn
            # from, not on which token is drawn. So a draft that is judged was drawn from q, as the proof of speculative
            # sampling needs it (https://arxiv.org/abs/2211.17192). To draw it first, and leave it out if its own
            # probability is low, would keep likely tokens more often than q does.
            confidence_B = frontier.confidences()[:, 0]
            proposed_B = drafting_B & (confidence_B >= self.min_probability)
            draft_B11, q_B1D = children.find(frontier.logits_BKD, 1, level)
            tokens.append(vocab.to_target(draft_B11[:, 0, 0]))
            if q_B1D is not None:
                drawn.append(q_B1D * proposed_B[:, None, None])
            count_B = count_B + proposed_B
            product_B = product_B * confidence_B
            drafting_B = proposed_B & (product_B >= self.min_product)
            if not drafting_B.any():  # waits for the device
                break
        # as many nodes as the longest chain has; what a shorter one leaves unused is its own parent
        N = 1 + int(count_B.max())
        order_N = order_N[:N]
        parents_BN = torch.where(order_N <= count_B[:, None], (order_N - 1).clamp(min=0), order_N)
        tokens_BN = torch.stack(tokens[:N], 1)
        if not drawn:
            return DraftTree(tokens_BN, parents_BN)
        q_BND = torch.cat([*drawn[: N - 1], torch.zeros_like(drawn[0])], 1)
        return DraftTree(tokens_BN, parents_BN, q_BND, vocab.target_ids_D)
