"""What a drafter attends to, how its state changes and how often it is right, draft step by draft step; and what the
target gives it to read.

Step k yields draft k. It reads the token before (the anchor's for k = 1) and the state of step k - 1 (the fused feature
for k = 1), and yields the state that step k + 1 reads. Row i of the drafter holds the feature of position i and the
token of position i + 1. A chain's own rows begin with the one of its anchor, which step 1 writes.

Legend: A chains, K draft steps, h query heads, T tokens, Q queries, S key slots, M masses, N aux layers, H hidden,
D draft vocabulary, F series, R steps or places of the inputs, P prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.diagnostics.anchors import AnchoredText, Chains
from specdec.diagnostics.drift_attention import attention_weights, observing
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.report.statistics import (
    ANY,
    Array,
    Statistic,
    less,
    measured,
    over,
    possible,
    ratio,
)
from specdec.target import Target
from specdec.utils.text import how_many

ATTENTION = {  # titles and units; means over heads, then layers
    "sink_mass": ("Attention on the sink", "share of weight"),
    "prompt_mass": ("Attention on the prompt", "share of weight"),
    "recent_mass": ("Attention on recent committed tokens", "share of weight"),
    "own_mass": ("Attention on the chain's own rows", "share of weight"),
    "rest_mass": ("Attention on the rest of the answer", "share of weight"),
    "drafted_mass": ("Attention on drafted tokens", "share of weight"),
    "entropy": ("Attention entropy", "nats"),
}
SERIES = ATTENTION | {
    "sink_own_mass": ("Attention on the sink and own rows", "share of weight"),
    "state_rms": ("RMS of the state fed back", "RMS"),
    "out_rms": ("RMS of the layer's output, before the norm", "RMS"),
    "cosine": ("Cosine of the states of steps k and k - 1", "cosine"),
    "feature_cosine": ("Cosine with the target's own feature", "cosine"),
    "kl": ("KL(target || drafter) along the text", "nats"),
    "joint_acceptance": ("Joint acceptance", "share of chains"),
    "conditional_acceptance": ("Conditional acceptance", "share of chains"),
}
# of which a block drafter, that feeds nothing back, has none
FED_BACK = {"state_rms", "cosine", "feature_cosine"}
# by place: the fused states, all of them side by side, the same behind ``norms.aux``, the feature
INPUTS = {
    "target_sink_mass": ("Target: attention on the sink", "share of weight"),
    "target_own_mass": ("Target: attention on the own row", "share of weight"),
    "sink_rms": ("RMS at the sink", "RMS"),
    "median_rms": ("Median RMS of the other positions", "RMS"),
    "massive_ratio": ("RMS at the sink over the others' median", "ratio"),
}

VERSION = 2  # of ``drift.json``
Document = dict[str, Any]  # the measured part of ``drift.json``
SINK = 1  # first positions of a text that count as the sink
RECENT = 16  # committed rows before a chain that count as recent


@torch.inference_mode()
def drafted(one: AnchoredText, anchors: list[int], prompt: int, end: int) -> tuple[Chains, Tensor]:
    """Draft from anchors of a text as decoding does, then along the text as training does, and add up.

    ``kl`` and ``feature_cosine`` are of the second: every step reads the text's token and the drafter's own state.
    Nothing is drawn at random.

    Args:
        anchors: ascending.
        prompt: tokens of the prompt.
        end: chains from there on do not count.

    Returns:
        The chains, as decoding drafts them; and (F, K, 2) float64: of every one of :data:`SERIES`, at every step, the
        sum over chains and how many chains count.
    """
    drafter = one.drafter
    anchor_A = torch.tensor(anchors, device=one.ids_1T.device)
    A = len(anchors)
    attention: list[Tensor] = []  # (A, M) of each step
    outs: list[Tensor] = []  # (A, H), the state before the output norm
    with observing(drafter) as seen:

        def look(level: int) -> None:
            at = drafter.config.drafting.nodes_of_step(level, A)
            weights = [
                seen.weights_BhTS[layer][0, :, at].transpose(0, 1)
                for layer in sorted(seen.weights_BhTS)
            ]
            regions_ARS = _regions(one.rows, prompt, anchor_A, weights[0].shape[-1])
            attention.append(
                torch.stack([_masses(each_AhS, regions_ARS) for each_AhS in weights])
                .double()
                .mean(0)
            )
            assert seen.out_BTH is not None
            outs.append(seen.out_BTH[0, at])

        chains = one.draft(anchors, on_step=look)
    counted = [anchor for anchor in anchors if anchor < end]
    sums_FK2 = torch.zeros(len(SERIES), one.depth, 2, dtype=torch.float64, device=anchor_A.device)
    if not counted:
        return chains, sums_FK2
    taught = one.draft(counted, one.behind(counted))
    anchor_A = anchor_A[: len(counted)]
    accepted_A = torch.ones_like(anchor_A, dtype=torch.float64)
    for k in range(one.depth):
        before_AH, state_AH = (
            chains.features_AJH[: len(counted), at].double() for at in (k, k + 1)
        )
        true_AH = drafter.fuse(one.out.aux_BTNH[:, anchor_A + k])[0].double()
        logits_AD = one.target.logits(
            one.out.final_BTH[:, anchor_A + k], drafter.vocab.target_ids_D
        )[0]
        right_A = chains.tokens_AK[: len(counted), k] == one.ids_1T[0, anchor_A + k + 1]
        reached_A = accepted_A
        accepted_A = accepted_A * right_A
        found = dict(zip(ATTENTION, attention[k][: len(counted)].unbind(1), strict=True))
        found |= {
            "sink_own_mass": found["sink_mass"] + found["own_mass"],
            "state_rms": _rms(state_AH),
            "out_rms": _rms(outs[k][: len(counted)]),
            "cosine": F.cosine_similarity(state_AH, before_AH, dim=-1),
            "feature_cosine": F.cosine_similarity(
                taught.features_AJH[:, k + 1].double(), true_AH, dim=-1
            ),
            "kl": _kl(logits_AD, taught.log_probs_AKD[:, k]),
            "joint_acceptance": accepted_A,
            "conditional_acceptance": accepted_A,
        }
        for row, name in enumerate(SERIES):
            if drafter.config.drafting.fixed_drafts and name in FED_BACK:
                continue
            count = (
                reached_A.sum()
                if name == "conditional_acceptance"
                else reached_A.new_tensor(len(counted))
            )
            sums_FK2[row, k] = torch.stack([found[name].sum(), count])
    return chains, sums_FK2


def _rms(x: Tensor) -> Tensor:
    """``||x|| / sqrt(d)`` of the last dimension, float64."""
    return x.double().square().mean(-1).sqrt()


def _regions(text: int, prompt: int, anchor_A: Tensor, slots: int) -> Tensor:
    """Which key slots are what to each chain, (A, M, S) bool, in the order of :data:`ATTENTION` but for the entropy.

    The first five are disjoint and cover all that a chain sees. The first ``text`` slots are the text's rows; behind
    them stand the chains', level by level; a chain's level 0 is the row of its anchor.
    """
    slot_S = torch.arange(slots, device=anchor_A.device)
    before_A1 = anchor_A[:, None] - 1
    own_S = slot_S >= text
    sink_S = slot_S < SINK
    recent_AS = ~own_S & ~sink_S & (slot_S >= before_A1 - RECENT)
    prompt_AS = ~own_S & ~sink_S & ~recent_AS & (slot_S < prompt)
    rest_AS = ~own_S & ~sink_S & ~recent_AS & ~prompt_AS
    all_A1 = torch.ones_like(before_A1, dtype=torch.bool)
    alike = [(each_S & all_A1) for each_S in (sink_S, own_S, slot_S >= text + len(anchor_A))]
    return torch.stack([alike[0], prompt_AS, recent_AS, alike[1], rest_AS, alike[2]], 1)


def _masses(weights_AhS: Tensor, regions_ARS: Tensor) -> Tensor:
    """What one layer attends to, (A, M + 1) in the order of :data:`ATTENTION`: means over heads."""
    mass_AM = (
        torch.einsum("ahs,ams->am", weights_AhS, regions_ARS.to(weights_AhS)) / weights_AhS.shape[1]
    )
    return torch.cat([mass_AM, torch.special.entr(weights_AhS).sum(-1).mean(1, keepdim=True)], 1)


def _kl(logits_AD: Tensor, log_q_AD: Tensor) -> Tensor:
    """KL(target || drafter) over the draft vocabulary, to which the target's probabilities are renormalised."""
    log_p_AD = logits_AD.double().log_softmax(-1)
    p_AD = log_p_AD.exp()
    return torch.where(p_AD > 0, p_AD * (log_p_AD - log_q_AD.double()), 0).sum(-1)


