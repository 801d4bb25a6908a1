"""Checks of the drafter: its gradient, its switches, its rope, training beside decoding, and one sample learnt.

Legend: T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary.
"""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.anchors import AnsweredText
from specdec.diagnostics.doctor_setup import SAMPLE, Finding, SetUp, documents, judged, logits_of, unchecked
from specdec.diagnostics.parity_compare import compare
from specdec.drafter import Drafter, DrafterConfig, Norms, PostNorm, PreNorm
from specdec.nn.layers import rope_parameters
from specdec.nn.optimizers import AdamW
from specdec.nn.view import View
from specdec.training.divergences import LKLambda
from specdec.training.head_loss import TargetProbs
from specdec.training.losses import SoftCrossEntropy, terms
from specdec.training.step import TrainStep, target_outputs
from specdec.training.ttt import reachable, shift

STEP = 1e-5  # of a finite difference, as a share of each parameter's size
EXACT = 1e-4  # by which gradient and finite difference may differ in float64
SEEN = 1e-9  # of the logits' range, in float64: less is no change
CHOICES: dict[str, tuple[Any, ...]] = {"aux": ("none", "each", "concat"), "residual": ("raw", "normed")}  # else a bool
OPPOSITES = {PreNorm: PostNorm(), PostNorm: PreNorm()}
MOVED = 17
# of the sample that is learnt
PROMPT, ANSWER = 32, 64  # tokens
PROMPTS = 4  # the one is taken whose answer tells most
MOST = 4000  # steps
EVERY = 5  # steps between looks
LEARNT = 0.98  # of the drafts right in training: then decoding must show it
TRIES = 4  # decodings of a sample that training has right, before the two are told apart
PATIENCE = 40  # looks without progress: in drafts, or by a hundredth of the loss


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, as a share of the range of the first."""
    return float((one - other).abs().max() / (one.max() - one.min()).clamp_min(1e-30))


def gradient(setup: SetUp) -> Iterator[Finding]:
    """Who has a gradient, what a step of the set-up's optimizer moves, and whether the gradient is the loss's."""
    sample, drafter, module = setup.sample(), copy.deepcopy(setup.drafter).train(), setup.module
    outputs = target_outputs(setup.target, drafter, sample, setup.objective, False)
    out = TrainStep(drafter, setup.objective)(sample, outputs, False)
    if not float(out.rows):
        why = "nothing is supervised there, or the draft vocabulary lacks all of its tokens"
        yield unchecked("one step on a real row", why)
        return
    out.loss.backward()
    named = dict(drafter.named_parameters())
    learns = {"embed_tokens.weight": module.train_embed}
    learns["lm_head.weight"] = module.train_head and drafter.config.head == "own"
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = module.make_optimizer([(name, p) for name, p in named.items() if p.requires_grad])
    optimizer.step()
    faults: dict[str, list[str]] = {}
    for name, p in (
        *named.items(),
        *((f"the target's {name}", p) for name, p in setup.target.model.named_parameters()),
    ):
        learned = name in named and learns.get(name, True)
        alive = p.grad is not None and bool(p.grad.isfinite().all() and p.grad.any())
        if learned and not p.requires_grad:
            fault = "frozen (requires_grad is false)"
        elif learned and not alive:
            fault = "built and not used, or cut off by detach, or no number"
        elif learned and torch.equal(p, before[name]):
            fault = "left where it was: the rate is zero, or lost in the weights' rounding"
        elif not learned and (p.requires_grad or p.grad is not None):
            fault = "trained unasked: freeze it, or set model.train_embed or model.train_head"
        else:
            continue
        faults.setdefault(fault, []).append(name)
    told = [f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: {fault}" for fault, names in faults.items()]
    what = f"of {len(named)} parameters those that a step of {type(optimizer).__name__} trains otherwise than asked"
    yield judged(what, sum(map(len, faults.values())), "<=", 0, "; ".join(told))
    yield _finite_difference(setup)


def _finite_difference(setup: SetUp) -> Finding:
    """In float64, along a random direction; a loss that holds a weight of its own constant is replaced."""
    held = any(isinstance(term.loss, LKLambda) for term in terms(setup.objective.loss))
    objective, sample, drafter = setup.precise_objective, setup.sample(), setup.precise().train()
    if held:
        objective = dataclasses.replace(objective, loss=SoftCrossEntropy())
    outputs = target_outputs(setup.target, drafter, sample, objective, False)

    def probs(final_CH: Tensor) -> TargetProbs:
        return TargetProbs(*(x.double() if x.is_floating_point() else x for x in outputs.probs(final_CH)))

    def loss() -> Tensor:
        return TrainStep(drafter, objective)(sample, outputs._replace(probs=probs), False).loss

    values = [p for p in drafter.parameters() if p.requires_grad]
    what = "the gradient along a random direction is the finite difference, in float64"
    if not values:
        return judged(what, math.nan, "<=", EXACT, "no parameter is trained")
    grads = torch.autograd.grad(loss(), values, materialize_grads=True, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device) for p in values]
    ways = [way * p.detach().square().mean().sqrt().clamp_min(1e-3) for way, p in zip(ways, values, strict=True)]
    slope = float(sum((g * way).sum() for g, way in zip(grads, ways, strict=True)))
    with torch.no_grad():
        at = []
        for step in (STEP, -2 * STEP):
            for p, way in zip(values, ways, strict=True):
                p.add_(way, alpha=step)
            at.append(float(loss()))
        measured = (at[0] - at[1]) / (2 * STEP)
    off = abs(measured - slope) / max(abs(measured), abs(slope), 1e-12)
    fault = f"autograd says {slope:.6g}, the loss {measured:.6g}: a backward pass is wrong, or a part is detached"
    return judged(what, off, "<=", EXACT, fault, "of SoftCrossEntropy, since LKLambda holds its weight" if held else "")


def flips(config: DrafterConfig) -> Iterator[tuple[str, Any, DrafterConfig]]:
    """Every other legal value of every norm and of the recurrence: the switch, the value, and the config with it."""
    for one in dataclasses.fields(Norms):
        for value in CHOICES.get(one.name, (False, True)):
            if value != getattr(config.norms, one.name):
                norms = dataclasses.replace(config.norms, **{one.name: value})
                with contextlib.suppress(ValueError):  # this design does not have it
                    yield f"norms.{one.name}", value, dataclasses.replace(config, norms=norms)
    if (opposite := OPPOSITES.get(type(config.recurrence))) is not None:
        with contextlib.suppress(ValueError):
            yield "recurrence", type(opposite).__name__, dataclasses.replace(config, recurrence=opposite)


def rebuilt(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """A drafter of this config with all of another's weights that it has a place for; norms beside them are ones."""
    weights, head = drafter.state_dict(), drafter.lm_head.weight
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten
        out = Drafter(config, drafter.vocab.target_ids_D.cpu())
    out.to(device=head.device, dtype=head.dtype)
    kept = {name: weights[name] for name in out.state_dict() if name in weights}
    missing = out.load_state_dict(kept, strict=False).missing_keys
    assert all("norm" in name for name in missing), missing
    return out.eval().requires_grad_(False)


