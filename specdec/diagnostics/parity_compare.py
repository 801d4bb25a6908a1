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
from specdec.drafter import Drafter
from specdec.nn.blocked import Blocked
from specdec.nn.view import View
from specdec.target import Target

EACH = 4  # slots compared inside a prompt, and inside an answer
# what two orders of the same sums may differ by, as a share of the numbers' range, by the dtype that all run in
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# of another implementation never less is allowed, and TIMES as much as training and decoding differ by: in 16 bits the
# tolerance is wide enough to hide a norm that was left out
LEAST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TIMES = 4
NO_NUMBER = float("inf")
DECODED = "training and cached decoding"
EXPORTED = "training and export"


class DraftOutputs(NamedTuple):
    """What a drafter reads and predicts at every slot and depth."""

    features_AKH: (
        Tensor  # at depth 0 the target's states as one, further on what the step before handed on
    )
    log_probs_AKV: Tensor  # of the token after next, float32 at least; -inf for tokens that the drafter does not know


def trained(
    target: Target, drafter: Drafter, texts: Sequence[list[int]], slots: Sequence[int], depth: int
) -> DraftOutputs:
    """Training's unroll, the texts packed into one row; the slots are the row's."""
    config = drafter.config
    ids_1T = torch.tensor([[token for text in texts for token in text]], device=target.device)
    documents_1T = torch.tensor(
        [[n for n, text in enumerate(texts) for _ in text]], device=target.device
    )
    aux_1TNH = target.forward(
        ids_1T, View.packed(documents_1T), config.aux_layers, config.fusion.final_norm
    ).aux_BTNH
    h_1TH = drafter.fuse(aux_1TNH)
    at_A = torch.tensor(slots, device=target.device)
    features = []
    log_probs = []
    for step in drafter.unroll(ids_1T, aux_1TNH, documents_1T, depth + 1, Blocked()):
        logits_AD = drafter.logits(step.normed_BTH[0, at_A])
        features.append(h_1TH[0, at_A])
        log_probs.append(
            logits_AD.log_softmax(-1, dtype=torch.promote_types(logits_AD.dtype, torch.float32))
        )
        h_1TH = step.h_BTH
    return DraftOutputs(
        torch.stack(features, 1), _over_vocabulary(drafter, torch.stack(log_probs, 1))
    )


def decoded(
    target: Target, drafter: Drafter, ids: Sequence[int], slots: Sequence[int], depth: int
) -> DraftOutputs:
    """Decoding: chains of drafts in the drafter's cache, each step given the text's own token."""
    text = AnchoredText(target, drafter, ids, depth + 1)
    groups = text.groups([slot + 1 for slot in slots])
    found = [text.draft(group, text.behind(group)) for group in groups]
    features_AKH = torch.cat([chains.features_AJH[:, :-1] for chains in found])
    return DraftOutputs(
        features_AKH,
        _over_vocabulary(drafter, torch.cat([chains.log_probs_AKD for chains in found])),
    )


