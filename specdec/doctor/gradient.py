"""One gradient, and one step: who is trained, who is not, and whether the gradient is the loss's.

Legend: B rows, T tokens, D draft vocabulary.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from specdec.data import Batch
from specdec.doctor.finding import Finding, faulty, judged, unchecked
from specdec.doctor.subject import Subject
from specdec.drafter import Drafter
from specdec.training.law import Law
from specdec.training.losses import LKLambda, SoftCrossEntropy, terms
from specdec.training.objective import Recipe, Teacher, objective, teach

NAME = "gradient"
STEP = 1e-5  # of a finite difference, as a share of each parameter's size
RELATIVE = 1e-4  # by which gradient and finite difference may differ in float64
HELD = (LKLambda,)  # losses with a weight that the gradient takes for a constant


def gradient(subject: Subject) -> Iterator[Finding]:
    """Parts, the optimizer's step, the finite difference, and a small step downhill."""
    sample = subject.sample()
    drafter = copy.deepcopy(subject.drafter).train()
    loss, rows = _loss(subject, drafter, sample, subject.recipe)
    if not float(rows):
        yield unchecked(
            NAME, "one step on a real row",
            "no row of it counts: nothing is supervised there, or the draft vocabulary lacks all of its tokens",
        )  # fmt: skip
        return
    loss.backward()
    yield from _parts(subject, drafter)
    yield _target(subject)
    yield _moved(subject, drafter)
    yield from _exact(subject, sample)


def meant(subject: Subject) -> dict[str, bool]:
    """Which parameters the set-up trains, by name: all but embedding and head, which it may leave frozen."""
    module, head = subject.module, subject.drafter.config.head
    off = {"embed_tokens.weight": module.train_embed, "lm_head.weight": module.train_head and head == "own"}
    return {name: off.get(name, True) for name, _ in subject.drafter.named_parameters()}


