"""The drafter turns its queries and keys as its target does, and at the positions that decoding uses.

Legend: T tokens, K unroll steps.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from specdec.doctor.finding import Finding, judged, unchecked
from specdec.doctor.subject import Subject, difference, logits_of, unrolled
from specdec.drafter import Drafter
from specdec.nn.rope import rope_parameters
from specdec.parity.ours import cached
from specdec.parity.texts import Text
from specdec.target import Target

NAME = "rope"
ALIVE = 1e-9  # of the logits' range, in float64
EQUAL = 1e-2  # of what the reverse changes; angles are float32
FREQUENCY = {torch.float16: 1e-2, torch.bfloat16: 1e-2}  # in 16 bits a model may round its frequencies
BY = 17
FROZEN = ("longrope", "dynamic")  # by length, in the drafter at its longest


@torch.no_grad()
def rope(subject: Subject) -> Iterator[Finding]:
    """Parameters, frequencies, behaviour, positions."""
    yield _parameters(subject)
    yield _frequencies(subject.drafter, subject.target)
    drafter, ids_1T = subject.lively(), subject.sample().ids_BT
    aux_1TNH = subject.aux(ids_1T, torch.float64)
    own_KTD = logits_of(drafter, ids_1T, aux_1TNH, subject.depths)
    moved = []
    for change in (lambda at_BT: at_BT.flip(1), lambda at_BT: at_BT + BY):
        with _positions(drafter, change):
            moved.append(difference(own_KTD, logits_of(drafter, ids_1T, aux_1TNH, subject.depths)))
    yield judged(
        NAME, "positions in reverse change the logits", moved[0], "above", ALIVE,
        "the order of tokens is not seen: queries and keys are not rotated",
    )  # fmt: skip
    yield judged(
        NAME, f"all positions moved by {BY} leave the logits as they are", moved[1], "at most", EQUAL * moved[0],
        "positions enter absolutely: queries and keys are turned differently, or something else reads them",
    )  # fmt: skip
    yield _steps(subject, drafter, ids_1T, aux_1TNH)


def _parameters(subject: Subject) -> Finding:
    config, hf = subject.drafter.config, subject.target.config
    ours = dict(config.rope) | {"max_position_embeddings": config.max_position_embeddings}
    theirs = rope_parameters(hf) | {"max_position_embeddings": hf.max_position_embeddings}
    heads = config.num_attention_heads
    if config.hidden_size == subject.target.hidden_size:
        ours["head_dim"] = config.head_dim
        theirs["head_dim"] = getattr(hf, "head_dim", None) or hf.hidden_size // (hf.num_attention_heads or heads)
    keys = sorted({*ours, *theirs})
    other = [
        f"{key} {ours.get(key)}, the target's {theirs.get(key)}" for key in keys if ours.get(key) != theirs.get(key)
    ]
    what = f"{len(keys)} rope parameters of the drafter are the target's"
    fault = (
        f"{'; '.join(other)}: engines take the drafter's own, and a drafter that was trained with others accepts less "
        "the longer the text; copy the target's whole rope block, scaling and partial factor too"
    )
    if other and subject.begun:
        fault += ". If this checkpoint was trained so, it must stay so: its drafts, in specdec evaluate, say it"
    return judged(NAME, what, len(other), "at most", 0, fault)


def _frequencies(drafter: Drafter, target: Target) -> Finding:
    what = "rotary frequencies are those of the target's own module"
    kind = str(drafter.config.rope["rope_type"])
    if kind in FROZEN:
        return unchecked(
            NAME, what, f"rope_type {kind} depends on the length; the drafter keeps that of the longest text"
        )
    theirs = _own(target)
    if theirs is None:
        return unchecked(NAME, what, f"{type(target.model).__name__} keeps no inv_freq to compare with")
    ours = drafter.layers.rope.inverse.to(theirs.device)
    if ours.shape != theirs.shape:
        figure = float("inf")
    else:
        figure = float(((ours - theirs).abs() / theirs.abs().clamp_min(1e-30)).max())
    return judged(
        NAME, what, figure, "at most", FREQUENCY.get(target.dtype, 1e-5),
        "theta, scaling, partial factor or head size differ in effect from the target's: every distance in the text is "
        "seen as another one than the target's states were made for",
    )  # fmt: skip


def _own(target: Target) -> Tensor | None:
    """The frequencies that the target itself uses, of full attention where it has several."""
    for module in target.model.get_decoder().modules():
        for name in ("full_attention_inv_freq", "inv_freq"):
            found = getattr(module, name, None)
            if isinstance(found, Tensor):
                return found.float()
    return None


@contextlib.contextmanager
def _positions(drafter: Drafter, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, queries and keys are turned at other positions; what is seen stays as it is."""
    rotary: nn.Module = drafter.layers.rope
    tables = rotary.tables
    rotary.tables = lambda at_BT: tables(change(at_BT))  # type: ignore[assignment,operator]
    try:
        yield
    finally:
        del rotary.tables


def _steps(subject: Subject, drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor) -> Finding:
    """Step k of slot t stands at t + k, in the unroll and in a cached chain."""
    K, T = subject.depths, ids_1T.shape[1]
    what = f"draft step k of slot t stands at position t + k, in training and in cached decoding (K = {K})"
    anchor = T // 2
    if T < 2 * K + 4:
        return unchecked(NAME, what, f"the sample has {T} tokens, too few")
    seen: list[Tensor] = []

    def note(at_BT: Tensor) -> Tensor:
        seen.append(at_BT[0].cpu())
        return at_BT

    with _positions(drafter, note):
        unrolled(drafter, ids_1T, aux_1TNH, K)
    order_T = torch.arange(T)
    wrong = sum(int((at_T != order_T + k).sum()) for k, at_T in enumerate(seen))
    wrong += abs(len(seen) - K) * T
    trained, seen[:] = [int(at_T[anchor]) for at_T in seen], []
    decoding = subject.decoding()
    with _positions(decoding, note):
        cached(subject.target, decoding, Text(ids_1T[0].tolist(), anchor + 1), [anchor], K - 1)
    decoded = [int(at_T[-1]) for at_T in seen[-K:]]
    wrong += sum(one != other for one, other in zip(trained, decoded, strict=True))
    return judged(
        NAME, what, wrong, "at most", 0,
        f"slot {anchor} stood at {trained} in training and at {decoded} in decoding: positions are advanced twice, or "
        "not at all, on one of the two sides",
    )  # fmt: skip
