"""Drafts taken at their word, whatever they were drawn from, under a target that samples.

Legend: B sequences, N tree nodes with the root, L levels with the root's, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.draws import draw
from specdec.decoding.rules.rule import Drafts, Noise, Rule, Verdict, ancestors, at


@dataclass(frozen=True)
class OneHot(Rule):
    """The target draws its own token at each node; where that token is a child, the walk goes on from the child.

    Lossless for any children found without a look at this noise, drawn at random or not: the draws are a plain
    decode's, and the drafts only decide how many of them fit into one pass. With the noise of a plain decode, the
    tokens themselves are a plain decode's. It suits children that are a function of the past, such as a greedy chain or
    EAGLE-2's tree; if children are drawn from q, :class:`WithoutReplacement` accepts more of them.

    In law it is the rule for drafters without probabilities of vLLM, and of EAGLE for trees: try children in turn,
    accept c with probability p(c), else strike c from p and renormalise. That accepts the k-th child, and at last draws
    an x that is no child, with the same probability p(c_k), p(x) as one draw from p: the renormalisations cancel.

    It reads ``race_BLV`` alone; L must be at least the number of levels of the deepest tree.
    """

    def accept(self, drafts: Drafts, p_BNV: Tensor, noise: Noise) -> Verdict:
        tokens_BN, parents_BN = drafts.tokens_BN, drafts.parents_BN
        B, N = tokens_BN.shape
        node_N = torch.arange(N, device=tokens_BN.device)
        reached_BN = (node_N == 0).expand(B, N)  # more than one node only if siblings are equal: one context
        walking_B = torch.ones(B, dtype=torch.bool, device=tokens_BN.device)
        next_B = tokens_BN[:, 0]
        for level in range(noise.race_BLV.shape[1]):
            first_B = reached_BN.to(torch.uint8).argmax(-1)
            next_B = torch.where(walking_B, draw(at(p_BNV, first_B), noise.race_BLV[:, level]), next_B)
            child_BN = reached_BN.gather(1, parents_BN) & (tokens_BN == next_B[:, None]) & (node_N != parents_BN)
            walking_B = walking_B & child_BN.any(-1)
            reached_BN = torch.where(walking_B[:, None], child_BN, reached_BN)
        return Verdict(at(ancestors(parents_BN), reached_BN.to(torch.uint8).argmax(-1)), next_B)
