"""Every switch of the design changes what the drafter says, and every input is read.

Legend: T tokens, N aux layers, K unroll steps, D draft vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.doctor.finding import Finding, judged
from specdec.doctor.subject import Subject, difference, logits_of
from specdec.evaluation.probe import flips, rebuilt
from specdec.nn.view import View

NAME = "switches"
LEAST = 1e-9  # of the logits' range, in float64
STEPS = 3


@torch.no_grad()
def switches(subject: Subject) -> Iterator[Finding]:
    """Norms and recurrence turned one by one; then tokens, boundaries and what a step hands on."""
    drafter, ids_1T = subject.lively(), subject.sample().ids_BT
    aux_1TNH = subject.aux(ids_1T, torch.float64)
    own_KTD = logits_of(drafter, ids_1T, aux_1TNH, STEPS)
    for flip in flips(drafter.config):
        if flip.config is None:
            continue  # this design does not have it
        turned_KTD = logits_of(rebuilt(drafter, flip.config), ids_1T, aux_1TNH, STEPS)
        what = f"{flip.switch} {flip.trained}, turned to {flip.value}, changes the logits"
        yield judged(
            NAME, what, difference(own_KTD, turned_KTD), "above", LEAST,
            f"{flip.switch} is DEAD: turned, it changes nothing. The part is built and never applied, or its place in "
            "the forward is bypassed; an ablation of it would compare a design with itself",
        )  # fmt: skip
    chance = torch.Generator().manual_seed(1)
    other_1T = (ids_1T + 1) % drafter.config.vocab_size
    changed = difference(own_KTD, logits_of(drafter, other_1T, aux_1TNH, STEPS))
    yield _read("the tokens", changed, "the embedding does not reach the first layer")
    for n, b in enumerate(drafter.config.aux_layers):
        noise = torch.randn(aux_1TNH[:, :, n].shape, generator=chance, dtype=torch.float64).to(aux_1TNH.device)
        moved = aux_1TNH.clone()
        moved[:, :, n] += noise * aux_1TNH[:, :, n].std()
        changed = difference(own_KTD, logits_of(drafter, ids_1T, moved, STEPS))
        yield _read(f"the target's state at boundary {b}", changed, "the fusion leaves it out")
    yield _handed_on(subject, ids_1T, aux_1TNH)


def _read(what: str, changed: float, cause: str) -> Finding:
    return judged(NAME, f"{what}, changed, changes the logits", changed, "above", LEAST, f"it is not read: {cause}")


def _handed_on(subject: Subject, ids_1T: Tensor, aux_1TNH: Tensor) -> Finding:
    """What the first step hands on, given to the wrong slots, changes the second."""
    drafter = subject.lively()
    view = View.packed(torch.zeros_like(ids_1T[:, 2:]))
    first = drafter.step(ids_1T[:, 1:-1], drafter.fuse(aux_1TNH[:, :-2]), view)
    one, other = (
        drafter.logits(drafter.step(ids_1T[:, 2:], h_1TH, view).normed_BTH)
        for h_1TH in (first.h_BTH, first.h_BTH.roll(1, 1))
    )
    return _read(
        "what a step hands on to the next", difference(one, other),
        "the recurrence hands on zeros or a constant, or the next step does not look at it, so that every draft but "
        "the first is made without the text before it",
    )  # fmt: skip
