"""One batch through the unroll: the loss and the counts that the metrics need.

Legend: B batch, T tokens, N aux layers, H hidden, S = B T slots, R rows, K unroll steps, D draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter, Step
from specdec.features import OnTheFly, Source
from specdec.nn.unroll import UnrollKernel
from specdec.target import Target
from specdec.target.proof import remedy
from specdec.training.head_loss import Job, Term, head_loss
from specdec.training.kept import Kept, states
from specdec.training.law import Law, TargetLaw
from specdec.training.losses import FeatureLoss, LawLoss, Loss, SoftCrossEntropy, terms
from specdec.training.rows import Index, pieces
from specdec.training.ttt import ORACLE, reachable, shift, supervised, ttt_unroll


@dataclass(frozen=True)
class Recipe:
    """How a drafter is taught.

    Args:
        loss: what is compared.
        steps: unroll steps K.
        decay: weight of step k is ``decay**k``.
        in_vocab: leave out rows whose most likely target token the draft vocabulary lacks, as EAGLE-3 does.
        kernel: how the unroll attends.
        recompute: run each step again in the backward pass instead of keeping its insides.
        piece_bytes: memory for the logits of a piece.
    """

    loss: Loss = field(default_factory=SoftCrossEntropy)
    steps: int = 7
    decay: float = 0.8
    in_vocab: bool = True
    kernel: UnrollKernel = ORACLE
    recompute: bool = False
    piece_bytes: int = 3 * 2**23

    @property
    def reads(self) -> frozenset[str]:
        """What the losses read of the target's law beside its probabilities."""
        return frozenset().union(*(term.loss.reads for term in terms(self.loss) if isinstance(term.loss, LawLoss)))

    @property
    def whole_vocabulary(self) -> bool:
        """Whether the target's logits are worked out beyond the draft vocabulary."""
        return self.in_vocab or "log_mass_R" in self.reads


class Teacher(NamedTuple):
    """What the target says about a batch."""

    aux_BTNH: Tensor
    final_BTH: Tensor  # its last states after its final norm
    law: Callable[[Tensor], Law]  # of states (C, H)


class Counts(NamedTuple):
    """Sums over a batch, per unroll step; each (K,) but ``loss_KN``."""

    rows_K: Tensor  # rows that the loss is the mean of
    loss_KN: Tensor  # summed losses by term, unweighted
    covered_K: Tensor  # supervised rows whose most likely token the draft vocabulary has
    supervised_K: Tensor  # supervised rows
    reached_K: Tensor  # slots that decoding can reach at this depth
    hits_K: Tensor  # of these, greedy draft equal to greedy target
    prefix_hits_K: Tensor  # of these, equal at this and every earlier depth
    overlap_K: Tensor  # summed Σ min(p, q) on the reached slots


class Objective(NamedTuple):
    """Mean loss over ``rows`` rows and what it was made of."""

    loss: Tensor
    rows: Tensor  # Σ_k decay**k rows_K: what the mean is taken over
    counts: Counts | None  # None where nobody asked for it


def teach(
    target: Target,
    drafter: Drafter,
    batch: Batch,
    recipe: Recipe,
    measure: bool = True,
    source: Source = OnTheFly(),  # noqa: B008  frozen
) -> Teacher:
    """The target's features, each document on its own; no gradient.

    Raises:
        ValueError: a feature is not finite; the message names sample and layer.
    """
    layers = drafter.config.aux_layers
    out = source(target, batch, layers, drafter.config.aux_final_norm)
    real_BT = batch.documents_BT >= 0
    for n, boundary in enumerate(layers):
        check_finite(target, out.aux_BTNH[:, :, n], f"boundary {boundary}", real_BT)
    check_finite(target, out.final_BTH, "its last state", real_BT)
    reads = recipe.reads | ({"log_mass_R", "token_R"} if measure else set())
    law = TargetLaw(target, drafter.vocab, reads, measure or recipe.in_vocab)
    aux_BTNH = out.aux_BTNH.to(drafter.lm_head.weight.dtype)
    return Teacher(aux_BTNH.masked_fill(~real_BT[:, :, None, None], 0.0), out.final_BTH, law)  # zero times NaN is NaN


def check_finite(target: Target, state_BTH: Tensor, name: str, real_BT: Tensor) -> None:
    """Raise ValueError for NaN or infinite states, naming the first sample and token."""
    bad_BT = ~state_BTH.isfinite().all(-1) & real_BT
    if bad_BT.any():
        b, t = bad_BT.nonzero()[0].tolist()
        value = float(state_BTH[b, t][~state_BTH[b, t].isfinite()][0])
        raise ValueError(
            f"the target's features are not finite: sample {b}, token {t}, {name} holds {value}; {remedy(target)}"
        )


