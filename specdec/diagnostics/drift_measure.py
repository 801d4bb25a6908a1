"""What a drafter attends to, how its recurrent state changes and how often it is right, draft step by draft step.

Step k yields draft k. It reads the token before (the anchor's for k = 1) and the state of step k - 1 (the fused feature
for k = 1), and yields the state that step k + 1 reads. Row i of the drafter holds the feature of position i and the
token of position i + 1.

Legend: A chains, L layers, K draft steps, h query heads, g key heads, r = h / g, T nodes, S key slots, R regions,
H hidden, D draft vocabulary, V vocabulary, F series.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.diagnostics.anchors import AnchoredText, Chains
from specdec.drafter import Drafter
from specdec.evaluation.statistics import Array, Statistic, measured, possible, ratio
from specdec.nn.cache import StaticCache
from specdec.nn.layers import Attention
from specdec.nn.view import View, Visibility
from specdec.utils.text import how_many

ATTENTION = {  # titles and units; means over heads, then layers
    "sink_mass": ("Attention on the sink", "share of weight"),
    "prompt_mass": ("Attention on the prompt", "share of weight"),
    "recent_mass": ("Attention on recent committed tokens", "share of weight"),
    "own_mass": ("Attention on own drafts", "share of weight"),
    "rest_mass": ("Attention on the rest of the answer", "share of weight"),
    "entropy": ("Attention entropy", "nats"),
}
SERIES = ATTENTION | {
    "state_rms": ("RMS of the recurrent state", "RMS"),
    "out_rms": ("RMS of the state before the output norm", "RMS"),
    "cosine": ("Cosine of the states of steps k and k - 1", "cosine"),
    "feature_cosine": ("Cosine with the target's own feature", "cosine"),
    "kl": ("KL(target || drafter)", "nats"),
    "joint_acceptance": ("Joint acceptance", "share of chains"),
    "conditional_acceptance": ("Conditional acceptance", "share of chains"),
}

Document = dict[str, Any]  # the measured part of ``drift.json``
SINK = 1  # first positions of a text that count as the sink
RECENT = 16  # committed tokens before a chain that count as recent


@torch.inference_mode()
def drafted(one: AnchoredText, anchors: list[int], prompt: int, end: int) -> tuple[Chains, Tensor]:
    """Draft from anchors of a text, verify what was drafted, and add up. Nothing is drawn at random.

    Args:
        prompt: tokens of the prompt.
        end: chains from there on do not count.

    Returns:
        The chains; and (F, K, 2) float64: of every one of :data:`SERIES`, at every step, the sum over chains and how
        many chains count.
    """
    drafter, anchor_A = one.drafter, torch.tensor(anchors, device=one.ids_1T.device)
    attention: list[Tensor] = []  # (A, 6) of each step
    outs: list[Tensor] = []  # (A, H), the state before the output norm
    with observing(drafter) as seen:

        def look(level: int) -> None:
            weights = [seen.weights_BhTS[layer][0].transpose(0, 1) for layer in sorted(seen.weights_BhTS)]
            regions_ARS = _regions(one.rows, prompt, anchor_A, weights[0].shape[-1])
            attention.append(torch.stack([_masses(each_AhS, regions_ARS) for each_AhS in weights]).double().mean(0))
            assert seen.out_BTH is not None
            outs.append(seen.out_BTH[0])

        chains = one.draft(anchors, on_step=look)
    counted_A = (anchor_A < end).double()
    accepted_A, by_step = counted_A, []
    for k, output in enumerate(one.verify(anchors, chains.tokens_AK)):
        logits_AV = one.target.logits(output.final_BTH)[0]
        before_AH, state_AH = chains.features_AJH[:, k].double(), chains.features_AJH[:, k + 1].double()
        reached_A, accepted_A = accepted_A, accepted_A * (logits_AV.argmax(-1) == chains.tokens_AK[:, k])
        found = dict(zip(ATTENTION, attention[k].unbind(1), strict=True)) | {
            "state_rms": state_AH.square().mean(-1).sqrt(),
            "out_rms": outs[k].double().square().mean(-1).sqrt(),
            "cosine": F.cosine_similarity(state_AH, before_AH, dim=-1),
            "feature_cosine": F.cosine_similarity(state_AH, drafter.fuse(output.aux_BTNH)[0].double(), dim=-1),
            "kl": _kl(logits_AV[:, drafter.vocab.target_ids_D], chains.log_probs_AKD[:, k]),
            "joint_acceptance": accepted_A,
            "conditional_acceptance": accepted_A,
        }
        weights_F = [reached_A if name == "conditional_acceptance" else counted_A for name in SERIES]
        pairs = zip((found[name] for name in SERIES), weights_F, strict=True)
        by_step.append(torch.stack([torch.stack([(x_A * w_A).sum(), w_A.sum()]) for x_A, w_A in pairs]))
    return chains, torch.stack(by_step, 1)


def _regions(text: int, prompt: int, anchor_A: Tensor, slots: int) -> Tensor:
    """Which key slots are what to each chain, (A, 5, S) bool, in the order of :data:`ATTENTION` but for the entropy.

    They are disjoint and cover all that a chain sees. The first ``text`` slots are the text's rows; behind them stand
    the chains', level by level. A chain's level 0 is the row of its anchor, which is committed.
    """
    chains, device = len(anchor_A), anchor_A.device
    slot_S, anchor_A1 = torch.arange(slots, device=device), anchor_A[:, None]
    own_S = slot_S >= text + chains
    position_AS = torch.where(slot_S < text, slot_S, anchor_A1 - 1)
    sink_AS = ~own_S & (position_AS < SINK)
    recent_AS = ~own_S & ~sink_AS & (position_AS >= anchor_A1 - RECENT)
    prompt_AS = ~own_S & ~sink_AS & ~recent_AS & (position_AS < prompt)
    rest_AS = ~own_S & ~sink_AS & ~recent_AS & ~prompt_AS
    return torch.stack([sink_AS, prompt_AS, recent_AS, own_S.expand_as(sink_AS), rest_AS], 1)


def _masses(weights_AhS: Tensor, regions_ARS: Tensor) -> Tensor:
    """What one layer attends to, (A, 6) in the order of :data:`ATTENTION`: means over heads."""
    mass_AR = torch.einsum("ahs,ars->ar", weights_AhS, regions_ARS.to(weights_AhS)) / weights_AhS.shape[1]
    return torch.cat([mass_AR, torch.special.entr(weights_AhS).sum(-1).mean(1, keepdim=True)], 1)


def _kl(logits_AD: Tensor, log_q_AD: Tensor) -> Tensor:
    """KL(target || drafter) over the draft vocabulary, to which the target's probabilities are renormalised."""
    log_p_AD = logits_AD.double().log_softmax(-1)
    p_AD = log_p_AD.exp()
    return torch.where(p_AD > 0, p_AD * (log_p_AD - log_q_AD.double()), 0).sum(-1)