@torch.inference_mode()
def read_inputs(target: Target, drafter: Drafter, ids: Sequence[int], prompt: int) -> Tensor:
    """What the target's fused states of a text hold, and its attention where they are made.

    Returns:
        (F, R, 2) float64: of every one of :data:`INPUTS`, at every place, the text's value and 1, or 0 and 0 where
        there is none. Attention is a mean over heads and over the queries of the answer.
    """
    config = drafter.config
    ids_1T = torch.tensor([list(ids)], device=target.device)
    # boundary b is what layer b - 1 gives; the embeddings and a layer that does not attend have no attention to measure
    makers = [
        boundary - 1 if boundary and target.attends[boundary - 1] else -1
        for boundary in config.aux_layers
    ]
    with attention_weights(target, makers) as weights_BhTT:
        view = View.packed(torch.zeros_like(ids_1T))
        aux_TNH = target.forward(
            ids_1T, view, config.aux_layers, config.fusion.final_norm
        ).aux_BTNH[0]
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
    for row, state_TH in enumerate(places):
        rms_T = _rms(state_TH)
        sink = rms_T[:SINK].max()
        median = rms_T[SINK:].median()
        sums_FR2[2:, row, 0] = torch.stack([sink, median, sink / median])
        sums_FR2[2:, row, 1] = 1
    return sums_FR2


