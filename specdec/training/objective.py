"""One batch through the unroll: the loss and the counts that the metrics need.

Legend: B batch, T tokens, R supervised rows, K unroll steps, D draft vocabulary, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.losses import Loss, step_weights
from specdec.training.ttt import reachable, supervised, ttt_unroll


class Teacher(NamedTuple):
    """What the target says about a batch."""

    aux_BTNH: Tensor
    logits_BTV: Tensor


class Counts(NamedTuple):
    """Sums over a batch, per unroll step; each (K,)."""

    rows_K: Tensor  # rows that the loss is the mean of
    loss_K: Tensor  # summed loss
    covered_K: Tensor  # supervised rows whose most likely token the draft vocabulary has
    supervised_K: Tensor  # supervised rows
    reached_K: Tensor  # slots that decoding can reach at this depth
    hits_K: Tensor  # of these, greedy draft equal to greedy target
    prefix_hits_K: Tensor  # of these, equal at this and every earlier depth
    overlap_K: Tensor  # summed Σ min(p, q) on the reached slots


class Objective(NamedTuple):
    """Scalar loss and what it was made of."""

    loss: Tensor
    counts: Counts | None  # None where nobody asked for it


def teach(target: Target, drafter: Drafter, batch: Batch) -> Teacher:
    """The target's features and logits, each document on its own; no gradient."""
    view = View.packed(batch.documents_BT)
    out = target.forward(batch.ids_BT, view, drafter.config.aux_layers, drafter.config.aux_final_norm)
    with torch.no_grad():
        aux_BTNH = out.aux_BTNH.to(drafter.lm_head.weight.dtype)
        return Teacher(aux_BTNH, target.logits(out.final_BTH))


def objective(
    drafter: Drafter,
    batch: Batch,
    teacher: Teacher,
    loss: Loss,
    steps: int,
    decay: float,
    in_vocab: bool = True,
    measure: bool = True,
) -> Objective:
    """The unrolled loss: the mean over its rows at each step, weighted ``decay**k`` normalised.

    Args:
        in_vocab: leave out rows whose most likely target token the draft vocabulary lacks, as EAGLE-3 does.
        measure: count for the metrics too, which costs several passes over the logits.

    A batch with no supervised row has loss zero, still connected to every parameter, so that no rank hangs.
    """
    wide_V = teacher.logits_BTV.dtype
    best_BT = teacher.logits_BTV.argmax(-1)
    draft_BTD = teacher.logits_BTV[..., drafter.vocab.target_ids_D].to(torch.promote_types(wide_V, torch.float32))
    with torch.no_grad():
        log_total_BT = teacher.logits_BTV.to(draft_BTD.dtype).logsumexp(-1)
        known_BT = drafter.vocab.to_draft(best_BT) >= 0
    total = draft_BTD.new_zeros(())  # no rows still leave a graph: the head of nothing
    prefix_BT: Tensor | None = None
    rows: list[list[Tensor]] = []
    for k, step in enumerate(ttt_unroll(drafter, batch.ids_BT, teacher.aux_BTNH, batch.documents_BT, steps)):
        at_B, at_T = supervised(batch.loss_mask_BT, batch.documents_BT, k).nonzero(as_tuple=True)
        reached_R = reachable(batch.loss_mask_BT, batch.documents_BT, k)[at_B, at_T]
        from_T = at_T + 1 + k  # the teacher of x[t+2+k] stands at t+1+k
        logits_RD = drafter.logits(step.normed_BTH[at_B, at_T]).to(draft_BTD.dtype)
        teacher_RD = draft_BTD[at_B, from_T]
        used_R = known_BT[at_B, from_T] if in_vocab else torch.ones_like(reached_R)
        loss_R = loss(logits_RD, teacher_RD) * used_R
        total = total + step_weights(steps, decay)[k] * loss_R.sum() / used_R.sum().clamp(min=1)
        if not measure:
            continue
        with torch.no_grad():
            hit_R = drafter.vocab.to_target(logits_RD.argmax(-1)) == best_BT[at_B, from_T]
            law_RD = (teacher_RD - log_total_BT[at_B, from_T, None]).exp()
            overlap_R = torch.minimum(law_RD, logits_RD.softmax(-1)).sum(-1)
            hit_BT = torch.zeros_like(batch.loss_mask_BT)
            hit_BT[at_B, at_T] = hit_R & reached_R
            prefix_BT = hit_BT if prefix_BT is None else prefix_BT & hit_BT
            known_R = known_BT[at_B, from_T]
            rows.append(
                [
                    used_R.sum(),
                    loss_R.sum(),
                    known_R.sum(),
                    torch.tensor(len(at_B), device=at_B.device),
                    reached_R.sum(),
                    hit_BT.sum(),
                    prefix_BT.sum(),
                    (overlap_R * reached_R).sum(),
                ]
            )
    if not measure:
        return Objective(total, None)
    columns = zip(*rows, strict=True)
    return Objective(total, Counts(*(torch.stack([x.detach().double() for x in column]) for column in columns)))
