"""Checks of the drafter: its gradient, its inputs, training beside decoding, and one sample learnt.

Legend: T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.anchors import AnsweredText
from specdec.diagnostics.doctor_setup import (
    SAMPLE,
    Finding,
    SetUp,
    documents,
    judged,
    logits_of,
    unchecked,
)
from specdec.diagnostics.parity_compare import compare_drafting
from specdec.drafter import TargetLayer
from specdec.drafter.recurrence import FeedMask
from specdec.nn.optimizers import AdamW
from specdec.nn.view import View
from specdec.training.divergences import LKLambda
from specdec.training.head_loss import TargetProbs
from specdec.training.losses import SoftCrossEntropy, terms
from specdec.training.step import TrainStep, target_outputs
from specdec.training.step_weights import Decay, PrefixWeights
from specdec.training.ttt import ORACLE, reachable, shift
from specdec.utils.text import how_many

STEP = 1e-5  # of a finite difference, as a share of each parameter's size
EXACT = 1e-4  # by which gradient and finite difference may differ in float64
SEEN = 1e-9  # of the logits' range, in float64: less is no change
# of the sample that is learnt
# tokens
PROMPT = 32
ANSWER = 64
PROMPTS = 4  # the one is taken whose answer tells most
EVERY = 5  # steps between decodings
LEARNT = 0.98  # of the drafts right in training: then decoding must show it
TRIES = 4  # decodings of a sample that training has right, before the two are told apart
PATIENCE = 200  # steps without progress: in drafts, or by a hundredth of the loss


def gradient(setup: SetUp) -> Iterator[Finding]:
    """Who has a gradient, what a step of the set-up's optimizer moves, and whether the gradient is the loss's."""
    sample = setup.sample()
    drafter = copy.deepcopy(setup.drafter).train()
    module = setup.module
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
    frozen = {f"the target's {name}": p for name, p in setup.target.model.named_parameters()}
    for name, p in (named | frozen).items():
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
    told = [
        f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: {fault}"
        for fault, names in faults.items()
    ]
    what = f"of {len(named)} parameters those that a step of {type(optimizer).__name__} trains otherwise than asked"
    yield judged(what, sum(map(len, faults.values())), "<=", 0, "; ".join(told))
    yield _finite_difference(setup)


def _finite_difference(setup: SetUp) -> Finding:
    """In float64, along a random direction; what holds weights of its own constant is replaced."""
    what = "the gradient along a random direction is the finite difference, in float64"
    if isinstance(setup.drafter.config.attention, TargetLayer):
        return unchecked(
            what, "norms of the target's own layer compute in float32, whatever they are given"
        )
    objective = setup.objective
    sample = setup.sample()
    drafter = setup.precise().train()
    told = []
    if any(isinstance(term.loss, LKLambda) for term in terms(objective.loss)):
        objective = dataclasses.replace(objective, loss=SoftCrossEntropy())
        told.append("of SoftCrossEntropy, since LKLambda holds its weight")
    if isinstance(weights := objective.weights, PrefixWeights):
        objective = dataclasses.replace(objective, weights=Decay())
        told.append(f"by Decay, since {type(weights).__name__} holds its weights")
    if setup.target.device.type != "cpu":  # a GPU's kernels do not know float64
        objective = dataclasses.replace(objective, kernel=ORACLE)
    outputs = target_outputs(setup.target, drafter, sample, objective, False)

    def probs(final_CH: Tensor) -> TargetProbs:
        return TargetProbs(
            *(x.double() if x.is_floating_point() else x for x in outputs.probs(final_CH))
        )

    def loss() -> Tensor:
        return TrainStep(drafter, objective)(sample, outputs._replace(probs=probs), False).loss

    values = [p for p in drafter.parameters() if p.requires_grad]
    if not values:
        return judged(what, math.nan, "<=", EXACT, "no parameter is trained")
    grads = torch.autograd.grad(loss(), values, materialize_grads=True, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    ways = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device) for p in values
    ]
    ways = [
        way * p.detach().square().mean().sqrt().clamp_min(1e-3)
        for way, p in zip(ways, values, strict=True)
    ]
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
    return judged(what, off, "<=", EXACT, fault, ", ".join(told))


@torch.no_grad()
def inputs(setup: SetUp) -> Iterator[Finding]:
    """Tokens, each of the target's states and what a step hands on are read: changed, they change the logits."""
    drafter = setup.lively()
    ids_1T = setup.sample().ids_BT
    K = 3
    aux_1TNH = setup.aux(ids_1T)
    own_KTD = logits_of(drafter, ids_1T, aux_1TNH, K)

    def read(what: str, one: Tensor, other: Tensor, cause: str) -> Finding:
        moved = float((one - other).abs().max() / (one.max() - one.min()).clamp_min(1e-30))
        return judged(
            f"{what}, changed, changes the logits", moved, ">", SEEN, f"not read: {cause}"
        )

    other_KTD = logits_of(drafter, (ids_1T + 1) % drafter.config.vocab_size, aux_1TNH, K)
    yield read("the tokens", own_KTD, other_KTD, "the embedding does not reach the first layer")
    generator = torch.Generator().manual_seed(1)
    for n, b in enumerate(drafter.config.aux_layers):
        moved = aux_1TNH.clone()
        noise = torch.randn(moved[:, :, n].shape, generator=generator, dtype=torch.float64).to(
            moved.device
        )
        moved[:, :, n] += noise * moved[:, :, n].std()
        other_KTD = logits_of(drafter, ids_1T, moved, K)
        yield read(
            f"the target's state at boundary {b}", own_KTD, other_KTD, "the fusion leaves it out"
        )
    # hands on a constant, by design, which must be read
    if isinstance(drafter.recurrence, FeedMask):
        kept = drafter.recurrence.hidden.weight.clone()
        drafter.recurrence.hidden.weight.copy_(kept.roll(1, -1))
        other_KTD = logits_of(drafter, ids_1T, aux_1TNH, K)
        drafter.recurrence.hidden.weight.copy_(kept)
        yield read(
            "the mask's learned states", own_KTD, other_KTD, "the recurrence does not hand them on"
        )
        return
    if drafter.config.recurrence.masks:  # hands on nothing
        return
    view = View.packed(torch.zeros_like(ids_1T[:, 2:]))
    handed_1TH = drafter.step(ids_1T[:, 1:-1], drafter.fuse(aux_1TNH[:, :-2]), view).h_BTH
    one, other = (
        drafter.logits(drafter.step(ids_1T[:, 2:], h, view).normed_BTH)
        for h in (handed_1TH, handed_1TH.roll(1, 1))
    )
    yield read(
        "what a step hands on to the next",
        one,
        other,
        "the recurrence hands on zeros or a constant",
    )


