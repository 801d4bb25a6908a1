"""Draft trees: what is proposed, verified and accepted. A chain is a tree of one branch.

Legend: B sequences, N nodes, the root included, P path nodes at most, D draft vocabulary.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """Tokens proposed after the last committed one of every sequence.

    Node 0, the root, is that committed token and its own parent. Parents stand before their children, siblings in the
    order they were drawn. Trees of a batch have the same number of nodes.
    """

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64
    q_BND: Tensor | None = None  # what a node's children were drawn from, zeros at leaves; None if not drawn
    ids_D: Tensor | None = None  # int64, the target ids of the draft vocabulary, which q is over

    @classmethod
    def of_roots(cls, root_B: Tensor) -> Self:
        """Nothing proposed: the last tokens, (B,) int64, alone."""
        return cls(root_B[:, None], torch.zeros_like(root_B)[:, None])


def ancestors(parents_BN: Tensor) -> Tensor:
    """(B, N, N) bool: column j is an ancestor of row i, or i itself. By pointer jumping, in log2(N) rounds."""
    B, N = parents_BN.shape
    jump_BN = parents_BN
    seen_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    for _ in range(max(1, N - 1).bit_length()):
        seen_BNN = seen_BNN | seen_BNN.gather(1, jump_BN[..., None].expand(B, N, N))
        jump_BN = jump_BN.gather(1, jump_BN)
    return seen_BNN


def nodes_in_order(path_BN: Tensor, length: int) -> Tensor:
    """The nodes of each path from the root on, (B, P) int64, P = ``length``; behind a path's end any node, best j at j.

    Args:
        path_BN: bool, the nodes on the path.
    """
    B, N = path_BN.shape
    order_N = torch.arange(N, device=path_BN.device)
    order_P = torch.arange(length, device=path_BN.device)
    place_BN = (path_BN[:, None] & (order_N < order_N[:, None])).sum(-1)  # how many of the path stand before each
    column_BN = torch.where(path_BN, place_BN, length)  # nodes off the path go to a column past the end
    rest_BW = torch.cat([order_P, order_P[:1]]).clamp_max(N - 1).repeat(B, 1)
    return rest_BW.scatter(1, column_BN, order_N.expand(B, N))[:, :length]
