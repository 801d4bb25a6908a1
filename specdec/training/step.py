"""One training step: the target's outputs, the unrolled drafter, the loss, and the counts that the metrics need.

Read :meth:`TrainStep.forward` first. Step k at slot t reads token x[t+1+k] and predicts x[t+2+k]; it learns from the
target's next-token distribution at position t+1+k.

Legend: B batch, T tokens, N aux layers, or loss terms, H hidden, S = B T slots, R rows, C positions, K unroll steps, D
draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.data import Batch
from specdec.drafter import Concat, Drafter, DrafterSpec
from specdec.drafting import DraftingMode, Step
from specdec.drafting.slots import KeptSlots, reachable, shift, supervised
from specdec.features import FeatureSource, OnTheFly
from specdec.nn.backend import wide
from specdec.nn.unroll import DENSE, UnrollKernel
from specdec.target import Target
from specdec.target.proof import remedy
from specdec.training.confidence import (
    AcceptanceChances,
    ConfidenceLoss,
    check_confidence_is_trained,
)
from specdec.training.head_loss import HeadTask, head_loss, pieces
from specdec.training.losses import (
    DistributionLoss,
    FeatureLoss,
    Loss,
    SoftCrossEntropy,
    terms,
)
from specdec.training.metrics import StepCounter, StepCounts
from specdec.training.step_weights import Decay, PrefixWeights, StepWeights, slot_weights
from specdec.training.target_head import TargetHead, TargetProbs

CUDA_PIECE = 2**31  # bytes of logits at a time on a GPU, where each piece costs its launches


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a training step minimizes, and how it is computed.

    Args:
        loss: what is compared.
        steps: unroll steps K; 1 is EAGLE-1's teacher forcing (https://arxiv.org/abs/2401.15077).
        weights: what a slot's steps weigh.
        in_vocab: leave out rows whose most likely target token the draft vocabulary lacks, as EAGLE-3 does.
        kernel: how the unroll attends.
        recompute: run each step again in the backward pass instead of keeping its insides.
        keep: share of a step's slots that the next one keeps, if slots are drawn; see
            :meth:`specdec.drafting.mode.DraftingMode.shares`.
        piece_bytes: memory for the logits of a piece.
    """

    loss: Loss = field(default_factory=SoftCrossEntropy)
    steps: int = 4
    weights: StepWeights = field(default_factory=Decay)
    in_vocab: bool = True
    kernel: UnrollKernel = DENSE
    recompute: bool = False
    keep: float = 1.0
    piece_bytes: int = 3 * 2**23

    def check(self, spec: DrafterSpec) -> None:
        """Raise ValueError for a design that the loss cannot train, or trains in part."""
        self.loss.check(spec)
        check_confidence_is_trained(spec, terms(self.loss))

    def shares(self, drafting: DraftingMode) -> list[float]:
        """Return the share of the slots that each step learns at, where slots are drawn."""
        return drafting.shares(self.keep, self.steps)

    def piece(self, number_bytes: int, D: int) -> int:
        """Return the positions of a piece of the loss, whose draft logits at every step fit in ``piece_bytes``."""
        return max(16, self.piece_bytes // (number_bytes * self.steps * D))

    @cached_property
    def reads(self) -> frozenset[str]:
        """What losses and weights read of the target's distribution in addition to its probabilities."""
        losses = [term.loss for term in terms(self.loss)]
        reads = [loss.reads for loss in losses if isinstance(loss, DistributionLoss)]
        if isinstance(self.weights, PrefixWeights):
            reads.append(self.weights.reads)
        if any(isinstance(loss, ConfidenceLoss) for loss in losses):
            reads.append(frozenset({"log_mass_R"}))
        return frozenset().union(*reads)


class TargetOutputs(NamedTuple):
    """The target's outputs for a batch."""

    aux_BTNH: Tensor  # its states at the drafter's boundaries, which the drafter fuses
    final_BTH: Tensor  # its last states after its final norm
    probs: Callable[[Tensor], TargetProbs]  # of states (C, H)


class StepOutput(NamedTuple):
    """Mean loss over all rows by their weights, and what it was made of."""

    loss: Tensor
    weight: Tensor  # of all rows together: the sum over steps k of factor_k count_k
    counts: StepCounts | None  # None where they were not measured


def target_outputs(
    target: Target,
    drafter: Drafter,
    batch: Batch,
    config: ObjectiveConfig,
    measure: bool = True,
    source: FeatureSource = OnTheFly(),  # noqa: B008  frozen
) -> TargetOutputs:
    """Return the target's features, each document on its own; no gradient.

    Raises:
        ValueError: a feature is not finite; the message names sample and layer.
    """
    layers = drafter.config.aux_layers
    out = source(target, batch, layers, drafter.config.fusion.final_norm)
    real_BT = batch.documents_BT >= 0
    _check_features_are_finite(target, layers, out.aux_BTNH, out.final_BTH, real_BT)
    reads = config.reads | ({"log_mass_R", "token_R"} if measure else set())
    needs_covered = measure or config.in_vocab or isinstance(config.weights, PrefixWeights)
    probs = TargetHead(target, drafter.vocab, reads, needs_covered)
    aux_BTNH = out.aux_BTNH
    if not _autocast_rounds_them(drafter, aux_BTNH):
        aux_BTNH = aux_BTNH.to(drafter.lm_head.weight.dtype)
    aux_BTNH = aux_BTNH.masked_fill(~real_BT[:, :, None, None], 0.0)  # zero times NaN is NaN
    return TargetOutputs(aux_BTNH, out.final_BTH, probs)


def _check_features_are_finite(
    target: Target, layers: Sequence[int], aux_BTNH: Tensor, final_BTH: Tensor, real_BT: Tensor
) -> None:
    """Raise ValueError that names the first sample, token and layer with an infinite or undefined state."""
    named = [(f"boundary {boundary}", aux_BTNH[:, :, n]) for n, boundary in enumerate(layers)]
    named.append(("its last state", final_BTH))
    bad_NBT = torch.stack([~state_BTH.isfinite().all(-1) for _, state_BTH in named]) & real_BT
    if not bad_NBT.any():  # the device is waited for once
        return
    for bad_BT, (name, state_BTH) in zip(bad_NBT, named, strict=True):
        if not bad_BT.any():
            continue
        b, t = bad_BT.nonzero()[0].tolist()
        value = float(state_BTH[b, t][~state_BTH[b, t].isfinite()][0])
        raise ValueError(
            f"the target's features are not finite: sample {b}, token {t}, {name} holds {value}; {remedy(target)}"
        )


def _autocast_rounds_them(drafter: Drafter, aux_BTNH: Tensor) -> bool:
    """Whether autocast rounds the states to its own dtype anyway, since a projection reads them first.

    Widened before that, they would take twice the memory for nothing. A norm that reads them has weights in float32.
    """
    casts = torch.is_autocast_enabled(aux_BTNH.device.type) and aux_BTNH.dtype != torch.float64
    projected = isinstance(drafter.config.fusion, Concat) and drafter.config.norms.aux == "none"
    return casts and projected


class TrainedSlots(NamedTuple):
    """Which slots learn at which step of a batch, and which of them the unroll computes."""

    trained_KBT: Tensor  # bool
    drawn_KBT: Tensor | None  # bool, the slots that were drawn; None where all take part
    kept_slots: list[KeptSlots | None]


class TrainStep(nn.Module):
    """Drafter and objective as one module, whose forward is a training step: what FSDP2 shards and gathers around.

    Args:
        drafter: what is trained.
        objective: what is minimized.
    """

    def __init__(self, drafter: Drafter, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self.terms = terms(objective.loss)

    def forward(
        self,
        batch: Batch,
        outputs: TargetOutputs,
        measure: bool = True,
        random_BT: Tensor | None = None,
    ) -> StepOutput:
        """Return the unrolled loss: its mean over the rows of all steps, by the weights of steps and slots.

        A batch with no supervised row has loss zero, still connected to every parameter, so that no rank hangs.

        Args:
            measure: count for the metrics too, which costs several passes over the logits.
            random_BT: a number from 0 to 1 for each slot: step k leaves those out that are above its share. Figures are
                of what is left.
        """
        config = self.objective
        slots = self._trained_slots(batch, random_BT)

        # Training-time test (https://arxiv.org/abs/2503.01840): from step 1 on the drafter reads its own features.
        unroll = self.drafter.unroll(
            batch.ids_BT,
            outputs.aux_BTNH,
            batch.documents_BT,
            config.steps,
            config.kernel,
            config.recompute,
            slots.kept_slots,
        )
        steps = list(unroll)

        # Losses of the next-token distribution, piece by piece through both heads, with their gradients, here and now.
        counter = self._counter(batch, slots) if measure else None
        chances = self._chances(slots, outputs)
        head = self.drafter.config.drafting.head_weights(self.drafter)
        states = [step.normed_BTH.flatten(0, 1) for step in steps]
        observers = [observer for observer in (counter, chances) if observer is not None]
        task = self._head_task(outputs, slots, steps[0].normed_BTH.element_size(), observers)
        if isinstance(config.weights, PrefixWeights):
            weight_KS = slot_weights(config.weights, task, head, states, slots.trained_KBT)
            task = task._replace(weight_KS=weight_KS)
        loss, count_K, distribution_KN = head_loss(task, head, states)
        factor_K = count_K.new_tensor(task.factors)
        weight = (count_K * factor_K).sum()

        # Losses of the states, of all trained slots.
        by_state = self._state_losses(steps, outputs, chances, slots, task, weight)
        for n, loss_K in by_state.items():
            term_loss = (loss_K * factor_K).sum() / weight.clamp(min=1e-30)
            loss = loss + self.terms[n].weight * term_loss
        if counter is None:
            return StepOutput(loss, weight, None)
        compared = iter(distribution_KN.unbind(1))
        columns = [
            by_state[n].detach() if n in by_state else next(compared)
            for n in range(len(self.terms))
        ]
        loss_KN = torch.stack(columns, dim=1)
        return StepOutput(loss, weight, counter.counts(count_K, loss_KN, slots.trained_KBT))

    def _state_losses(
        self,
        steps: Sequence[Step],
        outputs: TargetOutputs,
        chances: AcceptanceChances | None,
        slots: TrainedSlots,
        task: HeadTask,
        weight: Tensor,
    ) -> dict[int, Tensor]:
        """Return the summed losses, (K,), of the states that steps hand on and of the confidence head, by the term's
        number.

        Args:
            weight: of the rows that count for losses of the distribution.
        """
        by_term = {}
        for n, term in enumerate(self.terms):
            if isinstance(term.loss, FeatureLoss):
                by_term[n] = self._feature_loss(term.loss, steps, outputs, slots, task.weight_KS)
            elif isinstance(term.loss, ConfidenceLoss):
                assert chances is not None
                by_term[n] = self._confidence_loss(term.loss, steps, chances, slots, task, weight)
        return by_term

    def _trained_slots(self, batch: Batch, random_BT: Tensor | None) -> TrainedSlots:
        """Return which slots learn at which step; of the others only the step-0 keys matter, which later slots see."""
        K = self.objective.steps
        drafting = self.drafter.config.drafting
        mask_BT = batch.loss_mask_BT
        by_step = [supervised(mask_BT, batch.documents_BT, k) for k in range(K)]
        trained_KBT = torch.stack(by_step)
        if random_BT is None:
            # one object for all steps: the unroll tells by identity that the slots are those of the step before
            return TrainedSlots(trained_KBT, None, [KeptSlots.of(trained_KBT)] * K)
        shares = self.objective.shares(drafting)
        drawn_KBT = torch.stack([random_BT <= share for share in shares])
        trained_KBT &= drawn_KBT
        return TrainedSlots(trained_KBT, drawn_KBT, drafting.kept_slots(trained_KBT))

    def _counter(self, batch: Batch, slots: TrainedSlots) -> StepCounter:
        """Return what counts hits and overlaps on the slots that decoding can reach."""
        mask_BT = batch.loss_mask_BT
        by_step = [reachable(mask_BT, batch.documents_BT, k) for k in range(self.objective.steps)]
        reached_KBT = torch.stack(by_step)
        if slots.drawn_KBT is not None:
            reached_KBT = reached_KBT & slots.drawn_KBT
        return StepCounter(reached_KBT.flatten(1))

    def _chances(self, slots: TrainedSlots, outputs: TargetOutputs) -> AcceptanceChances | None:
        """Return what keeps the chances of acceptance, if a loss of the confidence head needs them."""
        if not any(isinstance(term.loss, ConfidenceLoss) for term in self.terms):
            return None
        return AcceptanceChances(slots.trained_KBT.flatten(1), wide(outputs.final_BTH.dtype))

    def _head_task(
        self,
        outputs: TargetOutputs,
        slots: TrainedSlots,
        number_bytes: int,
        observers: Sequence[StepCounter | AcceptanceChances],
    ) -> HeadTask:
        """Return the work of the head: pieces of the batch, and the loss terms that compare distributions."""
        config = self.objective
        piece_positions = config.piece(number_bytes, self.drafter.config.draft_vocab_size)
        final_SH = outputs.final_BTH.flatten(0, 1)
        distribution_terms = [
            (term.weight, term.loss)
            for term in self.terms
            if isinstance(term.loss, DistributionLoss)
        ]
        return HeadTask(
            pieces=list(pieces(slots.trained_KBT, piece_positions, slots.kept_slots)),
            probs=lambda positions_C: outputs.probs(final_SH[positions_C]),
            terms=distribution_terms,
            factors=config.weights.factors(config.steps),
            in_vocab=config.in_vocab,
            observers=observers,
        )

    def _feature_loss(
        self,
        loss: FeatureLoss,
        steps: Sequence[Step],
        outputs: TargetOutputs,
        slots: TrainedSlots,
        weight_KS: Tensor | None,
    ) -> Tensor:
        """Return the summed losses of the states that steps hand on, (K,) (EAGLE-1, https://arxiv.org/abs/2401.15077).

        At step k, slot t stands for the target's state at t + 1 + k. SmoothL1 takes the target's whole vocabulary, with
        which all trained slots are the rows counted.
        """

        def loss_of(k: int, rows_R: Tensor, slots_R: Tensor) -> Tensor:
            h_RH = steps[k].h_BTH.flatten(0, 1)[rows_R]
            target_RH = shift(outputs.final_BTH, 1 + k).flatten(0, 1)[slots_R]
            return loss(h_RH, target_RH.to(h_RH.dtype))

        return _sums_of_steps(loss_of, slots, weight_KS)

    def _confidence_loss(
        self,
        loss: ConfidenceLoss,
        steps: Sequence[Step],
        chances: AcceptanceChances,
        slots: TrainedSlots,
        task: HeadTask,
        weight: Tensor,
    ) -> Tensor:
        """Return the summed losses of the confidence head's estimates, (K,); what it should say is a constant.

        All trained slots count, those too whose most likely token the draft vocabulary lacks: their drafts are seldom
        accepted, which the head should know. The sums are scaled so that they are the slots' mean over the weight of
        the rows that count for other losses.
        """
        drafting = self.drafter.config.drafting

        def loss_of(k: int, rows_R: Tensor, slots_R: Tensor) -> Tensor:
            read_RW = steps[k].normed_BTH.flatten(0, 1)[rows_R]
            logit_R = drafting.confidence_logits(self.drafter, read_RW)
            return loss(logit_R, chances.chance_KS[k, slots_R])

        def one_each(k: int, rows_R: Tensor, slots_R: Tensor) -> Tensor:
            return torch.ones_like(slots_R, dtype=chances.chance_KS.dtype)

        loss_K = _sums_of_steps(loss_of, slots, task.weight_KS)
        slots_K = _sums_of_steps(one_each, slots, task.weight_KS)
        slot_weight = (slots_K * slots_K.new_tensor(task.factors)).sum()
        return loss_K * (weight / slot_weight.clamp(min=1e-30))


def _sums_of_steps(
    loss_of: Callable[[int, Tensor, Tensor], Tensor], slots: TrainedSlots, weight_KS: Tensor | None
) -> Tensor:
    """Return the summed losses of each step, (K,).

    Args:
        loss_of: called with the step, the rows of its states that are trained, and their slots; returns (R,).
        weight_KS: what each slot weighs.
    """
    by_step = []
    for k, trained_BT in enumerate(slots.trained_KBT):
        slots_R = trained_BT.flatten().nonzero()[:, 0]
        step_slots = slots.kept_slots[k]
        rows_R = slots_R if step_slots is None else step_slots.place_S[slots_R]
        loss_R = loss_of(k, rows_R, slots_R)
        if weight_KS is not None:
            loss_R = loss_R * weight_KS[k, slots_R]
        by_step.append(loss_R.sum())
    return torch.stack(by_step)
