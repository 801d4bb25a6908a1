"""The head and its losses, piece by piece: logits never stand in memory whole, neither the target's nor the drafter's.

Step k at slot t learns from position t + 1 + k. Pieces are cut by position, so that the target's probabilities there
are computed once and serve every unroll step. The gradient is computed in the forward pass: per piece, logits are
made, each loss overwrites them with its gradient, and that is reduced to the gradients by the head's input and weight.

Legend: B rows of the batch, T tokens, S = B T slots, K unroll steps, N loss terms, C positions of a piece, R rows
(slots of one step in a piece, or of all its steps), H hidden, D draft vocabulary, U positions needed by any slot.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafting.slots import KeptSlots
from specdec.nn.backend import wide
from specdec.training.losses import DistributionLoss, LossRows
from specdec.training.target_head import TargetProbs, row_tiles

Index = Tensor | slice


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
        kept: for each step, the slots that it yields; None, or no list at all, for all.
    """
    K = len(trained_KBT)
    S = trained_KBT[0].numel()
    trained_KS = trained_KBT.flatten(1)
    # The positions whose distribution some slot learns from.
    needed_S = torch.zeros_like(trained_KS[0])
    for k in range(min(K, S - 1)):
        needed_S[1 + k :] |= trained_KS[k, : S - 1 - k]
    # One nonzero() for all lists, because every call waits for the device.
    masks = torch.cat([needed_S[None], trained_KS])
    positions_U, *slots = masks.nonzero()[:, 1].split(masks.sum(1).tolist())
    states = [
        slots_R if kept_slots is None else kept_slots.place_S[slots_R]
        for slots_R, kept_slots in zip(slots, kept or [None] * K, strict=True)
    ]
    # Where a slot's position stands among the needed ones, and where pieces cut each step's slots.
    rank_S = needed_S.cumsum(0) - 1
    ranks = [rank_S[slots_R + 1 + k] for k, slots_R in enumerate(slots)]
    starts = torch.arange(0, len(positions_U) + size, size, device=rank_S.device)
    cuts = torch.stack([torch.searchsorted(rank_R, starts) for rank_R in ranks]).tolist()
    for piece in range(len(starts) - 1):
        start = piece * size
        groups: list[StepSlots] = []
        for k in range(K):
            first, end = cuts[k][piece : piece + 2]
            if first == end:
                continue
            rows = slice(first, end)
            group = StepSlots(
                step=k,
                slots=_run_or_index(slots[k][rows]),
                states=_run_or_index(states[k][rows]),
                positions=_run_or_index(ranks[k][rows] - start),
                rows=end - first,
            )
            groups.append(group)
        yield Piece(positions_U[start : start + size], groups)


def _run_or_index(index_R: Tensor) -> Index:
    """Return an ascending index as a slice where it is one, on a CPU: a slice reads and writes without copies."""
    if index_R.device.type != "cpu":
        return index_R
    first = int(index_R[0])
    end = int(index_R[-1]) + 1
    return slice(first, end) if end - first == len(index_R) else index_R


class HeadTask(NamedTuple):
    """All that :func:`head_loss` needs in addition to the head's weight and inputs."""

    pieces: Sequence[Piece]
    probs: Callable[[Tensor], TargetProbs]  # of positions (C,)
    terms: Sequence[tuple[float, DistributionLoss]]  # weight, loss
    factors: Sequence[float]  # what each step weighs
    in_vocab: bool
    # called with each step's slots, logits and the target's probabilities at each of them (so that C is R)
    observers: Sequence[Callable[[int, Index, Tensor, TargetProbs], None]]
    weight_KS: Tensor | None = None  # what each slot weighs of that; None for one


