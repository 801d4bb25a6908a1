"""How the drafts of a pass are made: the interface of every way."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Frontier(NamedTuple):
    """What the drafter says at K nodes: the next features, and the next token's logits."""

    h_BKH: Tensor
    logits_BKD: Tensor  # float32 at least


Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Frontier]
"""(ids_BK, h_BKH, seen_BKQ, depth_BQ) -> Frontier: one level of drafting; see View.append for the last two."""
