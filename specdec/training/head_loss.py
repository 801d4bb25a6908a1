"""The head and its losses, piece by piece: logits never stand in memory whole, neither the target's nor the drafter's.

Step k at slot t learns from position t + 1 + k. Pieces are cut by position, so that the target's probabilities there
are worked out once and serve every unroll step. The gradient is computed in the forward pass: per piece, logits are
made, each loss overwrites them with its gradient, and that is reduced to the gradients with respect to the head's input
and weight. The backward pass only multiplies these by a scalar.

Legend: B rows of the batch, T tokens, S = B T slots, K unroll steps, N loss terms, C positions of a piece, R rows
(slots of one step in a piece), H hidden, D draft vocabulary, U positions needed by any slot.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafter import DraftVocab
from specdec.drafting.slots import KeptSlots
from specdec.nn.backend import pointwise, wide
from specdec.target import Target
from specdec.training.losses import DistributionLoss, LossRows

BLOCK = 8192  # columns of the target's vocabulary that stand in memory at once
Index = Tensor | slice


class TargetProbs(NamedTuple):
    """The target's next-token distribution at C positions, on the draft vocabulary; four as in ``LossRows``."""

    p_CD: Tensor  # float32 or wider
    log_p_CD: Tensor
    log_mass_C: Tensor
    token_C: Tensor
    covered_C: Tensor  # bool, whether the most likely token of all is in the draft vocabulary; a tie counts


class TargetHead:
    """The target's probabilities from its last states, its head streamed over blocks of the vocabulary.

    Args:
        reads: what losses read beside p; see ``losses.DistributionLoss.reads``.
        known: whether ``covered_C`` is wanted. If neither that nor the mass is, only the draft vocabulary's rows are
            multiplied, and all tokens count as known.
    """

    def __init__(
        self, target: Target, vocab: DraftVocab, reads: Collection[str], known: bool
    ) -> None:
        self.target = target
        self.vocab = vocab
        self.reads = frozenset(reads)
        self.known = known
        ids_D = vocab.target_ids_D
        edges = torch.arange(0, target.vocab_size + BLOCK, BLOCK, device=ids_D.device).clamp(
            max=target.vocab_size
        )
        cuts = torch.searchsorted(ids_D, edges).tolist()
        self._blocks = list(pairwise(zip(edges.tolist(), cuts, strict=True)))

    @torch.no_grad()
    def __call__(self, final_CH: Tensor) -> TargetProbs:
        """The distribution at states after the target's final norm."""
        C = len(final_CH)
        kind = wide(final_CH.dtype)
        mass = "log_mass_R" in self.reads
        ids_D = self.vocab.target_ids_D
        greatest_C = total_C = None  # of all logits, and their log-sum-exp
        if self.vocab.complete:
            draft_CD = self.target.logits(final_CH[None])[0].to(kind, copy=True)
        elif not (mass or self.known):
            draft_CD = self.target.logits(final_CH[None], ids_D)[0].to(kind, copy=True)
        else:
            draft_CD = final_CH.new_empty((C, len(ids_D)), dtype=kind)
            greatest_C = draft_CD.new_full((C,), float("-inf"))
            total_C = greatest_C.clone()
            for (v0, d0), (v1, d1) in self._blocks:
                logits = self.target.logits(final_CH[None], slice(v0, v1))[0]
                draft_CD[:, d0:d1] = logits.index_select(1, ids_D[d0:d1] - v0)
                greatest_C = torch.maximum(greatest_C, logits.amax(-1).to(kind))
                if mass:
                    total_C = torch.logaddexp(total_C, logits.to(kind).logsumexp(-1))
        logits_CD = draft_CD.clone() if "log_p_RD" in self.reads else draft_CD
        token_C = draft_CD.argmax(-1) if "token_R" in self.reads else ids_D.new_full((C,), -1)
        p_CD = draft_CD
        top_C, lse_C = _softmax_(p_CD)
        covered_C = (
            top_C.new_ones(C, dtype=torch.bool) if greatest_C is None else top_C >= greatest_C
        )
        none = p_CD.new_full((1,), float("nan"))
        log_p_CD = (
            logits_CD.sub_(lse_C[:, None])
            if "log_p_RD" in self.reads
            else none[:, None].expand_as(p_CD)
        )
        log_mass_C = none.expand(C)
        if mass:
            log_mass_C = (
                torch.zeros_like(lse_C) if total_C is None else (lse_C - total_C).clamp(max=0)
            )
        return TargetProbs(p_CD, log_p_CD, log_mass_C, token_C, covered_C)