def head_loss(
    task: HeadTask, weights: Sequence[Tensor], normed: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss over the rows that count; how many count, (K,) in float32 or wider; their losses by term, (K, N).

    ``Σ_k factor_k Σ_rows loss / Σ_k factor_k rows``: one denominator for all, so that the mean over several batches
    or ranks is the rows' mean. Where slots have weights, a row counts by its own. No row gives loss zero and zero
    gradients.

    Args:
        weights: the drafter's head, (D, H), and what further columns are multiplied with (DSpark's Markov head).
        normed: (S, W) of every step, what the head reads; fewer rows where slots were dropped.
    """
    # Asked out here: inside Function.forward, ctx.needs_input_grad is true under no_grad too.
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in (*weights, *normed))
    return _HeadLoss.apply(task, graded, len(weights), *weights, *normed)


class _HeadLoss(torch.autograd.Function):
    """The loss, with its gradients computed in the forward pass, where logits are overwritten by their gradients.

    An example with D = 3 draft tokens, one term (soft cross-entropy), two steps that weigh 1 and 0.8, and one position
    that both learn from (slot 5 at step 0, slot 4 at step 1):

    1. The target says p = [0.7, 0.2, 0.1] there. Both slots are rows of one product with the head,
       ``logits_RD = [[2, 0, 0], [0, 1, 0]]``, in the buffer.
    2. Row 0 has q = softmax = [0.79, 0.11, 0.11] and loss -Σ p log q = 0.84. Its gradient by the logits is
       (q - p) times the row's weight 1: [0.09, -0.09, 0.01]. It overwrites the row's logits, which are no longer
       needed.
    3. Row 1 has q = [0.21, 0.58, 0.21], loss 1.35 and gradient 0.8 (q - p) = [-0.39, 0.30, 0.09].
    4. ``grad_RD @ head_DH`` is the gradient by the states that the head reads, ``grad_RD.T @ states_RH`` that by the
       head. Then the buffer serves the next piece.
    5. The loss is (1 * 0.84 + 0.8 * 1.35) / (1 + 0.8) = 1.07. All gradients lack the division by that denominator,
       which is known when the last piece is done: the backward pass multiplies by it.
    """

    @staticmethod
    def forward(
        ctx: Any, task: HeadTask, graded: bool, matrices: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = tensors[:matrices]
        states_KSW = tensors[matrices:]
        device = weights[0].device.type
        autocast = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if autocast else weights[0].dtype
        heads = [weight.to(kind) for weight in weights]
        widths = [head.shape[1] for head in heads]
        K = len(states_KSW)
        count_K = weights[0].new_zeros(K, dtype=wide(weights[0].dtype))
        loss_KN = count_K.new_zeros(K, len(task.terms))
        by_states = [torch.zeros_like(states) for states in states_KSW] if graded else []
        by_weight = [
            _WeightGradient(weight, kind) if graded and ctx.needs_input_grad[3 + n] else None
            for n, weight in enumerate(weights)
        ]
        # One buffer for all pieces: fresh memory is slow memory.
        piece_rows = [sum(group.rows for group in piece.groups) for piece in task.pieces]
        logits_buffer_RD = heads[0].new_empty(max(piece_rows, default=0), len(heads[0]))
        with torch.autocast(device, enabled=False):
            for piece in task.pieces:
                # The target's probabilities at the piece's positions; then the draft logits of all slots that learn
                # from them, of all unroll steps, in one product.
                probs = task.probs(piece.positions_C)
                states = [states_KSW[group.step][group.states].to(kind) for group in piece.groups]
                states_RW = torch.cat(states)
                columns = states_RW.split(widths, 1)
                logits_RD = logits_buffer_RD[: len(states_RW)]
                torch.mm(columns[0], heads[0].T, out=logits_RD)
                for states_RH, head in zip(columns[1:], heads[1:], strict=True):
                    logits_RD.addmm_(states_RH, head.T)
                rows = [group.rows for group in piece.groups]
                for group, draft_RD in zip(piece.groups, logits_RD.split(rows), strict=True):
                    row_weight_R, losses_N = _group_losses(
                        task, group, draft_RD, probs, count_K.dtype
                    )
                    count_K[group.step] += row_weight_R.sum()
                    loss_KN[group.step] += losses_N
                if not graded:
                    continue
                # By now the gradients stand where the logits were.
                _spread(logits_RD, piece, heads, by_states)
                for gradient, states_RH in zip(by_weight, columns, strict=True):
                    if gradient is not None:
                        gradient.add(logits_RD, states_RH)
        factor_K = count_K.new_tensor(task.factors)
        denominator = (count_K * factor_K).sum()
        term_weight_N = loss_KN.new_tensor([weight for weight, _ in task.terms])
        total = (loss_KN * term_weight_N * factor_K[:, None]).sum()
        by_matrix = [None if gradient is None else gradient.result() for gradient in by_weight]
        ctx.grads = [*by_matrix, *by_states]
        ctx.denominator = denominator
        ctx.mark_non_differentiable(count_K, loss_KN)
        return total / denominator.clamp(min=1e-30), count_K, loss_KN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.where(ctx.denominator > 0, grad / ctx.denominator, 0.0)
        grads = [None if x is None else x.mul_(scale.to(x.dtype)) for x in ctx.grads]
        ctx.grads = []
        return None, None, None, *grads


def _spread(grad_RD: Tensor, piece: Piece, heads: list[Tensor], by_states: list[Tensor]) -> None:
    """Write a piece's gradients by the states that the head reads into those of all slots, (K, S, W)."""
    by_columns = [grad_RD @ head for head in heads]
    by_RW = by_columns[0] if len(heads) == 1 else torch.cat(by_columns, 1)
    by_groups = by_RW.split([group.rows for group in piece.groups])
    for group, by_group in zip(piece.groups, by_groups, strict=True):
        by_states[group.step][group.states] = by_group.to(by_states[0].dtype)


