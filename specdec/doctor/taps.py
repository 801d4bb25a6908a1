"""The target's states that training gets are those of the stated boundaries.

Hugging Face's own ``hidden_states`` are the reference: boundary b is ``hidden_states[b]``, and the last one is normed
there. A state that fits another boundary as well proves nothing, so the nearest other one is told beside.

Legend: T tokens, N aux layers, H hidden, L target layers.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.doctor.finding import Finding, faulty, judged, unchecked
from specdec.doctor.subject import Document, Subject
from specdec.features.cached import CachedSource
from specdec.features.contract import DTYPES
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.proof import TOLERANCE
from specdec.training.objective import teach

DOCUMENTS, LENGTH = 8, 512  # compared, and of how many tokens each
ENOUGH = 64  # places at which a trained drafter's drafts say something

NAME = "taps"


class Own(NamedTuple):
    """What Hugging Face's forward says of a document."""

    states: Sequence[Tensor]  # (T, H) of boundaries 0 to L, the last one normed
    logits_TV: Tensor


@torch.no_grad()
def taps(subject: Subject) -> Iterator[Finding]:
    """Boundaries, the last state and its logits, as training has them; the target has proven itself before."""
    target, drafter = subject.target, subject.drafter
    try:
        teacher = teach(target, drafter, subject.batch, subject.recipe, False, subject.source)
    except ValueError as error:
        yield faulty(NAME, "the features of a real batch", str(error))
        return
    found = list(islice(subject.documents(), DOCUMENTS))
    owns = [own(target, document) for document in found]
    allowed = TOLERANCE[target.dtype]
    if isinstance(subject.source, CachedSource):
        allowed = max(allowed, TOLERANCE[DTYPES[subject.source.store.contract.dtype]])
    config, L = drafter.config, target.num_layers
    for n, b in enumerate(config.aux_layers):
        normed = b < L or config.aux_final_norm  # whether it is compared as it came
        ours = [_of(teacher.aux_BTNH[:, :, n], document, target) for document in found]
        yield _boundary(target, b, [x if normed else target.final_norm(x) for x in ours], owns, allowed)
    finals = [_of(teacher.final_BTH, document, target) for document in found]
    yield _last(target, finals, owns, allowed)
    yield _logits(target, finals, owns, allowed)
    if subject.begun:
        yield _trained(subject, found)


def proven(target: Target) -> Finding:
    """The target's own proof, on its own short text."""
    what = "taps, head, packing and tree verification on a short text are the model's own"
    try:
        target.prove()
    except ValueError as error:
        return faulty(NAME, what, str(error))
    return judged(NAME, what, 0, "at most", 0, "")


def own(target: Target, document: Document) -> Own:
    """Hugging Face's forward of one document alone."""
    out = target.model(input_ids=document.ids_T[None, :LENGTH], output_hidden_states=True, use_cache=False)
    return Own([state[0] for state in out.hidden_states], out.logits[0])


def gap(ours_TH: Tensor, own_TH: Tensor) -> float:
    """Mean over tokens of the difference, as a share of the size."""
    ours, theirs = ours_TH.double(), own_TH.double()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)).mean())


def _of(x_BTH: Tensor, document: Document, target: Target) -> Tensor:
    first = document.first
    return x_BTH[document.row, first : first + min(len(document.ids_T), LENGTH)].to(target.dtype)


def _boundary(target: Target, b: int, ours: list[Tensor], owns: list[Own], allowed: float) -> Finding:
    gaps_CL = torch.tensor([[gap(x, state) for state in one.states] for x, one in zip(ours, owns, strict=True)])
    worst = float(gaps_CL[:, b].max())
    others_L = gaps_CL.amax(0)
    others_L[b] = float("inf")
    nearest = int(others_L.argmin())
    tokens = sum(len(x) for x in ours)
    what = f"boundary {b}: training's state is hidden_states[{b}] ({len(ours)} documents, {tokens} tokens)"
    beside = f"the nearest other is boundary {nearest}, {float(others_L[nearest]):.2g} off"
    if float(others_L[nearest]) < worst / 2:
        by = f"{nearest - b:+d}"
        return faulty(
            NAME, what,
            f"it is nearer to boundary {nearest} ({float(others_L[nearest]):.2g} off) than to {b} ({worst:.2g} off): "
            f"the layer number is off by {by} where the states are taken or stored; boundary b is the stream after b "
            "layers, Hugging Face's hidden_states[b]",
        )._replace(figure=worst, rule="at most", bound=allowed)  # fmt: skip
    return judged(NAME, what, worst, "at most", allowed, _cause(b, ours, owns, worst), beside)


