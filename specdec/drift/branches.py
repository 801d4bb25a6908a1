"""Draft chains that leave one text at several places, side by side: a draft tree whose trunk is the text.

Legend: A chains, L trunk nodes, K new nodes, Q nodes of trunk and chains so far.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Branches(NamedTuple):
    """Who sees whom, as :meth:`specdec.nn.view.View.append` wants to be told.

    The first L columns are the trunk, a chain. Then follow the chains' nodes, level by level, A to a level: the node
    of level 0 of chain a stands where trunk node ``at_A[a]`` does and sees the trunk nodes before that.
    """

    trunk: int  # L
    at_A: Tensor  # int64, 0..L

    def seen(self, first: int, last: int) -> Tensor:
        """What the nodes of the levels from ``first`` up to before ``last`` see, (1, K, Q) bool, level by level."""
        device, chains = self.at_A.device, len(self.at_A)
        column_Q = torch.arange(self.trunk + last * chains, device=device)
        on_trunk_Q = column_Q < self.trunk
        level_Q, chain_Q = (column_Q - self.trunk) // chains, (column_Q - self.trunk) % chains
        node_K = torch.arange(first * chains, last * chains, device=device)
        level_K1, chain_K1 = (node_K // chains)[:, None], (node_K % chains)[:, None]
        before_KQ = on_trunk_Q & (column_Q < self.at_A[chain_K1[:, 0], None])
        own_KQ = ~on_trunk_Q & (chain_Q == chain_K1) & (level_Q <= level_K1)
        return (before_KQ | own_KQ)[None]

    def depth(self, levels: int) -> Tensor:
        """How far behind the trunk's first node each of the Q nodes stands, (Q,) int64."""
        device = self.at_A.device
        of_chains = self.at_A + torch.arange(levels, device=device)[:, None]
        return torch.cat([torch.arange(self.trunk, device=device), of_chains.flatten()])
