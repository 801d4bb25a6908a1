"""The head and the losses of its law, piece by piece, with the gradient taken on the way.

The logits of all unroll steps never stand in memory together, nor are they kept for the backward pass: each piece's
are made, graded and let go, and only the gradient by the head's input and by its weight remain.

Legend: S slots, R rows of a piece, H hidden, D draft vocabulary, K unroll steps, N loss terms.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.nn.pointwise import pointwise
from specdec.nn.unroll import wide
from specdec.training.law import Law
from specdec.training.losses import LawLoss, Rows
from specdec.training.rows import Index, Piece


class Term(NamedTuple):
    """A loss and its share in the sum."""

    weight: float
    loss: LawLoss


class Job(NamedTuple):
    """What the head's rows are compared with."""

    pieces: Sequence[Piece]
    law: Callable[[Tensor], Law]  # positions (C,) to the target's law there
    terms: Sequence[Term]
    decay: float  # weight of step k is decay**k
    in_vocab: bool
    watch: Callable[[int, Index, Tensor, Law], None] | None  # step, slots, logits, law


class Sums(NamedTuple):
    """Of the trained rows."""

    count_K: Tensor  # rows that count, float32 or wider
    loss_KN: Tensor  # their losses, by term


@pointwise
def _accumulate(into: Tensor, summand: Tensor) -> None:
    into.add_(summand)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: Job, graded: bool, weight_DH: Tensor, *normed_KSH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.get_autocast_dtype(weight_DH.device.type) if _autocast(weight_DH) else weight_DH.dtype
        K, N = len(normed_KSH), len(job.terms)
        head_DH = weight_DH.to(kind)
        by_weight: Tensor | None = None
        weighted = graded and ctx.needs_input_grad[2]
        by_normed = [torch.zeros_like(x) for x in normed_KSH] if graded else []
        count_K = weight_DH.new_zeros(K, dtype=wide(weight_DH.dtype))
        loss_KN = count_K.new_zeros(K, N)
        most = max((sum(group.rows for group in piece.groups) for piece in job.pieces), default=0)
        room_RD = head_DH.new_empty(most, len(head_DH))  # one for all pieces: fresh memory is slow memory
        with torch.autocast(weight_DH.device.type, enabled=False):
            for piece in job.pieces:
                law = job.law(piece.positions_C)
                x_RH = torch.cat([normed_KSH[group.step][group.states].to(kind) for group in piece.groups])
                logits_RD = torch.mm(x_RH, head_DH.T, out=room_RD[: len(x_RH)])
                for group, draft_RD in zip(piece.groups, logits_RD.split([g.rows for g in piece.groups]), strict=True):
                    k, here = group.step, law.at(group.positions)
                    used_R = here.known_C.to(count_K.dtype) if job.in_vocab else count_K.new_ones(group.rows)
                    count_K[k] += used_R.sum()
                    if job.watch is not None:
                        job.watch(k, group.slots, draft_RD, here)
                    weight_R = used_R * job.decay**k
                    loss_KN[k] += _grade_(job.terms, Rows(draft_RD, *here[:4]), weight_R, used_R)
                if not graded:
                    continue
                grad_RD = logits_RD
                by_x = (grad_RD @ head_DH).split([g.rows for g in piece.groups])
                for group, by_x_RH in zip(piece.groups, by_x, strict=True):
                    by_normed[group.step][group.states] = by_x_RH.to(normed_KSH[0].dtype)
                if weighted:
                    if by_weight is None:
                        by_weight = (grad_RD.T @ x_RH).to(weight_DH.dtype)
                    elif by_weight.dtype == kind:
                        by_weight.addmm_(grad_RD.T, x_RH)
                    else:
                        _accumulate(by_weight, grad_RD.T @ x_RH)
        decays = count_K.new_tensor([job.decay**k for k in range(K)])
        total = (count_K * decays).sum()
        shares = loss_KN.new_tensor([term.weight for term in job.terms])
        loss = (loss_KN * shares * decays[:, None]).sum() / total.clamp(min=1e-30)
        if weighted and by_weight is None:
            by_weight = torch.zeros_like(weight_DH)
        ctx.grads, ctx.total = [by_weight, *by_normed], total
        ctx.mark_non_differentiable(count_K, loss_KN)
        return loss, count_K, loss_KN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.where(ctx.total > 0, grad / ctx.total, 0.0)
        grads = [None if x is None else x.mul_(scale.to(x.dtype)) for x in ctx.grads]
        ctx.grads = []
        return None, None, *grads


def _grade_(terms: Sequence[Term], rows: Rows, weight_R: Tensor, used_R: Tensor) -> Tensor:
    """Leave the gradient of the weighted terms in ``rows.draft_RD``, whose logits have served; summed losses (N,)."""
    if len(terms) == 1 and (terms[0].loss.widens or rows.draft_RD.dtype == rows.p_RD.dtype):
        return (terms[0].loss.grade_(rows, weight_R * terms[0].weight) * used_R).sum()[None]
    wide_rows = rows._replace(draft_RD=rows.draft_RD.to(rows.p_RD.dtype))
    graded = [term.loss.grade(wide_rows, weight_R * term.weight) for term in terms]
    rows.draft_RD.copy_(torch.stack([grad_RD for _, grad_RD in graded]).sum(0)) if graded else rows.draft_RD.zero_()
    return torch.stack([(loss_R * used_R).sum() for loss_R, _ in graded]) if graded else used_R.new_zeros(0)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def head_loss(job: Job, weight_DH: Tensor, normed: Sequence[Tensor]) -> tuple[Tensor, Sums]:
    """The mean loss over the rows that count, and the sums that it was made of.

    ``Σ_k decay**k Σ_rows loss / Σ_k decay**k rows``: one denominator for all, so that the mean over several batches
    or ranks is the rows' mean. No row gives loss zero and zero gradients.

    Args:
        weight_DH: the drafter's head; multiplied in autocast's dtype where that is on.
        normed: (S, H) of every step, what the head reads; fewer rows where slots were dropped.
    """
    # inside the function gradients look wanted under no_grad too
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in (weight_DH, *normed))
    loss, count_K, loss_KN = _HeadLoss.apply(job, graded, weight_DH, *normed)
    return loss, Sums(count_K, loss_KN)
