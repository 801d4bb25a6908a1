"""The attention, state and accuracy of a drafter, draft step by draft step, and the states that the target gives it.

Step k yields draft k. It reads the token before (the anchor's for k = 1) and the state of step k - 1 (the fused feature
for k = 1), and yields the state that step k + 1 reads. Row i of the drafter holds the feature of position i and the
token of position i + 1. A chain's own rows begin with the one of its anchor, which step 1 writes.

Legend: A chains, K draft steps, h query heads, T tokens, Q queries, S key slots, M masses, N aux layers, H hidden,
D draft vocabulary, F series, R steps or places of the inputs, P prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.diagnostics.anchors import AnchoredText, Chains
from specdec.diagnostics.calibration import (
    ALL_KINDS,
    CONFIDENCES,
    FINE_BINS,
    binned,
    confidences,
)
from specdec.diagnostics.drift_attention import attention_weights, observing
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.report.statistics import measured, possible
from specdec.target import Target
from specdec.utils.text import how_many

ATTENTION = {  # titles and units; means over heads, then layers
    "sink_mass": ("Attention on the sink", "share of weight"),
    "prompt_mass": ("Attention on the prompt", "share of weight"),
    "recent_mass": ("Attention on recent committed tokens", "share of weight"),
    "own_mass": ("Attention on the chain's own rows", "share of weight"),
    "rest_mass": ("Attention on the rest of the answer", "share of weight"),
    "drafted_mass": ("Attention on drafted tokens", "share of weight"),
    "strongest_mass": ("Attention on the strongest committed row", "share of weight"),
    "entropy": ("Attention entropy", "nats"),
}
SERIES = ATTENTION | {
    "sink_own_mass": ("Attention on the sink and own rows", "share of weight"),
    "state_rms": ("RMS of the state fed back", "RMS"),
    "out_rms": ("RMS of the layer's output, before the norm", "RMS"),
    "cosine": ("Cosine of the states of steps k and k - 1", "cosine"),
    "update": ("Change of the state from step k - 1 to k, over its size", "ratio"),
    "feature_cosine": ("Cosine with the target's own feature", "cosine"),
    "kl": ("KL(target || drafter) along the text", "nats"),
    "joint_acceptance": ("Joint acceptance", "share of chains"),
    "conditional_acceptance": ("Conditional acceptance", "share of chains"),
    "overconfidence": ("Draft's probability less acceptance", "difference of shares of chains"),
}
# A block drafter feeds nothing back, and has none of these.
FED_BACK = {"state_rms", "cosine", "update", "feature_cosine"}
FIRST_ROWS = 16  # of a text, among which a sink is looked for
# A sink need not be the first row: of every one of the first rows, its attention.
ROWS = {f"row_{row}": (f"Attention on row {row}", "share of weight") for row in range(FIRST_ROWS)}
# by place: the fused states, all of them side by side, the same behind ``norms.aux``, the feature
INPUTS = {
    "target_sink_mass": ("Target: attention on the sink", "share of weight"),
    "target_own_mass": ("Target: attention on the own row", "share of weight"),
    "sink_rms": ("RMS at the sink", "RMS"),
    "median_rms": ("Median RMS of the other positions", "RMS"),
    "massive_ratio": ("RMS at the sink over the others' median", "ratio"),
}

DEPTHS = 8  # draft steps of a chain, where nobody says
VERSION = 3  # of ``drift.json``
Document = dict[str, Any]  # the measured part of ``drift.json``
SINK = 1  # first positions of a text that count as the sink
RECENT = 16  # committed rows before a chain that count as recent


class Drafted(NamedTuple):
    """Chains of drafts, and sums over those that count."""

    chains: Chains
    sums_FK2: Tensor  # float64: of SERIES, then of ROWS, at every step: the sum over chains, and how many chains count
    bins_CKR3: Tensor  # see :func:`specdec.diagnostics.calibration.binned`


def no_sums(depth: int, has_confidence: bool) -> tuple[Tensor, Tensor]:
    """Return the sums over no chain, of a drafter with a confidence head or without one."""
    sums_FK2 = torch.zeros(len(SERIES | ROWS), depth, 2, dtype=torch.float64)
    kinds = len(ALL_KINDS if has_confidence else CONFIDENCES)
    return sums_FK2, torch.zeros(kinds, depth, FINE_BINS, 3, dtype=torch.float64)


@torch.inference_mode()
def drafted(text: AnchoredText, anchors: list[int], prompt: int, end: int) -> Drafted:
    """Draft from anchors of a text as decoding does, then along the text as training does, and add up.

    ``kl`` and ``feature_cosine`` belong to the second: every step reads the text's token and the drafter's own state.
    Nothing is drawn at random.

    Args:
        anchors: ascending.
        prompt: tokens of the prompt.
        end: chains from there on do not count.

    Returns:
        The chains, as decoding drafts them, and their sums.
    """
    drafter = text.drafter
    chains, attention_AKM, rows_AKR, outs_AKH = _observe_chains(text, anchors, prompt)
    counted = [anchor for anchor in anchors if anchor < end]
    count = len(counted)
    if not counted:
        return Drafted(chains, *no_sums(text.depth, drafter.config.drafting.has_confidence))
    steps_K = torch.arange(text.depth, device=text.ids_1T.device)
    places_AK = torch.tensor(counted, device=steps_K.device)[:, None] + steps_K
    taught = text.draft(counted, text.behind(counted))
    states_AJH = chains.features_AJH[:count].double()
    true_AKH = drafter.fuse(text.out.aux_BTNH[0, places_AK]).double()
    logits_AKD = text.target.logits(text.out.final_BTH[0, places_AK], drafter.vocab.target_ids_D)
    probs_AKD = logits_AKD.double().softmax(-1)  # renormalized to the draft vocabulary
    right_AK = chains.tokens_AK[:count] == text.ids_1T[0, places_AK + 1]
    accepted_AK = right_AK.cumprod(1).double()
    # a chain reaches a step if all drafts before it are accepted
    reached_AK = F.pad(accepted_AK[:, :-1], (1, 0), value=1)
    confidence_AKC = _confidences(chains, count)
    top_AK = confidence_AKC[..., list(CONFIDENCES).index("top")]
    values = dict(zip(ATTENTION, attention_AKM[:count].unbind(-1), strict=True))
    values |= {
        "sink_own_mass": values["sink_mass"] + values["own_mass"],
        "state_rms": _rms(states_AJH[:, 1:]),
        "out_rms": _rms(outs_AKH[:count]),
        "cosine": F.cosine_similarity(states_AJH[:, 1:], states_AJH[:, :-1], dim=-1),
        "update": _rms(states_AJH.diff(dim=1)) / _rms(states_AJH[:, 1:]),
        "feature_cosine": F.cosine_similarity(
            taught.features_AJH[:, 1:].double(), true_AKH, dim=-1
        ),
        "kl": F.kl_div(taught.log_probs_AKD.double(), probs_AKD, reduction="none").sum(-1),
        "joint_acceptance": accepted_AK,
        "conditional_acceptance": accepted_AK,
        "overconfidence": reached_AK * (top_AK - right_AK.double()),
    }
    weights = dict.fromkeys(SERIES, torch.full_like(accepted_AK[0], count))
    weights["conditional_acceptance"] = reached_AK.sum(0)
    weights["overconfidence"] = reached_AK.sum(0)
    sums = [torch.stack([values[name].sum(0), weights[name]], -1) for name in SERIES]
    if drafter.config.drafting.fixed_drafts:
        sums = [
            0 * sum_K2 if name in FED_BACK else sum_K2
            for name, sum_K2 in zip(SERIES, sums, strict=True)
        ]
    rows_RK2 = _sums_of_rows(counted, rows_AKR[:count])
    bins_CKR3 = binned(confidence_AKC, right_AK)
    return Drafted(chains, torch.cat([torch.stack(sums).cpu(), rows_RK2]), bins_CKR3)


def _confidences(chains: Chains, count: int) -> Tensor:
    """Return every kind of confidence of the first chains, (A, K, C)."""
    head_AK = None if chains.confidence_AK is None else chains.confidence_AK[:count]
    return confidences(chains.log_probs_AKD[:count], head_AK)


def _sums_of_rows(anchors: list[int], rows_AKR: Tensor) -> Tensor:
    """Return the attention on each of the first rows, summed over the chains that see it, and how many do, (R, K, 2).

    A chain sees the text's rows before its anchor's own.
    """
    seen_AR = torch.tensor(anchors)[:, None] - 1 > torch.arange(FIRST_ROWS)
    seen_KR = seen_AR.sum(0).expand(rows_AKR.shape[1], -1)
    return torch.stack([rows_AKR.sum(0).cpu(), seen_KR], -1).transpose(0, 1)


def _observe_chains(
    text: AnchoredText, anchors: list[int], prompt: int
) -> tuple[Chains, Tensor, Tensor, Tensor]:
    """Draft chains, and keep their attention (A, K, M), that on each of the first rows (A, K, R), and the states before
    the output norm (A, K, H).
    """
    A = len(anchors)
    anchor_A = torch.tensor(anchors, device=text.ids_1T.device)
    attention: list[Tensor] = []
    first_rows: list[Tensor] = []
    outs: list[Tensor] = []
    with observing(text.drafter) as seen:

        def observe_step(level: int) -> None:
            rows = text.drafter.config.drafting.nodes_of_step(level, A)
            layers = [weights_BhTS[0, :, rows] for weights_BhTS in seen.weights_BhTS.values()]
            # of all layers' heads
            weights_hAS = torch.cat(layers).double()
            weights_AS = weights_hAS.mean(0)
            regions_AMS = _regions(text.rows, prompt, anchor_A, weights_AS.shape[-1]).double()
            masses_AM = (regions_AMS @ weights_AS[..., None])[..., 0]
            strongest_A = weights_AS[:, : text.rows].amax(-1)
            entropy_A = torch.special.entr(weights_hAS).sum(-1).mean(0)
            more_A2 = torch.stack([strongest_A, entropy_A], -1)
            attention.append(torch.cat([masses_AM, more_A2], -1))
            first_AR = weights_AS[:, : min(text.rows, FIRST_ROWS)]
            first_rows.append(F.pad(first_AR, (0, FIRST_ROWS - first_AR.shape[-1])))
            assert seen.out_BTH is not None
            outs.append(seen.out_BTH[0, rows])

        chains = text.draft(anchors, on_step=observe_step)
    return chains, torch.stack(attention, 1), torch.stack(first_rows, 1), torch.stack(outs, 1)


def _rms(x: Tensor) -> Tensor:
    """Return ``||x|| / sqrt(d)`` of the last dimension, float64."""
    return x.double().square().mean(-1).sqrt()


def _regions(text: int, prompt: int, anchor_A: Tensor, slots: int) -> Tensor:
    """Return the regions of chains' key slots, (A, M, S), 1 or 0, in the order of :data:`ATTENTION`, of which the last
    two are no regions.

    The first five are disjoint and cover all that a chain sees. The first ``text`` slots are the text's rows; behind
    them stand the chains', level by level; a chain's level 0 is the row of its anchor.
    """
    slot_S = torch.arange(slots, device=anchor_A.device)
    recent_AS = slot_S >= anchor_A[:, None] - 1 - RECENT
    region_AS = torch.where(recent_AS, 2, torch.where(slot_S < prompt, 1, 4))
    region_AS = torch.where(slot_S < SINK, 0, region_AS)
    region_AS = torch.where(slot_S >= text, 3, region_AS)
    drafted_A1S = (slot_S >= text + len(anchor_A)).expand(len(anchor_A), 1, -1)
    return torch.cat([F.one_hot(region_AS, 5).mT, drafted_A1S], 1)


@torch.inference_mode()
def read_inputs(target: Target, drafter: Drafter, ids: Sequence[int], prompt: int) -> Tensor:
    """Measure the target's fused states of a text, and its attention where they are computed.

    Returns:
        (F, R, 2) float64: of every one of :data:`INPUTS`, at every place, the text's value and 1, or 0 and 0 where
        there is none. Attention is a mean over heads and over the queries of the answer.
    """
    config = drafter.config
    ids_1T = torch.tensor([list(ids)], device=target.device)
    # Boundary b is the output of layer b - 1; embeddings, and a layer that does not attend, have no attention.
    makers = [b - 1 if b and target.attends[b - 1] else -1 for b in config.aux_layers]
    with attention_weights(target, makers) as weights_BhTT:
        out = target.forward(
            ids_1T,
            View.packed(torch.zeros_like(ids_1T)),
            config.aux_layers,
            config.fusion.final_norm,
        )
    aux_TNH = out.aux_BTNH[0]
    normed_TNH = drafter.norms.aux(aux_TNH[None])[0]
    places = [
        *aux_TNH.unbind(1),
        aux_TNH.flatten(1),
        normed_TNH.flatten(1),
        drafter.fuse(aux_TNH[None])[0],
    ]
    sums_FR2 = torch.zeros(len(INPUTS), len(places), 2, dtype=torch.float64)
    for row, maker in enumerate(makers):
        if maker >= 0:
            answer_hQT = weights_BhTT[maker][0, :, prompt:].double()
            sums_FR2[0, row, 0] = answer_hQT[..., :SINK].sum(-1).mean()
            sums_FR2[1, row, 0] = answer_hQT.diagonal(prompt, -2, -1).mean()
            sums_FR2[:2, row, 1] = 1
    rms_RT = torch.stack(list(map(_rms, places)))
    sink_R = rms_RT[:, :SINK].amax(1)
    median_R = rms_RT[:, SINK:].median(1).values
    sums_FR2[2:, :, 0] = torch.stack([sink_R, median_R, sink_R / median_R])
    sums_FR2[2:, :, 1] = 1
    return sums_FR2


def drift_document(
    prompts: Sequence[str], sums: Sequence[Tensor], inputs: Sequence[Tensor], aux_layers: Sequence[int],
    trained_depth: int | None, depths: int,
) -> Document:  # fmt: skip
    """Return the measured part of ``drift.json``, over the prompts that have a chain.

    Args:
        sums: of each prompt, as :func:`drafted` gives them.
        inputs: of each prompt, as :func:`read_inputs` gives them.

    Raises:
        ValueError: no prompt has a chain.
    """
    rows = [
        row
        for row in zip(
            prompts, (int(sums_FK2[0, 0, 1]) for sums_FK2 in sums), sums, inputs, strict=True
        )
        if row[1]
    ]
    if not rows:
        raise ValueError(
            f"no answer of the target is long enough for a chain of {how_many(depths, 'token')}: ask for fewer depths "
            "or more new tokens, or give other prompts"
        )
    names, chains, sums, inputs = map(list, zip(*rows, strict=True))
    places = [f"layer {b}" if b else "embeddings" for b in aux_layers]
    places += ["states side by side", "the same, normed", "feature"]
    return {
        "version": VERSION,
        "trained_depth": trained_depth,
        "depths": depths,
        "prompts": names,
        "chains": chains,
        "series": _series(SERIES, [sums_FK2[: len(SERIES)] for sums_FK2 in sums]),
        "rows": _series(ROWS, [sums_FK2[len(SERIES) :] for sums_FK2 in sums]),
        "inputs": {
            "places": places,
            "series": _series(INPUTS, inputs),
        },
    }


def _series(titles: Mapping[str, tuple[str, str]], sums: Sequence[Tensor]) -> dict[str, Document]:
    """Return, by name, every step's or place's (a row's) values and weights of the prompts, mean and interval."""
    series: dict[str, Document] = {}
    sums_FRP2 = torch.stack([*sums], 2).numpy()
    for (name, (title, unit)), sums_RP2 in zip(titles.items(), sums_FRP2, strict=True):
        values = [
            [float(total / weight) if weight else None for total, weight in row] for row in sums_RP2
        ]
        figures = [measured(sums_P2, bounds=possible(unit)) for sums_P2 in sums_RP2]
        series[name] = {
            "title": title,
            "unit": unit,
            "values": values,
            "weights": sums_RP2[..., 1].astype(int).tolist(),
            **{key: [figure[key] for figure in figures] for key in ("mean", "low", "high")},
        }
    return series
