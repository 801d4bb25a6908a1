"""Chains that leave one text side by side: who sees whom, and what they drafted.

Legend: A chains, K drafts of a chain, J = K + 1, H hidden, D draft vocabulary, Q nodes of trunk and chains.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chains(NamedTuple):
    """What A chains of K greedy drafts did."""

    tokens_AK: Tensor  # int64, the drafted tokens, as ids of the target
    log_probs_AKD: Tensor  # float32 at least: each draft is the most likely token of its row
    features_AJH: Tensor  # what each step read, the true states first; and what the last handed on
    # of a drafter with a confidence head: the chance that it gives each draft
    confidence_AK: Tensor | None = None


class Branches(NamedTuple):
    """Who sees whom among chains that leave one trunk, in the form that :meth:`specdec.nn.view.View.append` takes.

    The first columns are the trunk, a chain itself. Then follow the chains' nodes, level by level, A to a level: the
    node of level 0 of chain a stands where trunk node ``at_A[a]`` does and sees the trunk nodes before that.
    """

    trunk: int
    at_A: Tensor  # int64, from 0 to trunk

    def seen(self, first: int, last: int, whole: bool = False) -> Tensor:
        """Return what the nodes of levels ``first`` to ``last - 1`` see, bool (1, nodes, Q).

        Args:
            whole: a node sees the later nodes of its chain too.
        """
        device = self.at_A.device
        chains = len(self.at_A)
        column_Q = torch.arange(self.trunk + last * chains, device=device)
        on_trunk_Q = column_Q < self.trunk
        level_Q = (column_Q - self.trunk) // chains
        chain_Q = (column_Q - self.trunk) % chains
        node = torch.arange(first * chains, last * chains, device=device)[:, None]
        level = node // chains
        chain = node % chains
        trunk_part = on_trunk_Q & (column_Q < self.at_A[chain])
        chain_part = ~on_trunk_Q & (chain_Q == chain) & ((level_Q <= level) | whole)
        return (trunk_part | chain_part)[None]

    def depth(self, levels: int) -> Tensor:
        """Return how far behind the trunk's first node each of the Q nodes stands, int64."""
        device = self.at_A.device
        chain_depths = self.at_A + torch.arange(levels, device=device)[:, None]
        return torch.cat([torch.arange(self.trunk, device=device), chain_depths.flatten()])
