"""What one way of running a drafter says at the places compared.

Legend: A anchors, K depths, H width, V target vocabulary, D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drafter import Drafter


class Said(NamedTuple):
    """At every anchor and depth."""

    features_AKH: Tensor
    """What the step read: at depth 0 the target's states as one, further on what the step before handed on."""
    log_probs_AKV: Tensor
    """Of the token after next, float32 at least; -inf for tokens that the drafter does not know."""

    def at(self, rows: slice) -> "Said":
        """Some of the anchors."""
        return Said(*(x[rows] for x in self))


def over_vocabulary(drafter: Drafter, log_probs_AKD: Tensor) -> Tensor:
    """Log-probabilities of the drafter's tokens as those of the target's, (A, K, V)."""
    wide = log_probs_AKD.new_full((*log_probs_AKD.shape[:2], drafter.config.vocab_size), float("-inf"))
    return wide.index_copy(2, drafter.vocab.target_ids_D, log_probs_AKD)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-probabilities."""
    return torch.promote_types(dtype, torch.float32)