@pointwise
def _softmax_(logits_CD: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits their probabilities, in place; the greatest logit and the log-sum-exp."""
    top_C = logits_CD.amax(-1)
    e_CD = torch.exp(logits_CD - top_C[:, None])
    total_C = e_CD.sum(-1)
    logits_CD.copy_(e_CD / total_C[:, None])
    return top_C, top_C + total_C.log()


class StepSlots(NamedTuple):
    """The slots of one unroll step that a piece serves."""

    step: int
    slots: Index  # into the S slots
    states: Index  # rows of these slots in the step's output, flattened to (B M, H)
    positions: Index  # into the piece's C positions; as many as slots
    rows: int


class Piece(NamedTuple):
    """Some positions of the target and every slot that learns from them."""

    positions_C: Tensor  # int64, into the S flattened positions
    groups: list[StepSlots]


def pieces(
    trained_KBT: Tensor, size: int, kept: Sequence[KeptSlots | None] = ()
) -> Iterator[Piece]:
    """Cut the trained slots into pieces of at most ``size`` positions.

    Args:
        trained_KBT: bool, the slots trained at each step; slot t of step k must have a position t + 1 + k.
        kept: of every step, the slots that it yields; None, or no list at all, for all.
    """
    K = len(trained_KBT)
    S = trained_KBT[0].numel()
    trained_KS = trained_KBT.flatten(1)
    needed_S = torch.zeros_like(trained_KS[0])  # positions whose distribution some slot learns from
    for k in range(min(K, S - 1)):
        needed_S[1 + k :] |= trained_KS[k, : S - 1 - k]
    which_WS = torch.cat([needed_S[None], trained_KS])  # in one, since a device is waited for
    positions_U, *slots = which_WS.nonzero()[:, 1].split(which_WS.sum(1).tolist())
    rank_S = needed_S.cumsum(0) - 1
    places = [
        at if one is None else one.place_S[at]
        for at, one in zip(slots, kept or [None] * K, strict=True)
    ]
    ranks = [rank_S[at + 1 + k] for k, at in enumerate(slots)]
    starts = torch.arange(0, len(positions_U) + size, size, device=rank_S.device)
    cuts = torch.stack([torch.searchsorted(rank, starts) for rank in ranks]).tolist()
    for piece in range(len(starts) - 1):
        start = piece * size
        groups = list[StepSlots]()
        for k in range(K):
            a, b = cuts[k][piece : piece + 2]
            if a < b:
                slots_R = slots[k][a:b]
                states_R = places[k][a:b]
                ranks_R = ranks[k][a:b] - start
                found: list[Index] = [slots_R, states_R, ranks_R]
                # a slice, where it is one, reads and writes without copies
                if rank_S.device.type == "cpu":
                    for n, index in enumerate((slots_R, states_R, ranks_R)):
                        first = int(index[0])
                        last = int(index[-1])
                        found[n] = slice(first, last + 1) if last - first + 1 == b - a else index
                groups.append(StepSlots(k, found[0], found[1], found[2], b - a))
        yield Piece(positions_U[start : start + size], groups)


class HeadTask(NamedTuple):
    """All that :func:`head_loss` needs beside the head's weight and inputs."""

    pieces: Sequence[Piece]
    probs: Callable[[Tensor], TargetProbs]  # of positions (C,)
    terms: Sequence[tuple[float, DistributionLoss]]  # weight, loss
    factors: Sequence[float]  # what each step weighs
    in_vocab: bool
    # told of each step's slots, logits and the target's probabilities
    on_logits: Callable[[int, Index, Tensor, TargetProbs], None] | None
    weight_KS: Tensor | None = None  # what each slot weighs of that; None for one


def head_loss(
    task: HeadTask, weight_DH: Tensor, normed: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss over the rows that count; how many count, (K,) in float32 or wider; their losses by term, (K, N).

    ``Σ_k factor_k Σ_rows loss / Σ_k factor_k rows``: one denominator for all, so that the mean over several batches
    or ranks is the rows' mean. Where slots have weights, a row counts by its own. No row gives loss zero and zero
    gradients.

    Args:
        weight_DH: the drafter's head; multiplied in autocast's dtype where that is on.
        normed: (S, H) of every step, what the head reads; fewer rows where slots were dropped.
    """
    # asked out here: inside Function.forward, ctx.needs_input_grad is true under no_grad too
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in (weight_DH, *normed))
    return _HeadLoss.apply(task, graded, weight_DH, *normed)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, task: HeadTask, graded: bool, weight_DH: Tensor, *normed_KSH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = weight_DH.device.type
        kind = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else weight_DH.dtype
        )
        K = len(normed_KSH)
        N = len(task.terms)
        head_DH = weight_DH.to(kind)
        by_weight: Tensor | None = None
        weighted = graded and ctx.needs_input_grad[2]
        by_normed = [torch.zeros_like(x) for x in normed_KSH] if graded else []
        count_K = weight_DH.new_zeros(K, dtype=wide(weight_DH.dtype))
        loss_KN = count_K.new_zeros(K, N)
        most = max((sum(group.rows for group in piece.groups) for piece in task.pieces), default=0)
        # one for all pieces: fresh memory is slow memory
        room_RD = head_DH.new_empty(most, len(head_DH))
        with torch.autocast(device, enabled=False):
            for piece in task.pieces:
                # the target's probabilities at the piece's positions, then the draft logits of all slots that learn
                # from them, of all unroll steps in one product
                probs = task.probs(piece.positions_C)
                rows = [group.rows for group in piece.groups]
                x_RH = torch.cat(
                    [normed_KSH[group.step][group.states].to(kind) for group in piece.groups]
                )
                logits_RD = torch.mm(x_RH, head_DH.T, out=room_RD[: len(x_RH)])
                for group, draft_RD in zip(piece.groups, logits_RD.split(rows), strict=True):
                    # a column that was not computed is one number expanded (stride 0): it is not copied
                    k = group.step
                    blank = slice(group.rows)
                    here = TargetProbs(
                        *(x[group.positions if x.stride(0) else blank] for x in probs)
                    )
                    # EAGLE-3 trains only where the draft vocabulary has the target's most likely token
                    used_R = (
                        here.covered_C.to(count_K.dtype)
                        if task.in_vocab
                        else count_K.new_ones(group.rows)
                    )
                    if task.weight_KS is not None:
                        used_R = used_R * task.weight_KS[k, group.slots]
                    count_K[k] += used_R.sum()
                    if task.on_logits is not None:
                        task.on_logits(k, group.slots, draft_RD, here)
                    weight_R = used_R * task.factors[k]
                    loss_KN[k] += _grade_(
                        task.terms, LossRows(draft_RD, *here[:4]), weight_R, used_R
                    )
                if not graded:
                    continue
                grad_RD = logits_RD  # by now the gradients stand where the logits were
                for group, by_x_RH in zip(
                    piece.groups, (grad_RD @ head_DH).split(rows), strict=True
                ):
                    by_normed[group.step][group.states] = by_x_RH.to(normed_KSH[0].dtype)
                if weighted:
                    if by_weight is None:
                        by_weight = (grad_RD.T @ x_RH).to(weight_DH.dtype)
                    elif by_weight.dtype == kind:
                        by_weight.addmm_(grad_RD.T, x_RH)
                    else:
                        by_weight.add_(grad_RD.T @ x_RH)
        factor_K = count_K.new_tensor(task.factors)
        total = (count_K * factor_K).sum()
        shares = loss_KN.new_tensor([weight for weight, _ in task.terms])
        loss = (loss_KN * shares * factor_K[:, None]).sum() / total.clamp(min=1e-30)
        if weighted and by_weight is None:
            by_weight = torch.zeros_like(weight_DH)
        ctx.grads = [by_weight, *by_normed]
        ctx.total = total
        ctx.mark_non_differentiable(count_K, loss_KN)
        return loss, count_K, loss_KN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.where(ctx.total > 0, grad / ctx.total, 0.0)
        grads = [None if x is None else x.mul_(scale.to(x.dtype)) for x in ctx.grads]
        ctx.grads = []
        return None, None, *grads


def _grade_(
    terms: Sequence[tuple[float, DistributionLoss]],
    rows: LossRows,
    weight_R: Tensor,
    used_R: Tensor,
) -> Tensor:
    """Leave the gradient of the weighted terms in ``rows.draft_RD``, whose logits have served; summed losses (N,)."""
    alone = len(terms) == 1 and (terms[0][1].widens or rows.draft_RD.dtype == rows.p_RD.dtype)
    losses = []
    grads = []
    for weight, loss in terms:
        draft_RD = rows.draft_RD if alone else rows.draft_RD.to(rows.p_RD.dtype, copy=True)
        loss_R = loss.grade_(rows._replace(draft_RD=draft_RD), weight_R * weight)
        if loss_R.shape != used_R.shape:
            wanted = f"{tuple(used_R.shape)}, one number a row, not {tuple(loss_R.shape)}"
            raise ValueError(f"loss {type(loss).__name__} must be of shape {wanted}")
        losses.append((loss_R * used_R).sum())
        grads.append(draft_RD)
    if not alone:
        rows.draft_RD.copy_(torch.stack(grads).sum(0)) if grads else rows.draft_RD.zero_()
    return torch.stack(losses) if losses else used_R.new_zeros(0)
