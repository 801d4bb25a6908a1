"""Which slots are trained at which step, in pieces that share the target positions they learn from.

Step k at slot t learns from position t + 1 + k. Pieces are cut by position, so that the target's law there is worked
out once and serves every step, and so that neither it nor the drafter's logits ever stand in memory whole.

Legend: B rows of the batch, T tokens, S = B T slots, K unroll steps, C positions of a piece.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.training.kept import Kept, states

Index = Tensor | slice


class Group(NamedTuple):
    """The slots of one step that a piece serves."""

    step: int
    slots: Index  # into the S slots
    states: Index  # of these slots, into what the step yields, flattened
    positions: Index  # into the piece's C positions; as many as slots
    rows: int


class Piece(NamedTuple):
    """Some positions of the target and every slot that learns from them."""

    positions_C: Tensor  # int64, into the S flattened positions
    groups: list[Group]


def pieces(trained_KBT: Tensor, size: int, kept: Kept | None = None) -> Iterator[Piece]:
    """Cut the trained slots into pieces of at most ``size`` positions.

    Args:
        trained_KBT: bool, the slots trained at each step; slot t of step k must have a position t + 1 + k.
        kept: the slots that the steps yield; None for all.
    """
    K, S = len(trained_KBT), trained_KBT[0].numel()
    trained_KS = trained_KBT.flatten(1)
    taught_S = torch.zeros_like(trained_KS[0])
    for k in range(min(K, S - 1)):
        taught_S[1 + k :] |= trained_KS[k, : S - 1 - k]
    positions_U = taught_S.nonzero()[:, 0]
    rank_S = taught_S.cumsum(0) - 1
    slots = [mask_S.nonzero()[:, 0] for mask_S in trained_KS]
    places = [states(kept, at) for at in slots]
    ranks = [rank_S[at + 1 + k] for k, at in enumerate(slots)]
    starts = torch.arange(0, len(positions_U) + size, size, device=rank_S.device)
    cuts = torch.stack([torch.searchsorted(rank, starts) for rank in ranks]).tolist()
    for piece in range(len(starts) - 1):
        start, groups = piece * size, list[Group]()
        for k in range(K):
            a, b = cuts[k][piece : piece + 2]
            if a < b:
                slots_R, states_R, ranks_R = slots[k][a:b], places[k][a:b], ranks[k][a:b] - start
                groups.append(Group(k, _run(slots_R), _run(states_R), _run(ranks_R), b - a))
        yield Piece(positions_U[start : start + size], groups)


def _run(index: Tensor) -> Index:
    """A slice where the index is one, which reads and writes without copies; asked on the CPU only."""
    if index.device.type == "cpu":
        first, last = int(index[0]), int(index[-1])
        if last - first + 1 == len(index):
            return slice(first, last + 1)
    return index
