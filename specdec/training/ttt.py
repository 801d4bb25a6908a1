"""Training-time test: unroll the drafter over its own features (EAGLE-3, https://arxiv.org/abs/2503.01840).

At unroll step k, slot t reads token x[t+1+k] and predicts x[t+2+k]; it learns from the target's next-token distribution
at position t+1+k.

Legend: B batch, T tokens, N aux layers, H hidden, S = B T slots, M kept slots of a row, K unroll steps.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.drafter import Drafter, Step
from specdec.nn.unroll import BlockCache, Dense, UnrollCache, UnrollKernel
from specdec.nn.view import Spans, View

ORACLE = Dense()  # the kernel that the others are compared with
MOST = 0.9  # of the tokens: with more than these to keep, all are kept


def shift(x_BT: Tensor, by: int) -> Tensor:
    """``x[:, t + by]`` at column t; zeros (False) past the end. Works on (B, T) and (B, T, ...)."""
    out = torch.zeros_like(x_BT)
    if by < x_BT.shape[1]:
        out[:, : x_BT.shape[1] - by] = x_BT[:, by:]
    return out


def supervised(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Slots whose step-k prediction is trained: x[t+1+k] and x[t+2+k] are answer tokens of the slot's document."""
    out = torch.zeros_like(loss_mask_BT)
    here_BT = documents_BT[:, : -2 - k]
    there_BT = documents_BT[:, 2 + k :]
    answer_BT = loss_mask_BT[:, 1 + k : -1] & loss_mask_BT[:, 2 + k :]
    out[:, : here_BT.shape[1]] = answer_BT & (here_BT == there_BT) & (here_BT >= 0)
    return out


