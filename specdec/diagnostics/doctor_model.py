"""The doctor's checks of the drafter: its gradient, its inputs, and training compared with decoding.

Legend: T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary.
"""

import copy
import dataclasses
import math

import torch
from torch import Tensor

from specdec.diagnostics.anchors import AnsweredText
from specdec.diagnostics.doctor_setup import (
    Finding,
    Findings,
    SetUp,
    documents,
    judged,
    logits_of,
    unchecked,
)
from specdec.diagnostics.parity_compare import compare_drafting
from specdec.drafter import TargetLayer
from specdec.nn.unroll import DENSE
from specdec.nn.view import View
from specdec.training.confidence import ConfidenceLoss
from specdec.training.divergences import LKLambda
from specdec.training.losses import SoftCrossEntropy, Term, WeightedSum, terms
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from specdec.training.step_weights import Decay, PrefixWeights
from specdec.training.target_head import TargetProbs

STEP = 1e-5  # of a finite difference, as a share of each parameter's size
EXACT = 1e-4  # by which gradient and finite difference may differ in float64
SEEN = 1e-9  # share of the logits' range, in float64: a smaller change is none


def gradient(setup: SetUp) -> Findings:
    """The parameters that should train have a gradient, move in an optimizer's step, and follow the loss's gradient."""
    sample = setup.sample()
    drafter = copy.deepcopy(setup.drafter).train()
    module = setup.module
    outputs = target_outputs(setup.target, drafter, sample, setup.objective, False)
    out = TrainStep(drafter, setup.objective)(sample, outputs, False)
    if not float(out.weight):
        yield unchecked(
            "one step on a real row",
            "nothing is supervised there, or the draft vocabulary lacks all of its tokens",
        )
        return
    out.loss.backward()
    parameters = dict(drafter.named_parameters())
    learns = {
        "embed_tokens.weight": module.train_embed,
        "lm_head.weight": module.train_head and drafter.config.head == "own",
    }
    start = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = module.make_optimizer(
        [(name, p) for name, p in parameters.items() if p.requires_grad]
    )
    optimizer.step()
    faults: dict[str, list[str]] = {}
    frozen = {f"the target's {name}": p for name, p in setup.target.model.named_parameters()}
    for name, p in (parameters | frozen).items():
        learned = name in parameters and learns.get(name, True)
        alive = p.grad is not None and bool(p.grad.isfinite().all() and p.grad.any())
        if learned and not p.requires_grad:
            fault = "frozen (requires_grad is false)"
        elif learned and not alive:
            fault = "built and not used, or cut off by detach, or no number"
        elif learned and torch.equal(p, start[name]):
            fault = "left where it was: the rate is zero, or lost in the weights' rounding"
        elif not learned and (p.requires_grad or p.grad is not None):
            fault = "trained unasked: freeze it, or set model.train_embed or model.train_head"
        else:
            continue
        faults.setdefault(fault, []).append(name)
    sentences = [
        f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: {fault}"
        for fault, names in faults.items()
    ]
    optimizer_name = type(optimizer).__name__
    yield judged(
        f"of {len(parameters)} parameters those that a step of {optimizer_name} trains otherwise than asked",
        sum(map(len, faults.values())),
        "<=",
        0,
        "; ".join(sentences),
    )
    yield _finite_difference(setup)


def _without_constants(setup: SetUp) -> tuple[ObjectiveConfig, list[str]]:
    """Return the objective without parts that hold numbers of their own constant, and remarks on what was replaced."""
    objective = setup.objective
    remarks = []
    named = terms(objective.loss)
    if any(isinstance(term.loss, LKLambda) for term in named):
        objective = dataclasses.replace(objective, loss=SoftCrossEntropy())
        remarks.append("of SoftCrossEntropy, since LKLambda holds its weight")
    elif any(isinstance(term.loss, ConfidenceLoss) for term in named):
        others = [
            Term(loss, weight) for _, weight, loss in named if type(loss) is not ConfidenceLoss
        ]
        objective = dataclasses.replace(objective, loss=WeightedSum(others))
        remarks.append("without ConfidenceLoss, which holds the chances of acceptance")
    if isinstance(weights := objective.weights, PrefixWeights):
        objective = dataclasses.replace(objective, weights=Decay())
        remarks.append(f"by Decay, since {type(weights).__name__} holds its weights")
    if setup.target.device.type != "cpu":  # a GPU's kernels have no float64
        objective = dataclasses.replace(objective, kernel=DENSE)
    return objective, remarks