@torch.no_grad()
def agreement(setup: SetUp) -> Iterator[Finding]:
    """Unrolled training and cached decoding give the same distributions: ``specdec parity`` at a few places."""
    masks = setup.drafter.config.recurrence.masks
    depth = (masks or max(2, setup.objective.steps)) - 1
    texts = list[AnsweredText]()
    for document in documents(setup.batch):
        ids = document.ids_T[:64].tolist()
        begin = int(document.loss_mask_T[:64].long().argmax()) or len(ids) // 2
        if len(ids) >= begin + depth + 4 and len(texts) < 2:
            texts.append(AnsweredText(str(len(texts)), ids, begin))
    what = f"training's logits are cached decoding's at depths 0 to {depth}, of {len(texts)} real texts"
    if not texts:
        yield unchecked(
            what, f"no document goes on for {depth + 4} tokens behind its first supervised one"
        )
        return
    drafter = (
        setup.decoding() if setup.saved else setup.lively().to(setup.target.embedding_weight())
    )
    worst = max(
        compare_drafting(setup.target, drafter, texts, depth).rows, key=lambda row: row.share
    )
    fault = f"{worst.verdict}, at depth {worst.depth} ({worst.place}): what is trained is not what is decoded"
    yield judged(what, worst.share, "<=", worst.allowed, fault)


