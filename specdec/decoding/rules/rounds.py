"""Drafts drawn at random: rejection sampling, one round for each child.

Legend: B sequences, N tree nodes with the root, V vocabulary, D draft vocabulary.
"""

from typing import ClassVar

import torch
from torch import Tensor

from specdec.decoding.draws import draw
from specdec.decoding.rules.rule import Drafts, Noise, Rule, Verdict, at


def normalised(law_BV: Tensor) -> Tensor:
    """Sum one; a law of nothing stays nothing."""
    return law_BV / law_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(law_BV.dtype).tiny)


class Rounds(Rule):
    """Base: children are tried in the order drawn, each against what the ones before it have left of the target's law.

    At a node let r be the target's law p and q the drafter's. A child x is accepted with probability min(1, r(x)/q(x));
    if it is not, r becomes the residual (r - q)+, renormalised, and q what the next child was drawn from. With no child
    left, the next token is drawn from r. With one child per node this is speculative sampling of a chain
    (https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318), vLLM's rule for probabilistic drafts.

    q must be the law that children were really drawn from, the drafter's own temperature and cuts included, whatever
    they are: only the target's law decides what comes out. Both are renormalised here, so sums off one by rounding do
    no harm. A child that q gives nothing (a filler after q's support is used up) was not drawn and is passed over. A
    residual of nothing, left if a rejection hung on rounding alone, gives way to r as it was.
    """

    sampled: ClassVar[bool] = True

    def accept(self, drafts: Drafts, p_BNV: Tensor, noise: Noise) -> Verdict:
        tokens_BN, parents_BN = drafts.tokens_BN, drafts.parents_BN
        at_B = torch.zeros_like(tokens_BN[:, 0])
        r_BV, q_BV = self._start(drafts, p_BNV, 0)
        path = [torch.ones_like(at_B, dtype=torch.bool)]
        for node in range(1, tokens_BN.shape[1]):  # parents come first, so one pass meets the whole walk in order
            x_B1 = tokens_BN[:, node, None]
            r_x_B, q_x_B = r_BV.gather(1, x_B1)[:, 0], q_BV.gather(1, x_B1)[:, 0]
            tried_B = (parents_BN[:, node] == at_B) & (q_x_B > 0)
            taken_B = tried_B & self.takes(noise.coin_BN[:, node], r_x_B, q_x_B)
            refused_B1 = (tried_B & ~taken_B)[:, None]
            p_BV, new_q_BV = self._start(drafts, p_BNV, node)
            r_BV, q_BV = (
                torch.where(taken_B[:, None], p_BV, torch.where(refused_B1, self.residual(r_BV, q_BV), r_BV)),
                torch.where(taken_B[:, None], new_q_BV, torch.where(refused_B1, self.left(q_BV, x_B1), q_BV)),
            )
            at_B = torch.where(taken_B, node, at_B)
            path.append(taken_B)
        path_BN = torch.stack(path, 1)
        return Verdict(path_BN, draw(r_BV, at(noise.race_BLV, path_BN.sum(-1) - 1)))

    def takes(self, coin_B: Tensor, r_x_B: Tensor, q_x_B: Tensor) -> Tensor:
        """Whether the child is accepted: with probability min(1, r/q)."""
        return coin_B * q_x_B < r_x_B

    def residual(self, r_BV: Tensor, q_BV: Tensor) -> Tensor:
        """What is left of the target's law once a child drawn from q was refused."""
        left_BV = (r_BV - q_BV).clamp_min(0)
        return torch.where((left_BV > 0).any(-1, keepdim=True), normalised(left_BV), r_BV)

    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        """The law of the next child, given that the children before it were refused, x the last of them."""
        raise TypeError(f"{type(self).__name__} must say what its next child is drawn from")

    def _start(self, drafts: Drafts, p_BNV: Tensor, node: int) -> tuple[Tensor, Tensor]:
        """Both laws at a node, over the target's vocabulary."""
        assert drafts.q_BND is not None and drafts.ids_D is not None, "sampled drafts come with their law"
        p_BV, q_BD = p_BNV[:, node], drafts.q_BND[:, node].to(p_BNV.dtype)
        return normalised(p_BV), normalised(torch.zeros_like(p_BV).index_copy(1, drafts.ids_D, q_BD))