def _finite_difference(setup: SetUp) -> Finding:
    """Compare the gradient along a random direction with a finite difference, in float64.

    Parts of the loss that hold weights of their own constant are replaced.
    """
    what = "the gradient along a random direction is the finite difference, in float64"
    if isinstance(setup.drafter.config.attention, TargetLayer):
        return unchecked(
            what, "norms of the target's own layer compute in float32, whatever they are given"
        )
    sample = setup.sample()
    drafter = setup.precise().train()
    objective, remarks = _without_constants(setup)
    outputs = target_outputs(setup.target, drafter, sample, objective, False)

    def probs(final_CH: Tensor) -> TargetProbs:
        columns = outputs.probs(final_CH)
        return TargetProbs(*(x.double() if x.is_floating_point() else x for x in columns))

    def loss() -> Tensor:
        return TrainStep(drafter, objective)(sample, outputs._replace(probs=probs), False).loss

    values = [p for p in drafter.parameters() if p.requires_grad]
    if not values:
        return judged(what, math.nan, "<=", EXACT, "no parameter is trained")
    grads = torch.autograd.grad(loss(), values, materialize_grads=True, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    direction = []
    for p in values:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
        direction.append(noise * p.detach().square().mean().sqrt().clamp_min(1e-3))
    slope = float(sum((g * d).sum() for g, d in zip(grads, direction, strict=True)))
    losses = []
    with torch.no_grad():
        for step in (STEP, -2 * STEP):
            for p, d in zip(values, direction, strict=True):
                p.add_(d, alpha=step)
            losses.append(float(loss()))
    measured = (losses[0] - losses[1]) / (2 * STEP)
    off = abs(measured - slope) / max(abs(measured), abs(slope), 1e-12)
    return judged(
        what,
        off,
        "<=",
        EXACT,
        f"autograd says {slope:.6g}, the loss {measured:.6g}: a backward pass is wrong, or a part is detached",
        ", ".join(remarks),
    )


@torch.no_grad()
def inputs(setup: SetUp) -> Findings:
    """The drafter reads the tokens, each of the target's states and its own output: changed, they change the logits."""
    drafter = setup.lively()
    ids_1T = setup.sample().ids_BT
    K = 3
    aux_1TNH = setup.aux(ids_1T)
    logits_KTD = logits_of(drafter, ids_1T, aux_1TNH, K)

    def read(what: str, logits: Tensor, other: Tensor, cause: str) -> Finding:
        moved = float((logits - other).abs().max() / (logits.max() - logits.min()).clamp_min(1e-30))
        return judged(
            f"{what}, changed, changes the logits", moved, ">", SEEN, f"not read: {cause}"
        )

    other_KTD = logits_of(drafter, (ids_1T + 1) % drafter.config.vocab_size, aux_1TNH, K)
    yield read("the tokens", logits_KTD, other_KTD, "the embedding does not reach the first layer")
    generator = torch.Generator().manual_seed(1)
    for n, b in enumerate(drafter.config.aux_layers):
        moved = aux_1TNH.clone()
        state = moved[:, :, n]
        noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
        state += noise.to(moved.device) * state.std()
        other_KTD = logits_of(drafter, ids_1T, moved, K)
        yield read(
            f"the target's state at boundary {b}", logits_KTD, other_KTD, "the fusion leaves it out"
        )
    drafting = drafter.config.drafting
    learned = drafting.learned_states(drafter)
    if learned is not None:  # later steps read a constant by design, which must count
        states = learned.clone()
        learned.copy_(states.roll(1, -1))
        other_KTD = logits_of(drafter, ids_1T, aux_1TNH, K)
        learned.copy_(states)
        yield read(
            "the mask's learned states",
            logits_KTD,
            other_KTD,
            "the recurrence does not hand them on",
        )
        return
    if drafting.one_call:  # hands on nothing
        return
    view = View.packed(torch.zeros_like(ids_1T[:, 2:]))
    handed_1TH = drafter.step(ids_1T[:, 1:-1], drafter.fuse(aux_1TNH[:, :-2]), view).h_BTH
    after, after_other = (
        drafter.logits(drafter.step(ids_1T[:, 2:], h_1TH, view).normed_BTH)
        for h_1TH in (handed_1TH, handed_1TH.roll(1, 1))
    )
    yield read(
        "what a step hands on to the next",
        after,
        after_other,
        "the recurrence hands on zeros or a constant",
    )


@torch.no_grad()
def agreement(setup: SetUp) -> Findings:
    """Unrolled training and cached decoding give the same distributions: ``specdec parity`` at a few places."""
    drafts = setup.drafter.config.drafting.fixed_drafts
    depth = (drafts or max(2, setup.objective.steps)) - 1
    texts = list[AnsweredText]()
    for document in documents(setup.batch):
        ids = document.ids_T[:64].tolist()
        begin = int(document.loss_mask_T[:64].long().argmax()) or len(ids) // 2
        if len(ids) >= begin + depth + 4 and len(texts) < 2:
            texts.append(AnsweredText(str(len(texts)), ids, begin))
    what = f"training's logits are cached decoding's at depths 0 to {depth}, of {len(texts)} real texts"
    if not texts:
        yield unchecked(
            what, f"no document continues for {depth + 4} tokens behind its first supervised one"
        )
        return
    drafter = (
        setup.decoding() if setup.saved else setup.lively().to(setup.target.embedding_weight())
    )
    worst = max(
        compare_drafting(setup.target, drafter, texts, depth).rows, key=lambda row: row.share
    )
    yield judged(
        what,
        worst.share,
        "<=",
        worst.allowed,
        f"{worst.verdict}, at depth {worst.depth} ({worst.place}): what is trained is not what is decoded",
    )