class _WeightGradient:
    """The gradient by the head's weight, summed over pieces; the first piece makes its memory."""

    def __init__(self, weight_DH: Tensor, kind: torch.dtype) -> None:
        self.weight_DH = weight_DH
        self.kind = kind  # of the products
        self.sum_DH: Tensor | None = None

    def add(self, grad_RD: Tensor, states_RH: Tensor) -> None:
        """Add a piece's share."""
        if self.sum_DH is None:
            self.sum_DH = (grad_RD.T @ states_RH).to(self.weight_DH.dtype)
        elif self.sum_DH.dtype == self.kind:
            self.sum_DH.addmm_(grad_RD.T, states_RH)
        else:
            self.sum_DH.add_(grad_RD.T @ states_RH)

    def result(self) -> Tensor:
        """Return the sum, zeros where there was no piece."""
        return torch.zeros_like(self.weight_DH) if self.sum_DH is None else self.sum_DH


def _group_losses(
    task: HeadTask, group: StepSlots, draft_RD: Tensor, probs: TargetProbs, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what each row of a step counts, (R,), and its summed losses by term, (N,); gradients replace logits."""
    # A column that was not computed is one number expanded (stride 0), which is not copied.
    all_rows = slice(group.rows)
    # from here on, C is R: the target's probabilities at each row
    here = TargetProbs(*(x[group.positions if x.stride(0) else all_rows] for x in probs))
    # EAGLE-3 trains only where the draft vocabulary has the target's most likely token.
    if task.in_vocab:
        row_weight_R = here.covered_C.to(kind)
    else:
        row_weight_R = here.covered_C.new_ones(group.rows, dtype=kind)
    if task.weight_KS is not None:
        row_weight_R = row_weight_R * task.weight_KS[group.step, group.slots]
    for observe in task.observers:
        observe(group.step, group.slots, draft_RD, here)
    grad_weight_R = row_weight_R * task.factors[group.step]
    loss_rows = LossRows(draft_RD, *here[:4])
    tiles = row_tiles(draft_RD)
    if len(tiles) == 1:
        losses_N = _losses_and_gradient_(task.terms, loss_rows, grad_weight_R, row_weight_R)
        return row_weight_R, losses_N
    losses_N = row_weight_R.new_zeros(len(task.terms))
    for tile in tiles:
        tile_rows = LossRows(*(column[tile] for column in loss_rows))
        losses_N += _losses_and_gradient_(
            task.terms, tile_rows, grad_weight_R[tile], row_weight_R[tile]
        )
    return row_weight_R, losses_N


def _losses_and_gradient_(
    terms: Sequence[tuple[float, DistributionLoss]],
    rows: LossRows,
    grad_weight_R: Tensor,
    row_weight_R: Tensor,
) -> Tensor:
    """Return the summed losses by term, (N,), and leave the gradient of their weighted sum in ``rows.draft_RD``.

    Args:
        grad_weight_R: of each row, in the gradient.
        row_weight_R: of each row, in the summed losses.
    """
    # A single term may work in the logits' own memory; several need a copy each, and so does a wider dtype.
    same_dtype = rows.draft_RD.dtype == rows.p_RD.dtype
    in_place = len(terms) == 1 and (terms[0][1].widens or same_dtype)
    losses = []
    grads = []
    for weight, loss in terms:
        draft_RD = rows.draft_RD
        if not in_place:
            draft_RD = draft_RD.to(rows.p_RD.dtype, copy=True)
        loss_R = loss.loss_and_grad_(rows._replace(draft_RD=draft_RD), grad_weight_R * weight)
        if loss_R.shape != row_weight_R.shape:
            wanted = f"{tuple(row_weight_R.shape)}, one number a row, not {tuple(loss_R.shape)}"
            raise ValueError(f"loss {type(loss).__name__} must be of shape {wanted}")
        losses.append((loss_R * row_weight_R).sum())
        grads.append(draft_RD)
    if not terms:
        rows.draft_RD.zero_()
        return row_weight_R.new_zeros(0)
    if not in_place:
        rows.draft_RD.copy_(torch.stack(grads).sum(0))
    return torch.stack(losses)
