"""What an acceptance rule is given and what it says.

Legend: B sequences, N tree nodes with the root, L levels with the root's, V vocabulary, D draft vocabulary, R children.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.draws import likeliest


class Drafts(NamedTuple):
    """A batch of draft trees of N nodes each, and, if the drafts were drawn, from what.

    Parents stand before their children, siblings in the order they were drawn. Node 0, the root, is the last committed
    token and its own parent. Any other node that is its own parent is padding and never taken.
    """

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64
    q_BND: Tensor | None = None  # the law that the children of a node were really drawn from; unread at leaves
    ids_D: Tensor | None = None  # int64, the target ids of the draft vocabulary, which q is over


class Noise(NamedTuple):
    """All of the chance in accepting, independent of the chance in drafting."""

    coin_BN: Tensor  # uniform in [0, 1), one for each node
    race_BLV: Tensor  # Exp(1), positive; one race for each level: the root's draws the token after the root


class Verdict(NamedTuple):
    """Which drafts are taken, and the target's own token after them."""

    path_BN: Tensor  # bool, the accepted nodes, the root among them
    next_B: Tensor  # int64


class Rule:
    """Base of the acceptance rules: frozen specs without state.

    A rule is lossless if the accepted tokens and the next one, continued by the target, have the law of the target
    alone, exactly. All of it is shape-static, on any device, and no sequence sees another.
    """

    sampled: ClassVar[bool] = False
    """Whether ``accept`` reads the law of the drafts, so that they must be drawn as :meth:`children` draws them."""

    def races(self, width: int) -> int:
        """How many races :meth:`children` reads to find ``width`` children of a node."""
        return 0

    def children(self, law_BD: Tensor, width: int, race_BRD: Tensor) -> Tensor:
        """The children of nodes as this rule wants them, in order, (B, width) int64 ids of the draft vocabulary.

        A growth may keep fewer of them, but if the rule is ``sampled`` it must drop them from the end, and by what it
        knew before it drew those it drops: a look at them would change the law they were drawn from.

        Args:
            law_BD: the drafter's law, its own temperature and cuts applied; sampled children are drawn from it, and it
                is what ``Drafts.q_BND`` must then hold. For children that are not drawn anything of the same order.
            race_BRD: Exp(1) noise, R at least ``races(width)``.
        """
        return likeliest(law_BD, width)[1]

    def accept(self, drafts: Drafts, p_BNV: Tensor, noise: Noise) -> Verdict:
        """Judge the drafts.

        Args:
            p_BNV: the law of the token after each node that a plain decode would draw from: warped; float32 or wider.
        """
        raise TypeError(f"{type(self).__name__} must accept")


def ancestors(parents_BN: Tensor) -> Tensor:
    """(B, N, N) bool: column j is an ancestor of row i, or i itself. By pointer jumping, in log2(N) rounds."""
    B, N = parents_BN.shape
    jump_BN = parents_BN
    seen_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    for _ in range(max(1, N - 1).bit_length()):
        seen_BNN = seen_BNN | seen_BNN.gather(1, jump_BN[..., None].expand(B, N, N))
        jump_BN = jump_BN.gather(1, jump_BN)
    return seen_BNN


def at(x_BNV: Tensor, index_B: Tensor) -> Tensor:
    """One row of each sequence, (B, V)."""
    return x_BNV[torch.arange(len(index_B), device=index_B.device), index_B]