@torch.no_grad()
def switches(setup: SetUp) -> Iterator[Finding]:
    """Every switch of the design changes what the drafter says, and every input is read."""
    drafter, ids_1T, K = setup.lively(), setup.sample().ids_BT, 3
    aux_1TNH = setup.aux(ids_1T)
    own_KTD = logits_of(drafter, ids_1T, aux_1TNH, K)
    for switch, value, config in flips(drafter.config):
        turned_KTD = logits_of(rebuilt(drafter, config), ids_1T, aux_1TNH, K)
        share = float((own_KTD.argmax(-1) != turned_KTD.argmax(-1)).double().mean())
        what = f"{switch}, turned to {value}, changes the logits"
        dead = f"{switch} is DEAD: the part is built and never applied; an ablation would compare a design with itself"
        yield judged(what, _difference(own_KTD, turned_KTD), ">", SEEN, dead, f"{share:.0%} of the drafts")

    def read(what: str, one: Tensor, other: Tensor, cause: str) -> Finding:
        return judged(f"{what}, changed, changes the logits", _difference(one, other), ">", SEEN, f"not read: {cause}")

    other_KTD = logits_of(drafter, (ids_1T + 1) % drafter.config.vocab_size, aux_1TNH, K)
    yield read("the tokens", own_KTD, other_KTD, "the embedding does not reach the first layer")
    generator = torch.Generator().manual_seed(1)
    for n, b in enumerate(drafter.config.aux_layers):
        moved = aux_1TNH.clone()
        noise = torch.randn(moved[:, :, n].shape, generator=generator, dtype=torch.float64).to(moved.device)
        moved[:, :, n] += noise * moved[:, :, n].std()
        other_KTD = logits_of(drafter, ids_1T, moved, K)
        yield read(f"the target's state at boundary {b}", own_KTD, other_KTD, "the fusion leaves it out")
    view = View.packed(torch.zeros_like(ids_1T[:, 2:]))
    handed_1TH = drafter.step(ids_1T[:, 1:-1], drafter.fuse(aux_1TNH[:, :-2]), view).h_BTH
    one, other = (
        drafter.logits(drafter.step(ids_1T[:, 2:], h, view).normed_BTH) for h in (handed_1TH, handed_1TH.roll(1, 1))
    )
    yield read("what a step hands on to the next", one, other, "the recurrence hands on zeros or a constant")


