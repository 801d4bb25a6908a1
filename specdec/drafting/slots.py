"""Which slots of a text learn at which unroll step, and which of them the unroll computes.

A slot t is the place of token x[t] and of the feature there. At unroll step k it reads token x[t+1+k] and predicts
x[t+2+k]: it learns from the target's next-token distribution at position t+1+k.

Legend: B batch, T tokens, S = B T slots, M kept slots of a row, K unroll steps.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

# With more than this share of the slots to keep, all are kept: gathering would cost more than it saves.
KEEP_ALL_ABOVE = 0.9
# A row keeps a multiple of a 32nd of its slots, so that kernels are compiled for few shapes.
SHAPES_PER_ROW = 32


def shift(x_BT: Tensor, by: int) -> Tensor:
    """Return ``x[:, t + by]`` at column t, zeros (False) past the end; (B, T) or (B, T, ...)."""
    shifted = torch.zeros_like(x_BT)
    length = x_BT.shape[1]
    if by < length:
        shifted[:, : length - by] = x_BT[:, by:]
    return shifted


def supervised(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Return the slots whose step-k prediction is trained, bool (B, T).

    There x[t+1+k], which is read, and x[t+2+k], which is predicted, are answer tokens of the slot's document.
    """
    trained = torch.zeros_like(loss_mask_BT)
    slot_document_BT = documents_BT[:, : -2 - k]
    predicted_document_BT = documents_BT[:, 2 + k :]
    same_document_BT = (slot_document_BT == predicted_document_BT) & (slot_document_BT >= 0)
    answer_BT = loss_mask_BT[:, 1 + k : -1] & loss_mask_BT[:, 2 + k :]
    trained[:, : slot_document_BT.shape[1]] = answer_BT & same_document_BT
    return trained


def reachable(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Return the slots that decoding can reach at depth k, bool (B, T).

    There x[t+1] to x[t+2+k] are all answer tokens of the slot's document.
    """
    reached = supervised(loss_mask_BT, documents_BT, k)
    for ahead in range(1, 1 + k):
        reached = reached & shift(loss_mask_BT, ahead)
    return reached


class KeptSlots(NamedTuple):
    """The slots that the unroll computes whole.

    Later slots see a slot's step-0 keys and nothing else of it. Of a slot that no step trains, in chat data most of
    the prompt, the unroll therefore computes only those keys.
    """

    slots_BM: Tensor  # int64, into the row's T, ascending; a shorter row ends in copies of slot 0
    place_S: Tensor  # int64, where a kept slot stands among the B M

    @classmethod
    def of(cls, trained_KBT: Tensor) -> Self | None:
        """Return the slots that any of the K steps trains, or None if they are nearly all.

        Args:
            trained_KBT: bool, which slots each step trains.
        """
        kept_BT = trained_KBT.any(0)
        B, T = kept_BT.shape
        most = int(kept_BT.sum(1).max())
        grain = -(-T // SHAPES_PER_ROW)
        M = max(1, -(-most // grain)) * grain
        if M > KEEP_ALL_ABOVE * T:
            return None
        rank_BT = kept_BT.cumsum(1) - 1
        rows_R, slots_R = kept_BT.nonzero(as_tuple=True)
        slots_BM = rank_BT.new_zeros(B, M)
        slots_BM[rows_R, rank_BT[rows_R, slots_R]] = slots_R
        row_start_B1 = torch.arange(B, device=rank_BT.device)[:, None] * M
        return cls(slots_BM, (rank_BT + row_start_B1).flatten())

    def among(self, others: Self | None) -> Tensor:
        """Return where these slots stand among the ``others``' M, of which they are some, or among all T for None.

        Returns:
            int64 (B, M).
        """
        if others is None:
            return self.slots_BM
        B, M = others.slots_BM.shape
        place_BM = others.place_S.view(B, -1).gather(1, self.slots_BM)
        row_start_B1 = torch.arange(B, device=place_BM.device)[:, None] * M
        return (place_BM - row_start_B1).clamp(min=0)  # a copy of slot 0 may be in none

    def take(self, x: Tensor, ahead: int = 0) -> Tensor:
        """Return (B, T or more, ...) at the kept slots, or ``ahead`` columns behind them: (B, M, ...)."""
        B, T = x.shape[:2]
        first_B1 = torch.arange(B, device=x.device)[:, None] * T + ahead
        columns = (self.slots_BM + first_B1).flatten()
        return x.flatten(0, 1).index_select(0, columns).unflatten(0, (B, -1))
