"""One training step: the target's outputs, the unrolled drafter, the loss, and the counts that the metrics need.

Legend: B batch, T tokens, N aux layers, or loss terms, H hidden, S = B T slots, R rows, C positions, K unroll steps, D
draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.data import Batch
from specdec.drafter import Concat, Drafter
from specdec.features import FeatureSource, OnTheFly
from specdec.nn.unroll import UnrollKernel
from specdec.target import Target
from specdec.target.proof import remedy
from specdec.training.head_loss import HeadTask, TargetHead, TargetProbs, head_loss, pieces
from specdec.training.losses import (
    DistributionLoss,
    FeatureLoss,
    Loss,
    SoftCrossEntropy,
    terms,
)
from specdec.training.metrics import StepCounts, _Counter
from specdec.training.step_weights import Decay, PrefixWeights, StepWeights, slot_weights
from specdec.training.ttt import ORACLE, KeptSlots, reachable, shift, supervised, ttt_unroll

CUDA_PIECE = 2**31  # bytes of logits at a time on a GPU, where each piece costs its launches
# of the slots, that every step keeps, as P-EAGLE's training has it (https://arxiv.org/abs/2602.01469)
LEAST = 0.2


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a training step minimises, and how it is worked out.

    Args:
        loss: what is compared.
        steps: unroll steps K; 1 is EAGLE-1's teacher forcing (https://arxiv.org/abs/2401.15077).
        weights: what a slot's steps weigh.
        in_vocab: leave out rows whose most likely target token the draft vocabulary lacks, as EAGLE-3 does.
        kernel: how the unroll attends.
        recompute: run each step again in the backward pass instead of keeping its insides.
        keep: share of a step's slots that the next one keeps, if numbers are drawn for them; never less than
            :data:`LEAST` of all, or than this share if that is less.
        piece_bytes: memory for the logits of a piece.
    """

    loss: Loss = field(default_factory=SoftCrossEntropy)
    steps: int = 7
    weights: StepWeights = field(default_factory=Decay)
    in_vocab: bool = True
    kernel: UnrollKernel = ORACLE
    recompute: bool = False
    keep: float = 1.0
    piece_bytes: int = 3 * 2**23

    def shares(self, masks: int) -> list[float]:
        """Of the slots, what each step learns at, where numbers are drawn for them: what one leaves out is in no later
        one either (conditional drop, https://arxiv.org/abs/2504.18583). The ``masks`` of a block come together: a share
        of the anchors is drawn."""
        least = min(LEAST, self.keep)
        return [self.keep if masks else max(self.keep**k, least) for k in range(self.steps)]

    def piece(self, number_bytes: int, D: int) -> int:
        """Slots in a piece of the loss, whose draft logits over D tokens at every step ``piece_bytes`` hold."""
        return max(16, self.piece_bytes // (number_bytes * self.steps * D))

    @cached_property
    def reads(self) -> frozenset[str]:
        """What losses and weights read of the target's distribution beside its probabilities."""
        found = [
            term.loss.reads for term in terms(self.loss) if isinstance(term.loss, DistributionLoss)
        ]
        return frozenset({"token_R"} if isinstance(self.weights, PrefixWeights) else ()).union(
            *found
        )


class TargetOutputs(NamedTuple):
    """The target's outputs for a batch."""

    aux_BTNH: Tensor  # its states at the drafter's boundaries, which the drafter fuses
    final_BTH: Tensor  # its last states after its final norm
    probs: Callable[[Tensor], TargetProbs]  # of states (C, H)


class StepOutput(NamedTuple):
    """Mean loss over ``rows`` rows and what it was made of."""

    loss: Tensor
    rows: Tensor  # Σ_k factor_k rows_K: what the mean is taken over
    counts: StepCounts | None  # None where they were not measured


def target_outputs(
    target: Target,
    drafter: Drafter,
    batch: Batch,
    config: ObjectiveConfig,
    measure: bool = True,
    source: FeatureSource = OnTheFly(),  # noqa: B008  frozen
) -> TargetOutputs:
    """The target's features, each document on its own; no gradient.

    Raises:
        ValueError: a feature is not finite; the message names sample and layer.
    """
    layers = drafter.config.aux_layers
    out = source(target, batch, layers, drafter.config.fusion.final_norm)
    real_BT = batch.documents_BT >= 0
    named = [(f"boundary {boundary}", out.aux_BTNH[:, :, n]) for n, boundary in enumerate(layers)]
    named.append(("its last state", out.final_BTH))
    bad_NBT = torch.stack([~state_BTH.isfinite().all(-1) for _, state_BTH in named]) & real_BT
    if bad_NBT.any():  # the device is waited for once
        for bad_BT, (name, state_BTH) in zip(bad_NBT, named, strict=True):
            if not bad_BT.any():
                continue
            b, t = bad_BT.nonzero()[0].tolist()
            value = float(state_BTH[b, t][~state_BTH[b, t].isfinite()][0])
            raise ValueError(
                f"the target's features are not finite: sample {b}, token {t}, {name} holds {value}; {remedy(target)}"
            )
    reads = config.reads | ({"log_mass_R", "token_R"} if measure else set())
    known = measure or config.in_vocab or isinstance(config.weights, PrefixWeights)
    probs = TargetHead(target, drafter.vocab, reads, known)
    aux_BTNH = out.aux_BTNH
    device = out.aux_BTNH.device.type
    # autocast rounds what a projection reads to its own dtype: widened before, it would take twice the memory for that.
    # A norm that reads them has weights in float32
    # which it leaves alone
    casts = torch.is_autocast_enabled(device) and aux_BTNH.dtype != torch.float64
    if not (
        casts and isinstance(drafter.config.fusion, Concat) and drafter.config.norms.aux == "none"
    ):
        aux_BTNH = aux_BTNH.to(drafter.lm_head.weight.dtype)
    aux_BTNH = aux_BTNH.masked_fill(~real_BT[:, :, None, None], 0.0)  # zero times NaN is NaN
    return TargetOutputs(aux_BTNH, out.final_BTH, probs)


class TrainStep(nn.Module):
    """Drafter and objective as one module, whose forward is a training step: what FSDP2 shards and gathers around.

    Args:
        drafter: what is trained.
        objective: what is minimised.
    """

    def __init__(self, drafter: Drafter, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self.terms = terms(objective.loss)

    def forward(
        self,
        batch: Batch,
        target: TargetOutputs,
        measure: bool = True,
        drawn_BT: Tensor | None = None,
    ) -> StepOutput:
        """The unrolled loss: its mean over the rows of all steps, by the weights of steps and slots.

        A batch with no supervised row has loss zero, still connected to every parameter, so that no rank hangs.

        Args:
            measure: count for the metrics too, which costs several passes over the logits.
            drawn_BT: a number from 0 to 1 for each slot: step k leaves those out that are above its share. Figures are
                of what is left.
        """
        drafter = self.drafter
        config = self.objective
        K = config.steps
        mask = batch.loss_mask_BT
        documents = batch.documents_BT

        # Which slots learn at which unroll step; of the others only the keys of step 0, which later slots attend to.
        trained_KBT = torch.stack([supervised(mask, documents, k) for k in range(K)])
        if drawn_BT is None:
            left_KBT = None
            kept = [KeptSlots.of(trained_KBT)] * K
        else:
            masks = drafter.config.recurrence.masks
            left_KBT = torch.stack([drawn_BT <= share for share in config.shares(masks)])
            trained_KBT &= left_KBT
            kept = (
                [KeptSlots.of(trained_KBT)] * K
                if masks
                else [KeptSlots.of(trained_KBT[k:]) for k in range(K)]
            )

        # Training-time test (https://arxiv.org/abs/2503.01840): from step 1 on the drafter reads its own features.
        unroll = ttt_unroll(
            drafter,
            batch.ids_BT,
            target.aux_BTNH,
            documents,
            K,
            config.kernel,
            config.recompute,
            kept,
        )
        steps = list(unroll)

        # Losses of the next-token distribution, piece by piece through both heads, with their gradients, here and now.
        counter = None
        if measure:
            reached_KBT = torch.stack([reachable(mask, documents, k) for k in range(K)])
            counter = _Counter(
                (reached_KBT if left_KBT is None else reached_KBT & left_KBT).flatten(1)
            )
        size = config.piece(steps[0].normed_BTH.element_size(), drafter.config.draft_vocab_size)
        final_SH = target.final_BTH.flatten(0, 1)
        task = HeadTask(
            list(pieces(trained_KBT, size, kept)),
            lambda at_C: target.probs(final_SH[at_C]),
            [
                (term.weight, term.loss)
                for term in self.terms
                if isinstance(term.loss, DistributionLoss)
            ],
            config.weights.factors(K),
            config.in_vocab,
            counter,
        )
        heads = drafter.lm_head.weight, [step.normed_BTH.flatten(0, 1) for step in steps]
        if isinstance(config.weights, PrefixWeights):
            task = task._replace(weight_KS=slot_weights(config.weights, task, *heads, trained_KBT))
        loss, count_K, loss_KN = head_loss(task, *heads)
        columns = iter(loss_KN.unbind(1))
        factor_K = count_K.new_tensor(task.factors)
        rows = (count_K * factor_K).sum()

        # Losses of the state (EAGLE-1, https://arxiv.org/abs/2401.15077): at step k, slot t stands for the target's
        # state at t + 1 + k.
        losses = []
        for term in self.terms:
            if isinstance(term.loss, FeatureLoss):
                by_step = []
                for k, step in enumerate(steps):
                    slots_R = trained_KBT[k].flatten().nonzero()[:, 0]
                    target_RH = shift(target.final_BTH, 1 + k).flatten(0, 1)[slots_R]
                    h_RH = step.h_BTH.flatten(0, 1)[
                        slots_R if (at := kept[k]) is None else at.place_S[slots_R]
                    ]
                    loss_R = term.loss(h_RH, target_RH.to(h_RH.dtype))
                    by_step.append(
                        (
                            loss_R
                            if task.weight_KS is None
                            else loss_R * task.weight_KS[k, slots_R]
                        ).sum()
                    )
                per_K = torch.stack(by_step)
                loss = loss + term.weight * (per_K * factor_K).sum() / rows.clamp(min=1e-30)
                losses.append(per_K.detach())
            else:
                losses.append(next(columns))
        if counter is None:
            return StepOutput(loss, rows, None)
        return StepOutput(
            loss, rows, counter.counts(count_K, torch.stack(losses, dim=1), trained_KBT)
        )