@torch.no_grad()
def rope(setup: SetUp) -> Iterator[Finding]:
    """The drafter turns its queries and keys as its target does, and at the positions that decoding uses."""
    config, hf, K = setup.drafter.config, setup.target.config, max(2, setup.objective.steps)
    ours = dict(config.rope) | {"max_position_embeddings": config.max_position_embeddings}
    theirs = rope_parameters(hf) | {"max_position_embeddings": hf.max_position_embeddings}
    if config.hidden_size == setup.target.hidden_size:
        heads = hf.num_attention_heads or config.num_attention_heads
        ours["head_dim"] = config.head_dim
        theirs["head_dim"] = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    keys = sorted({*ours, *theirs})
    other = [f"{key} {ours.get(key)} for {theirs.get(key)}" for key in keys if ours.get(key) != theirs.get(key)]
    fault = f"{'; '.join(other)}: copy the target's whole rope block; a drafter trained otherwise must stay as it is"
    yield judged(f"{len(keys)} rope parameters of the drafter are the target's", len(other), "<=", 0, fault)
    drafter, ids_1T = setup.lively(), setup.sample().ids_BT
    aux_1TNH = setup.aux(ids_1T)
    own_KTD, rotary = logits_of(drafter, ids_1T, aux_1TNH, K), drafter.layers.rope
    tables = rotary.tables

    def at(change: Callable[[Tensor], Tensor]) -> float:
        """How far the logits move where queries and keys turn at other positions and see what they saw."""
        rotary.tables = lambda at_BT: tables(change(at_BT))  # type: ignore[assignment,method-assign]
        return _difference(own_KTD, logits_of(drafter, ids_1T, aux_1TNH, K))

    reverse = at(lambda at_BT: at_BT.flip(1))
    fault = "the order of tokens is not seen: queries and keys are not rotated"
    yield judged("positions in reverse change the logits", reverse, ">", SEEN, fault)
    what, moved = f"all positions moved by {MOVED} leave the logits as they are", at(lambda at_BT: at_BT + MOVED)
    yield judged(what, moved, "<=", 0.01 * reverse, "positions enter absolutely: queries and keys turn differently")


@torch.no_grad()
def agreement(setup: SetUp) -> Iterator[Finding]:
    """Unrolled training and cached decoding give the same distributions: ``specdec parity`` at a few places."""
    depth, texts = max(2, setup.objective.steps) - 1, list[AnsweredText]()
    for document in documents(setup.batch):
        ids = document.ids_T[:64].tolist()
        begin = int(document.loss_mask_T[:64].long().argmax()) or len(ids) // 2
        if len(ids) >= begin + depth + 4 and len(texts) < 2:
            texts.append(AnsweredText(str(len(texts)), ids, begin))
    what = f"training's logits are cached decoding's at depths 0 to {depth}, of {len(texts)} real texts"
    if not texts:
        yield unchecked(what, f"no document goes on for {depth + 4} tokens behind its first supervised one")
        return
    drafter = setup.decoding() if setup.begun else setup.lively().to(setup.target.embedding_weight())
    worst = max(compare(setup.target, drafter, texts, depth).rows, key=lambda row: row.share)
    fault = f"{worst.verdict}, at depth {worst.depth} ({worst.place}): what is trained is not what is decoded"
    yield judged(what, worst.share, "<=", worst.allowed, fault)


class Sample(NamedTuple):
    """A prompt and the target's greedy answer to it."""

    prompt: list[int]
    answer: list[int]
    known: list[bool]  # of the answer's tokens, whether the draft vocabulary has them
    tells: int  # tokens that are known and not the one before: what repeats itself is right by chance


def overfit(setup: SetUp) -> Iterator[Finding]:
    """One sample, trained on until decoding accepts every draft of it; the last check, since it trains the drafter.

    The text is a real prompt with the target's own greedy answer, so that the drafts that would be accepted are known.
    """
    sample, K = _chosen(setup), setup.objective.steps
    what = f"share accepted of one sample's drafts ({len(sample.prompt)} + {ANSWER} tokens, a chain of {K})"
    if sample.tells < ANSWER / 8:
        why = "the target's answers are one token over and over, or of tokens that the draft vocabulary lacks"
        yield unchecked(what, f"{why}: such drafts are accepted, or refused, whatever is wrong", sample.tells)
        return
    accepted, refused, stalled = _learn(setup, sample)
    first, last, share = setup.curve[0], setup.curve[-1], accepted / max(accepted + refused, 1)
    told = f"loss from {first['loss']:.3g} to {last['loss']:.3g} in {last['step']} steps and {last['seconds']:.0f} s"
    counted = f"{accepted} accepted, {refused} refused; right in training {last['right']:.1%}; {told}"
    fault = ""
    if (last["right"] >= LEARNT and share < LEARNT) or share < last["right"] / 2 > 0.25:
        fault = "what training has right, decoding has not: see labels and parity"
    elif stalled:
        fault = "learning stopped by itself before the sample was learnt: a part is missing, or cut off from learning"
    if refused and not fault:
        yield unchecked(what, f"the time was over ({setup.seconds:g} s): {counted}; give --seconds more", share)
        return
    yield judged(what, share, ">=", 1, f"{counted}. {fault}", counted)