class _Watch:
    """Counts what the metrics want while the logits are there."""

    def __init__(self, drafter: Drafter, reached_KS: Tensor) -> None:
        self.drafter, self.reached_KS = drafter, reached_KS
        self.hits_KS = torch.zeros_like(reached_KS)
        self.covered_K = torch.zeros(len(reached_KS), dtype=torch.float64, device=reached_KS.device)
        self.overlap_K = torch.zeros_like(self.covered_K)

    def __call__(self, k: int, slots: Index, logits_RD: Tensor, law: Law) -> None:
        q_RD = logits_RD.softmax(-1, dtype=law.p_CD.dtype)
        reached_R = self.reached_KS[k, slots]
        self.hits_KS[k, slots] = (logits_RD.argmax(-1) == law.token_C) & law.known_C & reached_R
        self.covered_K[k] += law.known_C.sum()
        overlap_R = torch.minimum(law.p_CD * law.log_mass_C.exp()[:, None], q_RD).sum(-1)
        self.overlap_K[k] += (overlap_R * reached_R).sum()


def objective(drafter: Drafter, batch: Batch, teacher: Teacher, recipe: Recipe, measure: bool = True) -> Objective:
    """The unrolled loss: its mean over the rows of all steps, step k weighted by ``decay**k``.

    A batch with no supervised row has loss zero, still connected to every parameter, so that no rank hangs.

    Args:
        measure: count for the metrics too, which costs several passes over the logits.
    """
    K, mask, documents = recipe.steps, batch.loss_mask_BT, batch.documents_BT
    trained_KBT = torch.stack([supervised(mask, documents, k) for k in range(K)])
    kept = Kept.of(trained_KBT)
    unroll = ttt_unroll(drafter, batch.ids_BT, teacher.aux_BTNH, documents, K, recipe.kernel, recipe.recompute, kept)
    steps = list(unroll)
    final_SH = teacher.final_BTH.flatten(0, 1)
    found = terms(recipe.loss)
    watch = None
    if measure:
        watch = _Watch(drafter, torch.stack([reachable(mask, documents, k) for k in range(K)]).flatten(1))
    size = max(16, recipe.piece_bytes // (steps[0].normed_BTH.element_size() * K * drafter.config.draft_vocab_size))
    job = Job(
        list(pieces(trained_KBT, size, kept)),
        lambda at_C: teacher.law(final_SH[at_C]),
        [Term(term.weight, term.loss) for term in found if isinstance(term.loss, LawLoss)],
        recipe.decay,
        recipe.in_vocab,
        watch,
    )
    loss, sums = head_loss(job, drafter.lm_head.weight, [step.normed_BTH.flatten(0, 1) for step in steps])
    losses = {
        term.name: column
        for term, column in zip(
            (term for term in found if isinstance(term.loss, LawLoss)), sums.loss_KN.unbind(1), strict=True
        )
    }
    decays = sums.count_K.new_tensor([recipe.decay**k for k in range(K)])
    rows = (sums.count_K * decays).sum()
    for term in found:
        if isinstance(term.loss, FeatureLoss):
            summed = partial(_features, term.loss, teacher.final_BTH, trained_KBT, kept)
            per_K = torch.stack([summed(k, step) for k, step in enumerate(steps)])
            loss = loss + term.weight * (per_K * decays).sum() / rows.clamp(min=1e-30)
            losses[term.name] = per_K.detach()
    if watch is None:
        return Objective(loss, rows, None)
    with torch.no_grad():
        prefix_KS = watch.hits_KS.cumprod(0)
        counts = Counts(
            sums.count_K,
            torch.stack([losses[term.name] for term in found], dim=1),
            watch.covered_K,
            trained_KBT.sum((1, 2)),
            watch.reached_KS.sum(1),
            watch.hits_KS.sum(1),
            prefix_KS.sum(1),
            watch.overlap_K,
        )
    return Objective(loss, rows, Counts(*(x.double() for x in counts)))


def _features(
    loss: FeatureLoss, final_BTH: Tensor, trained_KBT: Tensor, kept: Kept | None, k: int, step: Step
) -> Tensor:
    """Summed feature loss of step k: its state stands for the target's at t + 1 + k."""
    slots_R = trained_KBT[k].flatten().nonzero()[:, 0]
    target_RH = shift(final_BTH, 1 + k).flatten(0, 1)[slots_R]
    h_RH = step.h_BTH.flatten(0, 1)[states(kept, slots_R)]
    return loss(h_RH, target_RH.to(h_RH.dtype)).sum()