def _loss(subject: Subject, drafter: Drafter, sample: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    teacher = teach(subject.target, drafter, sample, recipe, False)
    out = objective(drafter, sample, teacher, recipe, False)
    return out.loss, out.rows


def _parts(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    wanted, given = meant(subject), dict(drafter.named_parameters())
    frozen = [name for name, p in given.items() if wanted[name] and not p.requires_grad]
    dead = [name for name, p in given.items() if wanted[name] and p.requires_grad and not _alive(p)]
    said = []
    if frozen:
        said.append(f"{_some(frozen)} {_are(frozen)} frozen (requires_grad is false) and stays as it starts")
    if dead:
        said.append(
            f"{_some(dead)} {_are(dead)} without a gradient, or with one that is not finite: the part is built and not "
            "used, or cut off by detach or no_grad"
        )
    what = "parameters that should be trained and have no finite, non-zero gradient"
    yield judged(NAME, what, len(frozen) + len(dead), "at most", 0, "; ".join(said), f"of {sum(wanted.values())}")
    stray = [name for name, p in given.items() if not wanted[name] and (p.requires_grad or p.grad is not None)]
    yield judged(
        NAME, "parameters that should stay as they are and have a gradient", len(stray), "at most", 0,
        f"{_some(stray)} would be trained: freeze it, or set model.train_embed or model.train_head",
        f"of {sum(not one for one in wanted.values())}",
    )  # fmt: skip


def _alive(parameter: nn.Parameter) -> bool:
    grad = parameter.grad
    return grad is not None and bool(grad.isfinite().all()) and bool(grad.any())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _target(subject: Subject) -> Finding:
    given = [name for name, p in subject.target.model.named_parameters() if p.requires_grad or p.grad is not None]
    fault = f"the target would be trained ({_some(given)}): it must be frozen, its laws are taken without gradient"
    return judged(NAME, "parameters of the target with a gradient", len(given), "at most", 0, fault)


def _moved(subject: Subject, drafter: Drafter) -> Finding:
    """The set-up's optimizer, at its own rate, moves what it should and nothing else."""
    wanted = meant(subject)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainable = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    optimizer = subject.module.make_optimizer(trainable)
    optimizer.step()
    moved = {name: not torch.equal(p, before[name]) for name, p in drafter.named_parameters()}
    stay = [name for name, p in drafter.named_parameters() if wanted[name] and _alive(p) and not moved[name]]
    stray = [name for name in moved if moved[name] and not wanted[name]]
    lost = [name for name, p in drafter.named_parameters() if not p.isfinite().all()]
    rates = ", ".join(sorted({f"{group['lr']:g}" for group in optimizer.param_groups}))
    what = f"parameters that a step of {type(optimizer).__name__} (rate {rates}) moves wrongly"
    if stay:
        fault = f"{_some(stay)} stay in spite of a gradient: the rate is zero, or lost in the weights' rounding"
    else:
        fault = f"{_some(stray)} move without being meant to, or {_some(lost)} are no numbers after one step"
    return judged(NAME, what, len(stay) + len(stray) + len(lost), "at most", 0, fault)


def _exact(subject: Subject, sample: Batch) -> Iterator[Finding]:
    """In float64: the gradient along a random direction, and a small step against it."""
    held = [type(term.loss).__name__ for term in terms(subject.recipe.loss) if isinstance(term.loss, HELD)]
    recipe = subject.precise_recipe
    if held:
        recipe = dataclasses.replace(recipe, loss=SoftCrossEntropy())
    drafter = subject.precise().train()
    teacher = _wide(teach(subject.target, drafter, sample, recipe, False))
    named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    if not named:
        yield faulty(NAME, "the gradient in float64", "no parameter is trained: nothing can be learnt")
        return
    values = [p for _, p in named]
    loss = objective(drafter, sample, teacher, recipe, False).loss
    found = torch.autograd.grad(loss, values, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(values, found, strict=True)]
    chance = torch.Generator().manual_seed(0)
    ways = [
        torch.randn(p.shape, generator=chance, dtype=torch.float64).to(p.device)
        * p.detach().square().mean().sqrt().clamp_min(1e-3)
        for p in values
    ]
    slope = float(sum((g * way).sum() for g, way in zip(grads, ways, strict=True)))

    def at(share: float, along: Sequence[Tensor]) -> float:
        with torch.no_grad():
            for p, way in zip(values, along, strict=True):
                p.add_(way, alpha=share)
            there = float(objective(drafter, sample, teacher, recipe, False).loss)
            for p, way in zip(values, along, strict=True):
                p.sub_(way, alpha=share)
        return there

    measured = (at(STEP, ways) - at(-STEP, ways)) / (2 * STEP)
    off = abs(measured - slope) / max(abs(measured), abs(slope), 1e-12)
    by = f" of SoftCrossEntropy, since {held[0]} holds its own weight constant" if held else ""
    what = f"the gradient{by} along a random direction is the finite difference, in float64"
    yield judged(
        NAME, what, off, "at most", RELATIVE,
        f"autograd says {slope:.6g}, the loss itself {measured:.6g}: a backward pass is wrong, or a part of the unroll "
        "is detached; if you wrote a part or a loss with a backward of its own, look there first",
    )  # fmt: skip
    size = float(sum(g.square().sum() for g in grads)) ** 0.5
    length = 1e-4 * float(sum(p.detach().square().sum() for p in values)) ** 0.5 / max(size, 1e-30)
    fall = float(loss.detach()) - at(-length, grads)
    yield judged(
        NAME, "a small step against the gradient lowers the loss, as a share of what the gradient promises",
        fall / max(length * size**2, 1e-30), "above", 0.1,
        "the loss does not fall along its own gradient: the gradient's sign or the loss's is wrong",
    )  # fmt: skip


def _wide(teacher: Teacher) -> Teacher:
    """The target's laws in float64, so that the loss is."""

    def law(final_CH: Tensor) -> Law:
        return Law(*(x.double() if x.is_floating_point() else x for x in teacher.law(final_CH)))

    return teacher._replace(law=law)