def _chosen(setup: SetUp) -> Sample:
    """Of a few real prompts the one whose answer tells most; a prompt ends where its document's supervision begins."""
    target, vocab, length = setup.target, setup.drafter.vocab, ANSWER + setup.objective.steps + 2
    room = min(2 * SAMPLE, target.config.max_position_embeddings - length)
    found = []
    for document in islice(documents(setup.batch), PROMPTS):
        begin = int(document.loss_mask_T.long().argmax()) or PROMPT
        prompt = document.ids_T[:begin][-room:].tolist()
        answer = PlainDecoder(target).generate(prompt, length).ids
        known = (vocab.to_draft(torch.tensor(answer, device=target.device)) >= 0).tolist()
        changed = (one != other for one, other in pairwise(answer[:ANSWER]))
        tells = sum(there and new for there, new in zip(known[1:], changed, strict=False))
        found.append(Sample(prompt, answer, known, tells))
    return max(found, key=lambda one: one.tells)


@torch.no_grad()
def _decode(setup: SetUp, sample: Sample) -> tuple[int, int]:
    """Decode with a chain as deep as the unroll: drafts accepted, and refused though the drafter knows the token."""
    K = setup.objective.steps
    made = SpeculativeDecoder(setup.target, setup.decoding(), Chain(K)).generate(sample.prompt, ANSWER)
    refused = 0
    for place, count in zip(made.context, made.accepted, strict=True):
        at = place - len(sample.prompt) + count
        refused += count < K and at < len(sample.known) and sample.known[at]
    return sum(made.accepted), refused


def _learn(setup: SetUp, sample: Sample) -> tuple[int, int, bool]:
    """Train until decoding accepts everything, nothing is learnt any more or the time is over.

    The step, loss and precision are the set-up's, without noise or clipping; AdamW's rate is one for a single sample.

    Returns:
        Drafts accepted and refused in the last decoding, and whether learning stopped by itself before.
    """
    given, drafter, begun = setup.trainer, setup.drafter.train(), time.monotonic()
    ids_1T = torch.tensor([[*sample.prompt, *sample.answer]], device=setup.target.device)
    batch = Batch(ids_1T, torch.arange(ids_1T.shape[1], device=ids_1T.device)[None] >= len(sample.prompt), 0 * ids_1T)
    known_1T = torch.tensor([[False] * len(sample.prompt) + sample.known], device=ids_1T.device)
    reached = [reachable(batch.loss_mask_BT, batch.documents_BT, k) for k in range(setup.objective.steps)]
    can = max(sum(int((reached_1T & shift(known_1T, 2 + k)).sum()) for k, reached_1T in enumerate(reached)), 1)
    outputs = target_outputs(setup.target, drafter, batch, setup.objective)
    rate = min(1e-2, max(2e-4, 0.5 / drafter.config.hidden_size))
    trainable = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    fabric = Fabric(accelerator=given.accelerator, devices=1, precision=given.precision)
    train_step, optimizer = fabric.setup(TrainStep(drafter, setup.objective), AdamW(trainable, lr=rate))
    most_right, least_loss, idle, tries, stalled, done = 0.0, math.inf, 0, 0, False, (0, 1)
    for number in range(MOST):
        seconds = time.monotonic() - begun
        late = seconds >= setup.seconds
        look = number % EVERY == 0 or late
        out = train_step(batch, outputs, look)
        if look:
            right, loss = float(out.counts.hits_K.sum()) / can, float(out.loss.detach())
            setup.curve.append({"step": number, "seconds": seconds, "loss": loss, "right": right})
            idle = 0 if right > most_right or loss < 0.99 * least_loss else idle + 1
            most_right, least_loss = max(most_right, right), min(least_loss, loss)
            if right >= LEARNT or late or idle >= PATIENCE:
                done = _decode(setup, sample)
                tries += right >= LEARNT
                stalled = idle >= PATIENCE and not late
                if late or stalled or not done[1] or tries >= TRIES:
                    break
        optimizer.zero_grad()
        fabric.backward(out.loss)
        optimizer.step()
    return *done, stalled
