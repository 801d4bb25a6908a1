"""Training-time test: unroll the drafter over its own features (EAGLE-3, https://arxiv.org/abs/2503.01840).

At step k, slot t reads token x[t+1+k] and predicts x[t+2+k]; its teacher is the target's law at position t+1+k.

Legend: B batch, T tokens, N aux layers, H hidden.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.drafter import Drafter, Step
from specdec.nn.cache import UnrollCache
from specdec.nn.unroll import Dense, UnrollKernel
from specdec.nn.view import View
from specdec.training.kept import Kept

ORACLE = Dense()


def shift(x_BT: Tensor, by: int) -> Tensor:
    """``x[:, t + by]`` at column t; zeros (False) past the end. Works on (B, T) and (B, T, ...)."""
    out = torch.zeros_like(x_BT)
    if by < x_BT.shape[1]:
        out[:, : x_BT.shape[1] - by] = x_BT[:, by:]
    return out


def ttt_unroll(
    drafter: Drafter,
    ids_BT: Tensor,
    aux_BTNH: Tensor,
    documents_BT: Tensor,
    steps: int,
    kernel: UnrollKernel = ORACLE,
    recompute: bool = False,
    kept: Kept | None = None,
) -> Iterator[Step]:
    """The drafter's steps 0..steps-1 at every anchor at once.

    Each slot sees the step-0 keys of its own document up to itself and its own keys of the later steps, at rotary
    position t + k, which is what a draft chain started at that anchor sees in its cache.

    Args:
        kernel: how the attention is computed; all kernels give the same numbers.
        recompute: keep only each step's inputs and outputs for the backward pass, and run the step again there.
        kept: the slots whose states are wanted, (B, M, H) then, the others being run for their step-0 keys only; None
            for all.
    """
    view, T = View.packed(documents_BT), ids_BT.shape[1]
    if kept is not None:
        view = view._replace(asked_BM=kept.slots_BM)
    h_BTH, keys = drafter.fuse(aux_BTNH), UnrollCache(kernel)
    read = drafter.read(torch.nn.functional.pad(ids_BT, (0, steps)), h_BTH.dtype)
    for k in range(steps):
        if k == 1 and kept is not None:
            view = view.of(kept.slots_BM)
        read_k = read[:, 1 + k : 1 + k + T] if k == 0 or kept is None else kept.take(read, 1 + k)
        here = view._replace(positions_BT=view.positions_BT + k)
        if recompute and torch.is_grad_enabled():
            step = _recomputed(drafter, read_k, h_BTH, here, keys)
        else:
            step = drafter.advance(read_k, h_BTH, here._replace(cache=keys))
        yield step
        h_BTH = step.h_BTH


def _recomputed(drafter: Drafter, read: Tensor, h_BTH: Tensor, view: View, keys: UnrollCache) -> Step:
    """A step under gradient checkpointing; its keys enter and leave as tensors, so that running it again is pure."""

    def run(read: Tensor, h_BTH: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        cache = keys.holding(before)
        step = drafter.advance(read, h_BTH, view._replace(cache=cache))
        return *step, *cache.last()

    h_BTH, normed_BTH, *new = checkpoint(run, read, h_BTH, *keys.flat(), use_reentrant=False)
    keys.append(new)
    return Step(h_BTH, normed_BTH)


def _same_document(documents_BT: Tensor, ahead: int) -> Tensor:
    inside = shift(torch.ones_like(documents_BT, dtype=torch.bool), ahead)
    return inside & (shift(documents_BT, ahead) == documents_BT) & (documents_BT >= 0)


def supervised(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Slots whose step-k prediction is trained: x[t+1+k] and x[t+2+k] are answer tokens of the slot's document."""
    answer = shift(loss_mask_BT, 1 + k) & shift(loss_mask_BT, 2 + k)
    return answer & _same_document(documents_BT, 2 + k)


def reachable(loss_mask_BT: Tensor, documents_BT: Tensor, k: int) -> Tensor:
    """Slots that decoding can reach at depth k: x[t+1] to x[t+2+k] are all answer tokens of the slot's document."""
    out = _same_document(documents_BT, 2 + k)
    for ahead in range(1, 3 + k):
        out = out & shift(loss_mask_BT, ahead)
    return out
