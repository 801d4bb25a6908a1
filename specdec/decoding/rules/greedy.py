"""Drafts against the target's most likely tokens.

Legend: B sequences, N tree nodes with the root, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.rules.rule import Drafts, Noise, Rule, Verdict, ancestors


@dataclass(frozen=True)
class Greedy(Rule):
    """The longest path on which every draft is the target's most likely token (https://arxiv.org/abs/2401.15077).

    Lossless for greedy decoding, however the drafts came about. Of equally likely tokens the first counts, as in plain
    decoding; of equal siblings the one with the longer path behind it. There is no chance in it, and it reads no noise.
    """

    def accept(self, drafts: Drafts, p_BNV: Tensor, noise: Noise) -> Verdict:
        ancestors_BNN = ancestors(drafts.parents_BN)
        choice_BN = p_BNV.argmax(-1)
        agrees_BN = drafts.tokens_BN == choice_BN.gather(1, drafts.parents_BN)
        agrees_BN[:, 0] = True
        taken_BN = (agrees_BN[:, None] | ~ancestors_BNN).all(-1)
        leaf_B1 = (taken_BN * ancestors_BNN.sum(-1)).argmax(-1, keepdim=True)
        path_BN = ancestors_BNN.gather(1, leaf_B1[..., None].expand_as(ancestors_BNN[:, :1]))[:, 0]
        return Verdict(path_BN, choice_BN.gather(1, leaf_B1)[:, 0])
