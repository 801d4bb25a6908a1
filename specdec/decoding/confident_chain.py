"""A chain that ends where the drafter begins to doubt.

Legend: D draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.children import Children
from specdec.decoding.growth import Chain, Expand, Frontier
from specdec.decoding.tree import DraftTree
from specdec.drafter import DraftVocab


@dataclass(frozen=True)
class ConfidentChain(Chain):
    """One token after another, until the drafter gives the whole chain less than ``threshold``; at most ``depth``.

    The token that brings doubt is still proposed: it costs nothing any more. Whether to go on is decided by what is
    drafted already, so drawn drafts keep their law. Every level waits for the device once.

    Raises:
        ValueError: the threshold is no probability below 1.
    """

    threshold: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise ValueError(f"growth: threshold must lie in [0, 1), not {self.threshold}")

    @property
    def name(self) -> str:
        return f"chain of at most {self.depth} (threshold {self.threshold:g})"

    def grow(self, root_1: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        device, least = root_1.device, math.log(self.threshold) if self.threshold else -math.inf
        tokens, frontier, laws, value = [root_1], start, [], 0.0
        for level in range(self.depth):
            laws.append(children.law(frontier.log_probs_KD))
            draft_1 = children.find(laws[-1], 1, level)[:, 0]
            tokens.append(vocab.to_target(draft_1))
            value += float(frontier.log_probs_KD[0, draft_1])
            if level + 1 == self.depth or value < least:
                break
            seen_1Q = torch.ones(1, level + 1, dtype=torch.bool, device=device)
            frontier = expand(tokens[-1], frontier.h_KH, seen_1Q, torch.arange(level + 1, device=device))
        q_ND = torch.cat([*laws, torch.zeros_like(laws[0])]) if children.rule.sampled else None
        return DraftTree(torch.cat(tokens), torch.arange(-1, len(laws), device=device).clamp(min=0), q_ND)
