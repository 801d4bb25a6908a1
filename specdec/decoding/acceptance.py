"""Which drafts the target takes.

Legend: N tree nodes, V vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

from specdec.decoding.tree import DraftTree


class Accepted(NamedTuple):
    """The outcome of a verification."""

    path_N: Tensor  # bool, the accepted nodes, the root among them
    next_1: Tensor  # int64, the target's own token after the last accepted node: the bonus token


def accept_greedy(tree: DraftTree, ancestors_NN: Tensor, logits_NV: Tensor) -> Accepted:
    """The longest path on which every draft is the target's own greedy token (https://arxiv.org/abs/2401.15077).

    At most one such path exists among siblings with different tokens; ties go to the first node.
    """
    choice_N = logits_NV.argmax(-1)
    agrees_N = tree.tokens_N == choice_N[tree.parents_N]
    agrees_N[0] = True
    accepted_N = (agrees_N | ~ancestors_NN).all(-1)
    leaf_1 = (accepted_N * ancestors_NN.sum(-1)).argmax(dim=0, keepdim=True)  # a 0-d index would break fullgraph
    return Accepted(ancestors_NN[leaf_1][0], choice_N[leaf_1])
