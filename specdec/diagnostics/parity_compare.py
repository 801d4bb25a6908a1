"""One drafter run three ways on the same texts, at the same places: what it reads there and what it predicts.

1. training: target and drafter run whole rows, every slot at once, unrolled as in ``fit``;
2. cached decoding: drafts are grown from each place in the drafter's cache;
3. the export: ``config.json`` and the weights, by the reference of vLLM, on the states that transformers reports.

All read the text's own tokens, so the same numbers are due. Slot t reads the feature of token t and token t + 1; at
depth k token t + 1 + k. Of a prompt of P tokens, slot P - 1 is where drafting begins.

Legend: T tokens, N aux layers, H hidden, A slots, K depths, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import AnchoredText, AnsweredText
from specdec.diagnostics.parity_files import ServedDrafter, interpret, read_files
from specdec.diagnostics.parity_settings import Misread
from specdec.drafter import Drafter
from specdec.nn.backend import wide
from specdec.nn.blocked import Blocked
from specdec.nn.view import View
from specdec.target import Target

SLOTS = 4  # compared inside a prompt, and inside an answer
# Two orders of the same sums may differ by this share of the numbers' range, by the dtype that all run in.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Another implementation may differ by TOLERANCE_FACTOR times as much as training and decoding differ by, and by no less
# than this. In 16 bits the tolerance above is wide enough to hide a norm that was left out.
LEAST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TOLERANCE_FACTOR = 4
NO_NUMBER = float("inf")
DECODED = "training and cached decoding"
EXPORTED = "training and export"


class DraftOutputs(NamedTuple):
    """The features that a drafter reads and its predictions, at every slot and depth."""

    # at depth 0 the target's fused states, further on the output of the step before
    features_AKH: Tensor
    log_probs_AKV: Tensor  # of the token after next, float32 at least; -inf for tokens that the drafter does not know
    confidence_AK: Tensor | None = None  # what a confidence head says of each draft


def training_outputs(
    target: Target, drafter: Drafter, texts: Sequence[list[int]], slots: Sequence[int], depth: int
) -> DraftOutputs:
    """Run training's unroll on the texts, packed into one row; the slots are the row's."""
    config = drafter.config
    ids_1T = torch.tensor([[token for text in texts for token in text]], device=target.device)
    numbers = [number for number, text in enumerate(texts) for _ in text]
    documents_1T = torch.tensor([numbers], device=target.device)
    aux_1TNH = target.forward(
        ids_1T, View.packed(documents_1T), config.aux_layers, config.fusion.final_norm
    ).aux_BTNH
    steps = list(drafter.unroll(ids_1T, aux_1TNH, documents_1T, depth + 1, Blocked()))
    at_A = torch.tensor(slots, device=target.device)
    read = [drafter.fuse(aux_1TNH), *(step.h_BTH for step in steps[:-1])]
    states = [step.normed_BTH[0, at_A] for step in steps]
    logits_AKD = torch.stack([drafter.logits(state) for state in states], 1)
    confidence_AK = None
    if config.drafting.has_confidence:
        estimates = [config.drafting.confidence_logits(drafter, state) for state in states]
        confidence_AK = torch.stack(estimates, 1).sigmoid()
    return DraftOutputs(
        torch.stack([h_1TH[0, at_A] for h_1TH in read], 1),
        _over_vocabulary(drafter, logits_AKD.log_softmax(-1, dtype=wide(logits_AKD.dtype))),
        confidence_AK,
    )


def decoding_outputs(
    target: Target, drafter: Drafter, ids: Sequence[int], slots: Sequence[int], depth: int
) -> DraftOutputs:
    """Decode chains of drafts in the drafter's cache, each step given the text's own token."""
    text = AnchoredText(target, drafter, ids, depth + 1)
    groups = text.groups([slot + 1 for slot in slots])
    drafted = [text.draft(group, text.behind(group)) for group in groups]
    features_AKH = torch.cat([chains.features_AJH[:, :-1] for chains in drafted])
    log_probs_AKD = torch.cat([chains.log_probs_AKD for chains in drafted])
    estimates = [chains.confidence_AK for chains in drafted if chains.confidence_AK is not None]
    confidence_AK = torch.cat(estimates) if estimates else None
    return DraftOutputs(features_AKH, _over_vocabulary(drafter, log_probs_AKD), confidence_AK)


def reported_states(target: Target, ids_T: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the states at the boundaries 0 to L that transformers reports, and the final normed one, (T, H) each."""
    entered: list[Tensor] = []
    hook = target.final_norm.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    try:
        out = target.model(input_ids=ids_T[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    *states, final_1TH = out.hidden_states
    # transformers reports the last layer's output only after the final norm.
    states.append(entered[-1])
    return [state_1TH[0] for state_1TH in states], final_1TH[0]


def fused_features(served: ServedDrafter, states: Sequence[Tensor], final_TH: Tensor) -> Tensor:
    """Return the features that the export makes of a text's states, (T, H); see :func:`reported_states`."""
    ids = served.settings.aux_ids
    return reference.fuse(served, [states[i] for i in ids] if ids else [final_TH])


def _over_vocabulary(drafter: Drafter, log_probs_AKD: Tensor) -> Tensor:
    A, K, _ = log_probs_AKD.shape
    log_probs_AKV = log_probs_AKD.new_full((A, K, drafter.config.vocab_size), float("-inf"))
    return log_probs_AKV.index_copy(2, drafter.vocab.target_ids_D, log_probs_AKD)


class ParityRow(NamedTuple):
    """All slots at one depth, run in two ways."""

    pair: str
    place: str  # whether training had the text alone in its row, or packed behind another
    depth: int
    slots: int
    agree: int  # slots at which both have the same most likely token
    gap: float  # largest difference of a log-probability; infinite if the two know other tokens, or one is no number
    share: float  # the same, as a share of the range of the log-probabilities
    # largest difference of features read, as a share of the largest number there
    feature_share: float
    allowed: float  # the largest share that is rounding
    confidence_gap: float = 0.0  # largest difference of what a confidence head says, from 0 to 1

    @property
    def equal(self) -> bool:
        """Whether the difference is that of rounding."""
        return max(self.share, self.confidence_gap) <= self.allowed

    @property
    def verdict(self) -> str:
        """``equal``, or where the first difference lies."""
        if self.equal:
            return "equal"
        if self.share <= self.allowed:
            return "DIFFERENT: the confidence head"
        if self.feature_share > self.allowed and self.depth:
            where = "what the step before handed on"
        elif self.feature_share > self.allowed:
            where = "the target's states, or how they are fused"
        elif self.gap != NO_NUMBER:
            where = "the layer, its positions or the head"
        else:
            where = "the tokens that the head knows"
        return f"DIFFERENT: {where}"

    def joined(self, other: "ParityRow") -> "ParityRow":
        """Return the row of both texts' slots, at the same place and depth."""
        return self._replace(
            slots=self.slots + other.slots,
            agree=self.agree + other.agree,
            gap=max(self.gap, other.gap),
            share=max(self.share, other.share),
            feature_share=max(self.feature_share, other.feature_share),
            confidence_gap=max(self.confidence_gap, other.confidence_gap),
        )


def compare_outputs(
    pair: str, place: str, first: DraftOutputs, second: DraftOutputs
) -> Iterator[ParityRow]:
    """Yield a row for each depth."""
    allowed = TOLERANCE[first.features_AKH.dtype]
    for k in range(first.log_probs_AKV.shape[1]):
        first_AV = first.log_probs_AKV[:, k]
        second_AV = second.log_probs_AKV[:, k]
        known_AV = first_AV.isfinite()
        gap = NO_NUMBER
        share = NO_NUMBER
        same_tokens = bool((known_AV == second_AV.isfinite()).all())
        if same_tokens and not (first_AV.isnan() | second_AV.isnan()).any():
            gap = float((first_AV - second_AV)[known_AV].abs().max())
            known = first_AV[known_AV]
            share = gap / max(float(known.max() - known.min()), 1e-30)
        first_AH = first.features_AKH[:, k]
        feature_share = (
            first_AH - second.features_AKH[:, k]
        ).abs().max() / first_AH.abs().max().clamp_min(1e-30)
        yield ParityRow(
            pair,
            place,
            depth=k,
            slots=len(first_AV),
            agree=int((first_AV.argmax(-1) == second_AV.argmax(-1)).sum()),
            gap=gap,
            share=share,
            feature_share=float(feature_share.nan_to_num(NO_NUMBER)),
            allowed=allowed,
            confidence_gap=_confidence_gap(first, second, k),
        )


def _confidence_gap(first: DraftOutputs, second: DraftOutputs, k: int) -> float:
    """Return the largest difference of two confidence heads at depth k; infinite if one is missing, or no number."""
    if first.confidence_AK is None and second.confidence_AK is None:
        return 0.0
    if first.confidence_AK is None or second.confidence_AK is None:
        return NO_NUMBER
    gap_A = (first.confidence_AK[:, k] - second.confidence_AK[:, k]).abs()
    return float(gap_A.max().nan_to_num(NO_NUMBER))


class Compared(NamedTuple):
    """The result of a comparison of training, decoding and export."""

    rows: list[ParityRow]
    not_compared: str | None  # why the export is not among them
    allowed: float  # the share that rounding may make of an export's or an engine's differences
    # what in a quantized export is not the drafter's rounding; None for an export that is not quantized
    rounding_faults: tuple[str, ...] | None = None

    @property
    def equal(self) -> bool:
        """Whether all that was compared is the same, up to rounding."""
        return all(row.equal for row in self.rows) and not self.rounding_faults


@torch.no_grad()
def compare_drafting(
    target: Target, drafter: Drafter, texts: Sequence[AnsweredText], depth: int, exported: Path | None = None,
    method: str = "eagle3", advance: Callable[[int], object] = lambda done: None,
) -> Compared:  # fmt: skip
    """Compare at every place of every text, alone and packed behind another, at depths 0 to ``depth``.

    Args:
        drafter: in the target's dtype, on its device.
        exported: a checkpoint's directory; without one training and decoding alone are compared.
        method: ``eagle``, ``eagle3``, ``dflash`` or ``dspark``, as the checkpoint is served.
        advance: called with 1 as each text is done.
    """
    export = None
    not_compared = "nothing was exported" if exported is None else None
    if exported is not None:
        try:
            export = interpret(
                read_files(exported), method, target.embedding_weight(), target.head_weight(), target.num_layers
            )  # fmt: skip
            # Of a quantized export the file's numbers are compared here; an engine's activations with its proposals.
            export = export._replace(rounded={})
        except Misread as error:
            not_compared = f"{exported}: {error}"
    rows: dict[tuple[str, str, int], ParityRow] = {}
    for number, text in enumerate(texts):
        slots = compared_slots(text, depth)
        other = texts[number - 1].ids
        packed_slots = [len(other) + slot for slot in slots]
        unrolled = {
            "alone": training_outputs(target, drafter, [text.ids], slots, depth),
            "packed": training_outputs(target, drafter, [other, text.ids], packed_slots, depth),
        }
        pairs = {DECODED: decoding_outputs(target, drafter, text.ids, slots, depth)}
        if export is not None:
            ids_T = torch.tensor(text.ids, device=target.device)
            features_TH = fused_features(export, *reported_states(target, ids_T))
            outputs = reference.draft(export, ids_T, features_TH, slots, depth)
            pairs[EXPORTED] = DraftOutputs(*outputs)
        for (pair, other_outputs), (place, trained) in product(pairs.items(), unrolled.items()):
            for row in compare_outputs(pair, place, trained, other_outputs):
                key = row.pair, row.place, row.depth
                rows[key] = rows[key].joined(row) if key in rows else row
        advance(1)
    decoded_rows = [row for row in rows.values() if row.pair == DECODED]
    allowed = rounding(decoded_rows, target.dtype)
    export_rows = [row._replace(allowed=allowed) for row in rows.values() if row.pair == EXPORTED]
    return Compared(decoded_rows + export_rows, not_compared, allowed)


def rounding(rows: Sequence[ParityRow], dtype: torch.dtype) -> float:
    """Return the share that another implementation may differ by, given how training and decoding differ."""
    gaps = [max(row.share, row.feature_share, row.confidence_gap) for row in rows]
    seen = max(gaps, default=0.0)
    return min(TOLERANCE[dtype], max(LEAST[dtype], TOLERANCE_FACTOR * seen))


def compared_slots(text: AnsweredText, depth: int) -> list[int]:
    """Return slots with ``depth`` more tokens behind them: in the prompt, around its end, in the answer."""
    start = text.prompt - 2
    end = len(text.ids) - 1 - depth
    around = range(max(0, start), text.prompt + 1)
    return [*spaced(range(start)), *around, *spaced(range(text.prompt + 1, end))]


def spaced(slots: range) -> list[int]:
    """Return at most :data:`SLOTS` of the slots, the first and the last among them."""
    even = np.linspace(slots.start, slots.stop - 1, min(SLOTS, len(slots)))
    return even.round().astype(int).tolist()