def overfit(setup: SetUp) -> Iterator[Finding]:
    """One sample, trained on until decoding accepts every draft; the last check, since it trains the drafter.

    The text is a real prompt with the target's own greedy answer, so that the drafts that would be accepted are known.
    The step, loss and precision are the set-up's, without noise or clipping; AdamW's rate is one for a single sample.
    """
    telling, prompt, answer, known = _sample(setup)
    drafter = setup.drafter.train()
    K = setup.objective.steps
    begin = time.monotonic()
    what = (
        f"share accepted of one sample's drafts ({len(prompt)} + {ANSWER} tokens, a chain of {K})"
    )
    if telling < ANSWER / 8:
        why = "the target's answers are one token over and over, or of tokens that the draft vocabulary lacks"
        yield unchecked(
            what, f"{why}: such drafts are accepted, or refused, whatever is wrong", telling
        )
        return
    ids_1T = torch.tensor([[*prompt, *answer]], device=setup.target.device)
    batch = Batch(
        ids_1T, torch.arange(ids_1T.shape[1], device=ids_1T.device)[None] >= len(prompt), 0 * ids_1T
    )
    known_1T = torch.tensor([[False] * len(prompt) + known], device=ids_1T.device)
    reached = [
        reachable(batch.loss_mask_BT, batch.documents_BT, k) & shift(known_1T, 2 + k)
        for k in range(K)
    ]
    can = max(sum(int(reached_1T.sum()) for reached_1T in reached), 1)
    outputs = target_outputs(setup.target, drafter, batch, setup.objective)
    trainable = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer: Any = AdamW(trainable, lr=min(1e-2, max(2e-4, 0.5 / drafter.config.hidden_size)))
    fabric = Fabric(
        accelerator=setup.trainer.accelerator, devices=1, precision=setup.trainer.precision
    )
    train_step, optimizer = fabric.setup(TrainStep(drafter, setup.objective), optimizer)
    losses = list[float]()
    most_right = 0.0
    idle = 0
    tries = 0
    while True:
        # its forward would convert the target's states too, which the training step does not
        with fabric.autocast():
            out = train_step.module(batch, outputs, True)
        right = float(out.counts.hits_K.sum()) / can
        loss = float(out.loss.detach())
        idle = 0 if right > most_right or loss < 0.99 * min(losses, default=math.inf) else idle + 1
        most_right = max(most_right, right)
        late = time.monotonic() - begin >= setup.seconds
        losses.append(loss)
        if (ended := late or idle >= PATIENCE) or (right >= LEARNT and len(losses) % EVERY == 0):
            accepted, refused, parted = _decode(setup, prompt, answer, known)
            tries += right >= LEARNT
            if ended or not refused or tries == TRIES:
                break
        optimizer.zero_grad()
        fabric.backward(out.loss)
        optimizer.step()
    share = accepted / max(accepted + refused, 1)
    fault = ""
    counted = f"{accepted} accepted, {refused} refused; right in training {right:.1%}; loss from {losses[0]:.3g} to "
    counted += f"{losses[-1]:.3g} in {how_many(len(losses), 'step')}"
    if parted < ANSWER / 4:
        why = f"rounding: decoded in a chain, the answer is another from its token {parted} on; choose a wider dtype"
        yield unchecked(what, why, share)
        return
    if (right >= LEARNT and share < LEARNT) or share < right / 2 > 0.25:
        fault = "what training has right, decoding has not: see parity"
    elif idle >= PATIENCE:
        fault = "learning stopped by itself before the sample was learnt: a part is missing, or cut off from learning"
    if refused and not fault:
        yield unchecked(
            what, f"the time was over ({setup.seconds:g} s): {counted}; give --seconds more", share
        )
    else:
        yield judged(what, share, ">=", 1, f"{counted}. {fault}", counted)


def _sample(setup: SetUp) -> tuple[int, list[int], list[int], list[bool]]:
    """Of a few real prompts, each up to where its document's supervision begins, the one whose answer tells most.

    Gives how many of the answer's tokens the draft vocabulary has and are not the one before (what repeats itself is
    right by chance), prompt, answer, and which of its tokens the draft vocabulary has.
    """
    target = setup.target
    vocab = setup.drafter.vocab
    length = ANSWER + setup.objective.steps + 2
    room = min(2 * SAMPLE, target.config.max_position_embeddings - length)
    found = []
    for document in islice(documents(setup.batch), PROMPTS):
        begin = int(document.loss_mask_T.long().argmax()) or PROMPT
        prompt = document.ids_T[:begin][-room:].tolist()
        answer = PlainDecoder(target).generate(prompt, length, ()).ids
        known = (vocab.to_draft(torch.tensor(answer, device=target.device)) >= 0).tolist()
        changed = (one != other for one, other in pairwise(answer[:ANSWER]))
        telling = sum(there and new for there, new in zip(known[1:], changed, strict=False))
        found.append((telling, prompt, answer, known))
    return max(found, key=lambda one: one[0])


@torch.no_grad()
def _decode(
    setup: SetUp, prompt: list[int], answer: list[int], known: list[bool]
) -> tuple[int, int, int]:
    """Decode with a chain as deep as the unroll: drafts accepted, and refused though the drafter knows the token.

    They are counted as far as the text is the answer that was trained on, the last figure's number of tokens: in 16
    bits a pass of several tokens may round otherwise than one of one, and what follows is another text.
    """
    K = setup.objective.steps
    made = SpeculativeDecoder(setup.target, setup.decoding(), Chain(K)).generate(prompt, ANSWER, ())
    parted = next(
        (n for n, (one, other) in enumerate(zip(made.ids, answer, strict=False)) if one != other),
        ANSWER,
    )
    accepted = refused = at = 0
    for count in made.accepted:
        at += count + 1  # the target's own token of this pass
        if at >= parted and parted < ANSWER:
            break
        accepted += count
        refused += count < K and at < len(known) and known[at]
    return accepted, refused, parted
