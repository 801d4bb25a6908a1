"""Draft trees.

Legend: N nodes, the root included.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """Tokens proposed after the last committed one; node 0, the root, is that committed token.

    Parents precede their children, and the root is its own parent. Everything else is derived.
    """

    tokens_N: Tensor  # int64 target ids
    parents_N: Tensor  # int64

    def ancestors_NN(self) -> Tensor:  # noqa: N802
        """bool: column j is an ancestor of row i, or i itself. By pointer jumping, in log2(N) rounds."""
        jump_N = self.parents_N
        seen_NN = torch.eye(len(jump_N), dtype=torch.bool, device=jump_N.device)
        for _ in range(max(1, len(jump_N) - 1).bit_length()):
            seen_NN, jump_N = seen_NN | seen_NN[jump_N], jump_N[jump_N]
        return seen_NN