def document(
    prompts: Sequence[str], sums: Sequence[Tensor], inputs: Sequence[Tensor], aux_layers: Sequence[int],
    trained_depth: int | None, depths: int,
) -> Document:  # fmt: skip
    """The measured part of ``drift.json`` from the sums of prompts, of those with a chain; ValueError if none has.

    ``sums`` are those of :func:`drafted`, ``inputs`` of :func:`read_inputs`.
    """
    chains = [int(one[0, 0, 1]) for one in sums]
    kept = [number for number, count in enumerate(chains) if count]
    if not kept:
        raise ValueError(
            f"no answer of the target is long enough for a chain of {how_many(depths, 'token')}: ask for fewer depths "
            "or more new tokens, or give other prompts"
        )
    places = [f"layer {b}" if b else "embeddings" for b in aux_layers]
    places += ["states side by side", "the same, normed", "feature"]
    return {
        "version": VERSION,
        "trained_depth": trained_depth,
        "depths": depths,
        "prompts": [prompts[number] for number in kept],
        "chains": [chains[number] for number in kept],
        "series": _told(SERIES, [sums[number] for number in kept]),
        "inputs": {"places": places, "series": _told(INPUTS, [inputs[number] for number in kept])},
    }


def _told(titles: Mapping[str, tuple[str, str]], sums: Sequence[Tensor]) -> dict[str, Document]:
    """Series by name: of each step or place (a row) every prompt's value and weight, the mean and its interval."""
    found: dict[str, Document] = {}
    for (name, (title, unit)), sums_RP2 in zip(
        titles.items(), torch.stack([*sums], 2).numpy(), strict=True
    ):
        values = [
            [float(total / weight) if weight else None for total, weight in row] for row in sums_RP2
        ]
        told = [measured(sums_P2, bounds=possible(unit)) for sums_P2 in sums_RP2]
        means = {key: [one[key] for one in told] for key in ("mean", "low", "high")}
        weights = sums_RP2[..., 1].astype(int).tolist()
        found[name] = {"title": title, "unit": unit, "values": values, "weights": weights, **means}
    return found