def reachable(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Slots that decoding can reach at depth k: x[t+1] to x[t+2+k] are all answer tokens of the slot's document."""
    out = supervised(loss_mask_BT, documents_BT, k)
    for ahead in range(1, 1 + k):
        out = out & shift(loss_mask_BT, ahead)
    return out


class KeptSlots(NamedTuple):
    """The slots that the unroll computes whole. Later slots see a slot's step-0 keys and nothing else of it, so of a
    slot that no step trains (in chat data most of the prompt) only those keys are computed."""

    slots_BM: Tensor  # int64, into the row's T, ascending; a row with fewer than M ends in copies of its slot 0
    place_S: Tensor  # int64, where a kept slot stands among the B M

    @classmethod
    def of(cls, trained_KBT: Tensor) -> Self | None:
        """Those that a step trains, or None if nearly all; M has few values, as kernels are compiled for shapes."""
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
        return cls(
            slots_BM, (rank_BT + torch.arange(B, device=rank_BT.device)[:, None] * M).flatten()
        )

    def among(self, others: Self | None) -> Tensor:
        """Where these slots, which must be among the others, stand in the others' M; None for all T: int64 (B, M)."""
        if others is None:
            return self.slots_BM
        B, M = others.slots_BM.shape
        at_BM = others.place_S.view(B, -1).gather(1, self.slots_BM)
        # copies may be of none
        return (at_BM - torch.arange(B, device=at_BM.device)[:, None] * M).clamp(min=0)

    def take(self, x: Tensor, ahead: int = 0) -> Tensor:
        """(B, T or more, ...) at the kept slots, or ``ahead`` of them: (B, M, ...)."""
        B, T = x.shape[:2]
        first_B1 = torch.arange(B, device=x.device)[:, None] * T + ahead
        return (
            x.flatten(0, 1)
            .index_select(0, (self.slots_BM + first_B1).flatten())
            .unflatten(0, (B, -1))
        )


def ttt_unroll(
    drafter: Drafter,
    ids_BT: Tensor,
    aux_BTNH: Tensor,
    documents_BT: Tensor,
    steps: int,
    kernel: UnrollKernel = ORACLE,
    recompute: bool = False,
    kept: Sequence[KeptSlots | None] = (),
) -> Iterator[Step]:
    """The drafter's steps 0..steps-1 at every anchor at once.

    Each slot sees the step-0 keys of its own document up to itself and its own keys of the later steps, at rotary
    position t + k, which is what a draft chain started at that anchor sees in its cache.

    Args:
        kernel: how the attention is computed; all kernels give the same numbers.
        recompute: keep only each step's inputs and outputs for the backward pass, and run the step again there; not
            of a block drafter, whose steps are one call.
        kept: of every step, the slots whose states are wanted, (B, M, H) then, among those of the step before; None, or
            no list at all, for all. Of the others only the step-0 keys are worked out.
    """
    if drafter.config.recurrence.masks:
        drafter.config.recurrence.check_depth(steps)
        yield from _block_unroll(
            drafter, ids_BT, aux_BTNH, documents_BT, steps, kernel, (kept or [None])[0]
        )
        return
    whole = View.packed(documents_BT)
    T = ids_BT.shape[1]
    view = whole
    before = None
    # the first feature is the target's
    h_BTH = drafter.fuse(aux_BTNH)
    keys = UnrollCache(kernel)
    # every token once, for all steps
    read = drafter.read(torch.nn.functional.pad(ids_BT, (0, steps)), h_BTH.dtype)
    for k in range(steps):
        if (now := kept[k] if kept else None) is not None and (k < 2 or now is not before):
            view = whole.of(now.slots_BM) if k else whole._replace(wanted_BM=now.slots_BM)
        if k and now is not None and now is not before:  # fewer slots than the step before
            at_BM = now.among(before)
            h_BTH = h_BTH.take_along_dim(at_BM[..., None], 1)
            keys.narrow(at_BM)
        before = now
        # of the text no later step reads anything, but the mask
        if k == 1 and drafter.config.recurrence.parallel:
            read = drafter.read(drafter.following(ids_BT[:1, :1]), h_BTH.dtype).expand(
                *read.shape[:2], -1
            )
        read_k = read[:, 1 + k : 1 + k + T] if k == 0 or now is None else now.take(read, 1 + k)
        here = view._replace(positions_BT=view.positions_BT + k)
        if recompute and torch.is_grad_enabled():
            step = _recomputed(drafter, read_k, h_BTH, here, keys)
        else:
            step = drafter.advance(read_k, h_BTH, here._replace(cache=keys))
        yield step
        # from now on the drafter reads what it made itself, as it does when it decodes
        h_BTH = step.h_BTH


def _block_unroll(
    drafter: Drafter,
    ids_BT: Tensor,
    aux_BTNH: Tensor,
    documents_BT: Tensor,
    steps: int,
    kernel: UnrollKernel,
    kept: KeptSlots | None,
) -> Iterator[Step]:
    """All steps of a block drafter in one call, at every anchor or at those that are kept (DFlash,
    https://arxiv.org/abs/2602.06036): a block is the token after the anchor and a mask for each step.

    It sees the features of its document up to its anchor, and all of itself.
    """
    whole = View.packed(documents_BT)
    T = ids_BT.shape[1]
    h_BTH = drafter.fuse(aux_BTNH)
    root_BT = torch.nn.functional.pad(ids_BT, (0, 1))[:, 1:]
    view, root_BM = (
        (whole, root_BT) if kept is None else (whole.of(kept.slots_BM), kept.take(root_BT))
    )
    masks = drafter.config.recurrence.masks
    M = root_BM.shape[1]
    # level by level
    ids = torch.cat([root_BM, drafter.following(root_BM).repeat(1, masks)], 1)
    blocks = 1 + masks
    assert isinstance(view.visibility, Spans)
    depth = torch.arange(blocks, device=ids.device).repeat_interleave(M)
    positions = torch.cat([whole.positions_BT, view.positions_BT.repeat(1, blocks) + 1 + depth], 1)
    cache = BlockCache(kernel, view.visibility, T)
    here = View(positions, view.visibility, whole.positions_BT, cache=cache)
    step = drafter.advance(drafter.read(ids, h_BTH.dtype), h_BTH, here)
    for k in range(steps):
        yield Step(*(x[:, (k + 1) * M : (k + 2) * M] for x in step))


def _recomputed(
    drafter: Drafter, read: Tensor, h_BTH: Tensor, view: View, keys: UnrollCache
) -> Step:
    """A step under gradient checkpointing; its keys are added once, however often it is run."""
    before = keys.copy()
    added = list[UnrollCache]()

    def run(read: Tensor, h_BTH: Tensor) -> Step:
        cache = before.copy()
        if not added:  # else it is run again, in the backward pass
            added.append(cache)
        return drafter.advance(read, h_BTH, view._replace(cache=cache))

    step: Step = checkpoint(run, read, h_BTH, use_reentrant=False)
    keys.layers = added[0].layers
    return step
