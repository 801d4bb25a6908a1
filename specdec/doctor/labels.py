"""What is taught belongs to where it is taught: the target's law and the objective's pairing, token by token.

Legend: T tokens, V vocabulary, K unroll steps, D draft vocabulary, C positions, R rows, P numbers of a projection.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specdec.doctor.finding import Finding, judged, unchecked
from specdec.doctor.subject import Subject, logits_of
from specdec.training.law import Law
from specdec.training.losses import Graded, LawLoss, Rows
from specdec.training.objective import Teacher, objective, teach

NAME = "labels"
TWICE = 2.0  # standard errors
KNOWS = 1.0  # nats above chance
PLACES = 512  # of a document that are looked at: their laws stand in memory together
P = 16


@torch.no_grad()
def labels(subject: Subject) -> Iterator[Finding]:
    """The law's token, then the objective's pairs."""
    yield _law(subject)
    yield from _pairs(subject)


def _law(subject: Subject) -> Finding:
    """The law at t is of token t + 1: it makes that one likelier than its neighbours."""
    teacher = teach(subject.target, subject.drafter, subject.batch, subject.recipe, False, subject.source)
    found: dict[int, list[Tensor]] = {-1: [], 0: [], 1: []}
    for document in subject.documents():
        T = len(document.ids_T)
        if T < 4:
            continue
        here_C = torch.arange(1, T - 2, device=document.ids_T.device)
        here_C = here_C[document.loss_mask_T[here_C + 1]][:PLACES]
        final_CH = teacher.final_BTH[document.row, document.first + here_C]
        log_p_CV = subject.target.logits(final_CH[None])[0].float().log_softmax(-1)
        for by, parts in found.items():
            parts.append(log_p_CV.gather(1, document.ids_T[here_C + 1 + by, None])[:, 0])
    what = "the target's law at a token is that of the next one: its mean log-likelihood, of supervised tokens"
    own_N = torch.cat(found[0]) if found[0] else torch.zeros(0)
    if len(own_N) < 8:
        return unchecked(NAME, what, "the rows hold too few supervised tokens")
    chance = -math.log(subject.target.vocab_size)
    likeliest = max(float(torch.cat(parts).mean()) for parts in found.values())
    if likeliest < chance + KNOWS:
        why = f"this target does not know such text: chance alone is {chance:.3g} nats"
        return unchecked(NAME, what, why, float(own_N.mean()))
    leads = {by: own_N - torch.cat(found[by]) for by in (-1, 1)}
    for by, lead_N in leads.items():
        error = TWICE * float(lead_N.std()) / len(lead_N) ** 0.5
        if float(lead_N.mean()) < -error:
            return judged(
                NAME, what, float(own_N.mean()), "above", float(torch.cat(found[by]).mean()),
                f"the law fits the token {'behind' if by > 0 else 'before'} the next one better: the target's last "
                f"states are shifted by {by:+d} token against the text, in the features or in the cache they came from",
            )  # fmt: skip
        if float(lead_N.mean()) < error:
            return unchecked(
                NAME, what,
                f"this target makes the token at {by:+d} as likely ({float(torch.cat(found[by]).mean()):.3g} nats): it "
                "does not know such text",
                float(own_N.mean()),
            )  # fmt: skip
    bound = max(float(torch.cat(found[by]).mean()) for by in (-1, 1))
    return judged(NAME, what, float(own_N.mean()), "above", bound, "", "bound: the neighbours' mean")


@dataclasses.dataclass(frozen=True)
class _Recorder(LawLoss):
    """Notes which of the drafter's rows is graded by which of the target's positions."""

    noted: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    def __call__(self, rows: Rows) -> Tensor:
        """No loss."""
        self.noted.append((rows.draft_RD.detach().clone(), rows.token_R.clone()))
        return rows.draft_RD.sum(-1) * 0

    def grade(self, rows: Rows, weight_R: Tensor) -> Graded:
        """No loss, no gradient."""
        return Graded(self(rows), torch.zeros_like(rows.draft_RD))


def _pairs(subject: Subject) -> Iterator[Finding]:
    """The training objective runs on a real row, its target's law replaced by one that names its own position."""
    drafter, sample, steps = subject.precise().requires_grad_(False), subject.sample(), subject.recipe.steps
    what = f"the objective grades step k at slot t by the target's law at t + 1 + k (K = {steps})"
    aux_1TNH = subject.aux(sample.ids_BT, torch.float64)
    T = sample.ids_BT.shape[1]
    final_1TH = torch.zeros(1, T, subject.target.hidden_size, dtype=torch.float64, device=sample.ids_BT.device)
    final_1TH[0, :, 0] = torch.arange(T)

    def law(final_CH: Tensor) -> Law:
        here_C = final_CH[:, 0].round().long()
        one_CD = torch.full((len(here_C), drafter.config.draft_vocab_size), 1.0 / drafter.config.draft_vocab_size)
        one_CD = one_CD.to(final_CH)
        known_C = torch.ones_like(here_C, dtype=torch.bool)
        return Law(one_CD, one_CD.log(), torch.zeros_like(final_CH[:, 0]), here_C, known_C)

    recorder = _Recorder()
    recipe = dataclasses.replace(subject.precise_recipe, loss=recorder)
    objective(drafter, sample, Teacher(aux_1TNH, final_1TH, law), recipe, False)
    if not recorder.noted:
        yield unchecked(NAME, what, f"no slot of the sample's {T} tokens is supervised")
        return
    spread_DP = torch.randn(drafter.config.draft_vocab_size, P, generator=torch.Generator().manual_seed(0)).double()
    spread_DP = spread_DP.to(aux_1TNH.device)
    said_KTP = logits_of(drafter, sample.ids_BT, aux_1TNH, steps) @ spread_DP
    by = dict.fromkeys(range(-2, 3), 0)
    total = 0
    for draft_RD, position_R in recorder.noted:
        nearest_R = _offsets(draft_RD.double() @ spread_DP, position_R, said_KTP)
        total += len(nearest_R)
        for offset in by:
            by[offset] += int((nearest_R == offset).sum())
    share = by[0] / max(total, 1)
    best = max(by, key=by.__getitem__)
    yield judged(
        NAME, what, share, "at least", 1.0,
        f"of {total} rows {by[best]} are graded by the law {best:+d} token off: labels are shifted; what such a "
        "drafter learns is another place's token, and decoding accepts none"
        if best
        else "some rows are graded by another place's law: the pieces in which the head is graded are cut wrongly",
    )  # fmt: skip


def _offsets(draft_RP: Tensor, position_R: Tensor, said_KTP: Tensor) -> Tensor:
    """How far, (R,) int64, the position that grades a row lies from the one that should."""
    K, T, _ = said_KTP.shape
    k_K = torch.arange(K, device=position_R.device)
    gaps: list[Tensor] = []
    offsets: list[Any] = [0, -1, 1, -2, 2]  # the first of equals wins
    for offset in offsets:
        slot_RK = position_R[:, None] - 1 - k_K - offset
        inside_RK = (slot_RK >= 0) & (slot_RK < T)
        here_RKP = said_KTP[k_K, slot_RK.clamp(0, T - 1)]
        gap_RK = (here_RKP - draft_RP[:, None]).abs().amax(-1).masked_fill(~inside_RK, float("inf"))
        gaps.append(gap_RK.amin(-1))
    return torch.tensor(offsets, device=position_R.device)[torch.stack(gaps, 1).argmin(1)]