def sums_of(found: Document, name: str) -> Array:
    """The sums over chains of a document's series, and over how many, (K, P, 2)."""
    one = found["series"][name]
    weights_KP = np.array(one["weights"], dtype=np.float64)
    values_KP = np.array(
        [[0.0 if value is None else value for value in row] for row in one["values"]]
    )
    return np.stack([values_KP * weights_KP, weights_KP], axis=-1)


HOW: dict[str, Statistic] = {"mean": ratio, "ratio": over, "difference": less}


class DriftFigure(NamedTuple):
    """A number of one drafter: a mean at some steps, alone or beside that at others."""

    name: str
    title: str
    series: str
    depths: tuple[range, ...]  # steps counted from 0, and those that they are compared with, if any
    unit: str
    how: Literal["mean", "ratio", "difference"] = "mean"
    null: float | None = None  # its value without drift, if known

    def columns(self, sums_KP2: Array) -> Array:
        """Sums and weights at the steps, then at those that they are compared with, (P, 2) or (P, 4)."""
        return np.concatenate([sums_KP2[list(depths)].sum(0) for depths in self.depths], axis=1)


def drift_figures(depths: int, trained_depth: int | None) -> Iterator[DriftFigure]:
    """What is told of a measurement of so many steps."""
    first = range(1)
    last = range(depths - 1, depths)
    both = (last, first)
    at_last = f", step {depths}"
    for name in ("out_rms", "state_rms"):
        title = f"{SERIES[name][0]}{at_last} over step 1"
        yield DriftFigure(f"{name}_growth", title, name, both, "ratio", "ratio", 1.0)
    for name in ("sink_mass", "own_mass"):
        title, unit = SERIES[name]
        yield DriftFigure(f"{name}_last", f"{title}{at_last}", name, (last,), unit)
        title = f"{title}, step 1 to {depths}"
        unit = f"difference of {unit.replace('share', 'shares')}"
        yield DriftFigure(f"{name}_change", title, name, both, unit, "difference", 0.0)
    title, unit = SERIES["sink_own_mass"]
    yield DriftFigure("sink_own_mass_last", f"{title}{at_last}", "sink_own_mass", (last,), unit)
    for when, step in (("first", first), ("last", last)):
        yield DriftFigure(
            f"kl_{when}", f"{SERIES['kl'][0]}, step {step.stop}", "kl", (step,), "nats"
        )
    title = "Conditional acceptance"
    acceptance = "conditional_acceptance"
    unit = "share of chains"
    yield DriftFigure(
        "acceptance", f"{title}, steps 1 to {depths}", acceptance, (range(depths),), unit
    )
    if trained_depth is not None and trained_depth < depths:
        within = range(trained_depth)
        beyond = range(trained_depth, depths)
        yield DriftFigure(
            "acceptance_beyond", f"{title}, beyond the trained depth", acceptance, (beyond,), unit
        )
        yield DriftFigure(
            "acceptance_change", f"{title}, beyond the trained depth less within", acceptance, (beyond, within),
            "difference of shares of chains", "difference",
        )  # fmt: skip


def summary(found: Document) -> dict[str, dict[str, Any]]:
    """Every figure by name with its title, mean and interval."""
    out = {}
    for one in drift_figures(found["depths"], found["trained_depth"]):
        bounds = ANY if one.how == "difference" else possible(one.unit)
        out[one.name] = {"title": one.title} | measured(
            one.columns(sums_of(found, one.series)), HOW[one.how], bounds
        )
    return out