def reported_states(target: Target, ids_T: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states at the boundaries 0 to L that transformers reports of a text, and its final normed one, (T, H)."""
    entered: list[Tensor] = []
    hook = target.final_norm.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    try:
        out = target.model(input_ids=ids_T[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    *states, final_1TH = out.hidden_states
    # what leaves the last layer, which transformers reports after the final norm only
    states.append(entered[-1])
    return [state_1TH[0] for state_1TH in states], final_1TH[0]


def fused_features(
    served_by: reference.ServedDrafter, states: Sequence[Tensor], final_TH: Tensor
) -> Tensor:
    """What the export makes of a text's states, (T, H); see :func:`reported_states`."""
    named = served_by.settings.aux_ids
    return reference.fuse(served_by, [states[i] for i in named] if named else [final_TH])


def served(
    target: Target,
    served_by: reference.ServedDrafter,
    ids: Sequence[int],
    slots: Sequence[int],
    depth: int,
) -> DraftOutputs:
    """The export as vLLM is documented to run it, on states that transformers reports."""
    ids_T = torch.tensor(ids, device=target.device)
    features_TH = fused_features(served_by, *reported_states(target, ids_T))
    return DraftOutputs(*reference.draft(served_by, ids_T, features_TH, slots, depth))


def _over_vocabulary(drafter: Drafter, log_probs_AKD: Tensor) -> Tensor:
    wide = log_probs_AKD.new_full(
        (*log_probs_AKD.shape[:2], drafter.config.vocab_size), float("-inf")
    )
    return wide.index_copy(2, drafter.vocab.target_ids_D, log_probs_AKD)


class ParityRow(NamedTuple):
    """All slots at one depth, run in two ways."""

    pair: str
    place: str  # whether training had the text alone in its row, or packed behind another
    depth: int
    slots: int
    agree: int  # slots at which both have the same most likely token
    gap: float  # largest difference of a log-probability; infinite if the two know other tokens, or one is no number
    share: float  # the same, as a share of the range of the log-probabilities
    feature_share: (
        float  # largest difference in what was read, as a share of the largest number there
    )
    allowed: float  # of a share

    @property
    def equal(self) -> bool:
        """Whether the difference is that of rounding."""
        return self.share <= self.allowed

    @property
    def verdict(self) -> str:
        """``equal``, or where the first difference lies."""
        if self.equal:
            return "equal"
        if self.feature_share > self.allowed:
            where = (
                "what the step before handed on"
                if self.depth
                else "the target's states, or how they are fused"
            )
        else:
            known = self.gap != NO_NUMBER
            where = (
                "the layer, its positions or the head"
                if known
                else "the tokens that the head knows"
            )
        return f"DIFFERENT: {where}"

    def joined(self, other: "ParityRow") -> "ParityRow":
        """The slots of both texts, at the same place and depth."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in ("slots", "agree")}
        worst = {
            name: max(getattr(self, name), getattr(other, name))
            for name in ("gap", "share", "feature_share")
        }
        return self._replace(**counts, **worst)


def compare_outputs(
    pair: str, place: str, one: DraftOutputs, two: DraftOutputs
) -> Iterator[ParityRow]:
    """A row for each depth."""
    allowed = TOLERANCE[one.features_AKH.dtype]
    for k in range(one.log_probs_AKV.shape[1]):
        ours = one.log_probs_AKV[:, k]
        theirs = two.log_probs_AKV[:, k]
        known = ours.isfinite()
        gap = NO_NUMBER
        share = NO_NUMBER
        if not bool(ours.isnan().any() | theirs.isnan().any() | (known != theirs.isfinite()).any()):
            gap = float((ours - theirs)[known].abs().max())
            share = gap / max(float(ours[known].max() - ours[known].min()), 1e-30)
        read = one.features_AKH[:, k]
        other = two.features_AKH[:, k]
        feature_share = float(
            ((read - other).abs().max() / read.abs().max().clamp_min(1e-30)).nan_to_num(NO_NUMBER)
        )
        agree = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        yield ParityRow(pair, place, k, len(ours), agree, gap, share, feature_share, allowed)


class Compared(NamedTuple):
    """How the ways compare."""

    rows: list[ParityRow]
    not_compared: str | None  # why the export is not among them
    allowed: float  # the share that rounding may make of an export's or an engine's differences

    @property
    def equal(self) -> bool:
        """Whether all that was compared is the same, up to rounding."""
        return all(row.equal for row in self.rows)


@torch.no_grad()
def compare(
    target: Target, drafter: Drafter, texts: Sequence[AnsweredText], depth: int, exported: Path | None = None,
    method: str = "eagle3", on_text: Callable[[], object] = lambda: None,
) -> Compared:  # fmt: skip
    """Compare at every place of every text, alone and packed behind another, at depths 0 to ``depth``.

    Args:
        drafter: in the target's dtype, on its device.
        exported: a checkpoint's directory; without one training and decoding alone are compared.
        method: ``eagle``, ``eagle3`` or ``dflash``, as the checkpoint is served.
        on_text: called as each text is done.
    """
    export = None
    not_compared = "nothing was exported" if exported is None else None
    if exported is not None:
        try:
            export = reference.load(
                exported, method, target.embedding_weight(), target.head_weight(), target.num_layers
            )
        except reference.Misread as error:
            not_compared = f"{exported}: {error}"
    rows: dict[tuple[str, str, int], ParityRow] = {}
    for number, text in enumerate(texts):
        slots = places(text, depth)
        other = texts[number - 1].ids
        behind = [len(other) + slot for slot in slots]
        unrolled = {
            "alone": trained(target, drafter, [text.ids], slots, depth),
            "packed": trained(target, drafter, [other, text.ids], behind, depth),
        }
        pairs = {DECODED: decoded(target, drafter, text.ids, slots, depth)}
        if export is not None:
            pairs[EXPORTED] = served(target, export, text.ids, slots, depth)
        for (pair, theirs), (place, own) in product(pairs.items(), unrolled.items()):
            for row in compare_outputs(pair, place, own, theirs):
                rows[row[:3]] = rows[row[:3]].joined(row) if row[:3] in rows else row
        on_text()
    ours = [row for row in rows.values() if row.pair == DECODED]
    allowed = rounding(ours, target.dtype)
    engines = [row._replace(allowed=allowed) for row in rows.values() if row.pair == EXPORTED]
    return Compared(ours + engines, not_compared, allowed)


def rounding(rows: Sequence[ParityRow], dtype: torch.dtype) -> float:
    """The share that another implementation may differ by, where our own two differ as ``rows`` say."""
    seen = max((max(row.share, row.feature_share) for row in rows), default=0.0)
    return min(TOLERANCE[dtype], max(LEAST[dtype], TIMES * seen))


def places(text: AnsweredText, depth: int) -> list[int]:
    """Slots with ``depth`` more tokens behind them: in the prompt, around its end, in the answer."""
    start = text.prompt - 2
    end = len(text.ids) - 1 - depth
    return [
        *spaced(range(start)),
        *range(max(0, start), text.prompt + 1),
        *spaced(range(text.prompt + 1, end)),
    ]


def spaced(slots: range) -> list[int]:
    """At most :data:`EACH` of them, the first and the last among them."""
    return (
        np.linspace(slots.start, slots.stop - 1, min(EACH, len(slots))).round().astype(int).tolist()
    )