def _cause(b: int, ours: list[Tensor], owns: list[Own], worst: float) -> str:
    """What else the states may be: another document's, or the neighbouring token's."""
    for by in (-1, 1):
        near = max(gap(x[1:-1], one.states[b].roll(-by, 0)[1:-1]) for x, one in zip(ours, owns, strict=True))
        if near < worst / 4:
            return (
                f"they are the states of the token {'behind' if by > 0 else 'before'}: the rows are shifted by {by:+d}"
            )
    worst_at = max(range(len(ours)), key=lambda i: gap(ours[i], owns[i].states[b]))
    for i, one in enumerate(owns):
        T = min(len(one.logits_TV), len(ours[worst_at]))
        if i != worst_at and T > 1 and gap(ours[worst_at][:T], one.states[b][:T]) < worst / 4:
            return (
                f"the states of document {worst_at + 1} are those of document {i + 1}: features and tokens are paired "
                "wrongly; make the features again, with the data and the order that the run has"
            )
    return (
        "they are no boundary's of these tokens: another target, other weights, other tokens or a norm between; make "
        "cached features again with this target and these data"
    )


def _last(target: Target, finals: list[Tensor], owns: list[Own], allowed: float) -> Finding:
    worst = max(gap(x, one.states[-1]) for x, one in zip(finals, owns, strict=True))
    fault = "the state that the target's law is taken from is not its last one after the final norm"
    if max(gap(target.final_norm(x), one.states[-1]) for x, one in zip(finals, owns, strict=True)) <= allowed:
        fault = (
            "the final norm is missing: normed once more it is the target's own. Store or return the last state after "
            "the final norm, which Target.logits expects"
        )
    return judged(NAME, "the last state that training gets is normed once", worst, "at most", allowed, fault)


def _logits(target: Target, finals: list[Tensor], owns: list[Own], allowed: float) -> Finding:
    worst = max(gap(target.logits(x[None])[0], one.logits_TV) for x, one in zip(finals, owns, strict=True))
    what = "the target's head on that state gives the target's own logits"
    return judged(
        NAME, what, worst, "at most", allowed,
        "the law that the drafter learns is not the target's: see the last state above; if that is sound, the head "
        "(its scale, cap or bias) is applied otherwise than the model does",
    )  # fmt: skip


def _trained(subject: Subject, found: list[Document]) -> Finding:
    """A trained drafter agrees best with the states that it was trained on."""
    what = "the saved drafter drafts best from its stated boundaries, not from those one higher or lower (nats)"
    target, config = subject.target, subject.drafter.config
    drafter, scores = subject.precise(), dict[int, Tensor]()
    for by in (-1, 0, 1):
        layers = tuple(b + by for b in config.aux_layers)
        if layers[0] < 0 or layers[-1] > target.num_layers:
            continue
        final_norm, found_by = config.aux_final_norm and by == 0, []
        for document in found:
            ids_1T = document.ids_T[None, :LENGTH]
            out = target.forward(ids_1T, View.packed(torch.zeros_like(ids_1T)), layers, final_norm)
            view = View.packed(torch.zeros_like(ids_1T[:, 1:]))
            step = drafter.step(ids_1T[:, 1:], drafter.fuse(out.aux_BTNH[:, :-1].double()), view)
            wanted_T = drafter.vocab.to_draft(target.logits(out.final_BTH[:, 1:])[0].argmax(-1))
            log_q_TD = drafter.logits(step.normed_BTH[0]).log_softmax(-1)
            found_by.append(log_q_TD[wanted_T >= 0, wanted_T[wanted_T >= 0]])
        scores[by] = torch.cat(found_by)
    own_N = scores.pop(0)
    own_mean, chance = float(own_N.mean()), -math.log(config.draft_vocab_size)
    if len(own_N) < ENOUGH or not scores or max(own_mean, *(float(x.mean()) for x in scores.values())) < chance + 1:
        return unchecked(
            NAME, what, "it knows too little of these rows, or there is no other boundary to tell", own_mean
        )
    best = max(scores, key=lambda by: float(scores[by].mean()))
    lead_N, other = own_N - scores[best], float(scores[best].mean())
    error = 2 * float(lead_N.std()) / len(lead_N) ** 0.5
    if abs(float(lead_N.mean())) <= error:
        why = f"boundaries {best:+d} give {other:.4g} nats: for this drafter the states are too alike to tell"
        return unchecked(NAME, what, why, own_mean)
    return judged(
        NAME, what, own_mean, "above", other,
        f"from boundaries {best:+d} it gives the target's tokens {other:.4g} nats, from its own {own_mean:.4g}: it was "
        f"trained on {[b + best for b in config.aux_layers]}; its checkpoint counts layers otherwise, import it again "
        "with --aux_layers",
        f"those {best:+d}: {other:.4g}",
    )  # fmt: skip
