"""Which slots the unroll needs beyond their first keys.

Step 0 gives every slot its key, which later slots see. Beyond that a slot is seen by nobody but itself, so one that no
step trains is left out: in chat data that is most of the prompt.

Legend: B batch, T tokens, S = B T slots, M kept slots of a row, K unroll steps.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

MOST = 0.9  # of the tokens: with more, all are kept


class Kept(NamedTuple):
    """The kept slots of every row, ascending; a row with fewer than M ends in copies of its slot 0."""

    slots_BM: Tensor  # int64, into the row's T
    place_S: Tensor  # int64, where a kept slot stands among the B M

    @classmethod
    def of(cls, trained_KBT: Tensor) -> Self | None:
        """Those that a step trains, or None if these are nearly all.

        M is rounded up, to at most 32 different lengths: kernels are compiled for shapes.
        """
        kept_BT = trained_KBT.any(0)
        B, T = kept_BT.shape
        count_B = kept_BT.sum(1)
        grain = -(-T // 32)
        M = max(1, -(-int(count_B.max()) // grain)) * grain
        if M > MOST * T:
            return None
        rank_BT = kept_BT.cumsum(1) - 1
        slots_BM = count_B.new_zeros(B, M)
        rows_R, slots_R = kept_BT.nonzero(as_tuple=True)
        slots_BM[rows_R, rank_BT[rows_R, slots_R]] = slots_R
        return cls(slots_BM, (rank_BT + torch.arange(B, device=rank_BT.device)[:, None] * M).flatten())

    def take(self, x: Tensor, ahead: int = 0) -> Tensor:
        """(B, T or more, ...) at the kept slots, or ``ahead`` of them: (B, M, ...)."""
        B, T = x.shape[:2]
        first_B1 = torch.arange(B, device=x.device)[:, None] * T + ahead
        return x.flatten(0, 1).index_select(0, (self.slots_BM + first_B1).flatten()).unflatten(0, (B, -1))


def states(kept: Kept | None, slots_R: Tensor) -> Tensor:
    """Where slots, int64 into S, stand among the flattened states that a step of the unroll yields."""
    return slots_R if kept is None else kept.place_S[slots_R]