@dataclass
class Observed:
    """What the drafter's last forward did inside, and the cache that it did it on.

    It attends as that cache does, and works out the weights from the same queries, keys and mask.
    """

    cache: StaticCache = field(init=False)
    weights_BhTS: dict[int, Tensor] = field(default_factory=dict)  # by layer, float32 at least; 0 for a hidden key
    out_BTH: Tensor | None = None  # what the last layer gave, before the output norm

    def attend(
        self, layer: int, q_BhTd: Tensor, k: Tensor, v: Tensor, visibility: Visibility, slots: Tensor | None
    ) -> Tensor:
        """See :class:`specdec.nn.cache.KVCache`."""
        out = self.cache.attend(layer, q_BhTd, k, v, visibility, slots)  # also writes the keys
        keys_BgSd = self.cache.keys_BgSd[layer].narrow(2, 0, visibility.columns)
        q_BgrTd = q_BhTd.unflatten(1, (keys_BgSd.shape[1], -1)) * q_BhTd.shape[-1] ** -0.5
        hidden_B11TS = ~visibility.mask_B1TS[:, :, None]
        scores = (q_BgrTd @ keys_BgSd[:, :, None].mT).masked_fill(hidden_B11TS, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        self.weights_BhTS[layer] = weights.flatten(1, 2)
        return out


@contextlib.contextmanager
def observing(drafter: Drafter) -> Iterator[Observed]:
    """Inside, forwards of the drafter on a static cache leave their traces in what is yielded.

    A drafter's attention never forms its weights as such: hooks hand every attention a cache that also does so.
    The drafter gives what it gives unobserved, to the last bit.
    """
    observed = Observed()

    def attention(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTH, view, *rest = args
        assert isinstance(view, View) and isinstance(view.cache, StaticCache)
        observed.cache = view.cache
        return (x_BTH, view._replace(cache=observed), *rest)

    def recurrence(module: nn.Module, args: tuple[Any, ...]) -> None:
        observed.out_BTH = args[0]

    with contextlib.ExitStack() as hooks:
        for module in drafter.modules():
            if isinstance(module, Attention):
                hooks.callback(module.register_forward_pre_hook(attention).remove)
        hooks.callback(drafter.recurrence.register_forward_pre_hook(recurrence).remove)
        yield observed


def document(prompts: Sequence[str], sums: Sequence[Tensor], trained_depth: int | None, depths: int) -> Document:
    """The measured part of ``drift.json`` from the sums of prompts, of those with a chain; ValueError if none has."""
    chains = [int(one[0, 0, 1]) for one in sums]
    kept = [number for number, count in enumerate(chains) if count]
    if not kept:
        raise ValueError(
            f"no answer of the target is long enough for a chain of {how_many(depths, 'token')}: ask for fewer depths "
            "or more new tokens, or give other prompts"
        )
    series: dict[str, Document] = {}
    sums_FKP2 = torch.stack([sums[number] for number in kept], 2).numpy()
    for (name, (title, unit)), sums_KP2 in zip(SERIES.items(), sums_FKP2, strict=True):
        values = [[float(total / weight) if weight else None for total, weight in row] for row in sums_KP2]
        told = [measured(sums_P2, bounds=possible(unit)) for sums_P2 in sums_KP2]
        means = {key: [one[key] for one in told] for key in ("mean", "low", "high")}
        weights = sums_KP2[..., 1].astype(int).tolist()
        series[name] = {"title": title, "unit": unit, "values": values, "weights": weights, **means}
    return {
        "version": 1,
        "trained_depth": trained_depth,
        "depths": depths,
        "prompts": [prompts[number] for number in kept],
        "chains": [chains[number] for number in kept],
        "series": series,
    }


def sums_of(found: Document, name: str) -> Array:
    """The sums over chains of a document's series, and over how many, (K, P, 2)."""
    one = found["series"][name]
    weights_KP = np.array(one["weights"], dtype=np.float64)
    values_KP = np.array([[0.0 if value is None else value for value in row] for row in one["values"]])
    return np.stack([values_KP * weights_KP, weights_KP], axis=-1)


class DriftFigure(NamedTuple):
    """A number of one drafter: a mean at some steps, or what becomes of it at others."""

    name: str
    title: str
    series: str
    depths: tuple[range, ...]  # steps counted from 0, and those that are compared with them, if any
    of: Statistic = ratio

    def columns(self, sums_KP2: Array) -> Array:
        """What :attr:`of` is taken of, (P, C)."""
        return np.concatenate([sums_KP2[list(depths)].sum(0) for depths in self.depths], axis=1)


def drift_figures(depths: int, trained_depth: int | None) -> Iterator[DriftFigure]:
    """What is told of a measurement of so many steps."""

    def over(sums: Array) -> Array:
        return ratio(sums[..., 2:]) / ratio(sums[..., :2])

    def change(sums: Array) -> Array:
        return ratio(sums[..., 2:]) - ratio(sums[..., :2])

    first, last = range(1), range(depths - 1, depths)
    both, at_last, acceptance = (first, last), f", step {depths}", "conditional_acceptance"
    yield DriftFigure("state_rms_growth", f"RMS of the state{at_last} over step 1", "state_rms", both, over)
    yield DriftFigure("sink_mass_last", f"Attention on the sink{at_last}", "sink_mass", (last,))
    yield DriftFigure("sink_mass_change", f"Attention on the sink, step 1 to {depths}", "sink_mass", both, change)
    yield DriftFigure("own_mass_last", f"Attention on own drafts{at_last}", "own_mass", (last,))
    yield DriftFigure("kl_first", "KL(target || drafter) in nats, step 1", "kl", (first,))
    yield DriftFigure("kl_last", f"KL(target || drafter) in nats{at_last}", "kl", (last,))
    yield DriftFigure("acceptance", f"Conditional acceptance, steps 1 to {depths}", acceptance, (range(depths),))
    if trained_depth is not None and trained_depth < depths:
        both, title = (range(trained_depth), range(trained_depth, depths)), "beyond the trained depth less within"
        yield DriftFigure("acceptance_change", f"Conditional acceptance, {title}", acceptance, both, change)


def summary(found: Document) -> dict[str, dict[str, Any]]:
    """Every figure by name with its title, mean and interval."""
    every = drift_figures(found["depths"], found["trained_depth"])
    return {one.name: {"title": one.title} | measured(one.columns(sums_of(found, one.series)), one.of) for one in every}
