"""The draft vocabulary: its order, what it covers, what an export makes of it, and the head's rows.

Legend: D draft vocabulary, V target vocabulary, H hidden.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specdec.doctor.finding import Finding, faulty, judged, unchecked
from specdec.doctor.subject import Subject
from specdec.drafter import Drafter, choose
from specdec.export import names
from specdec.export.formats import FORMATS
from specdec.export.switches import NotServable
from specdec.export.write import subject_of

NAME = "vocabulary"
SHARE = 0.9  # of what the best vocabulary of this size covers
EXPORT = "vllm"
ROWS = 512  # of a trained head
AKIN = 0.2  # mean cosine of a head's row and the target's, above which one stems from the other
OFFSETS = "d2t must hold offsets, target id less draft id"


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Ids, coverage, maps of checkpoints, head."""
    drafter = subject.drafter
    yield _order(drafter)
    yield _coverage(subject)
    if subject.checkpoint is not None:
        ids_D = drafter.vocab.target_ids_D
        yield maps("the checkpoint's d2t and t2d", subject.checkpoint, ids_D, drafter.config.vocab_size)
    yield _exported(subject)
    yield _head(subject)


def _order(drafter: Drafter) -> Finding:
    ids_D, V = drafter.vocab.target_ids_D.cpu(), drafter.config.vocab_size
    wrong = int((ids_D.diff() <= 0).sum()) + int(((ids_D < 0) | (ids_D >= V)).sum())
    back_D = drafter.vocab.to_draft(drafter.vocab.target_ids_D).cpu()
    wrong += int((back_D != torch.arange(len(ids_D))).sum()) + abs(len(ids_D) - drafter.config.draft_vocab_size)
    what = f"the {len(ids_D)} draft tokens ascend, are unique, lie in 0..{V - 1}, and map back to themselves"
    return judged(
        NAME, what, wrong, "at most", 0,
        "so many draft tokens are out of order, out of range or doubled: the map from draft to target ids was edited "
        "or ordered otherwise (by frequency); build it with ascending target ids",
    )  # fmt: skip


def _coverage(subject: Subject) -> Finding:
    vocab, target = subject.drafter.vocab, subject.target
    counts_V = subject.data.supervised_counts(subject.drafter.config.vocab_size).double()
    ids_D, total = vocab.target_ids_D.cpu(), counts_V.sum().clamp_min(1)
    best = float(counts_V[choose(counts_V.long(), len(ids_D), target.eos_token_ids)].sum() / total)
    ends = sorted(
        token
        for token in target.eos_token_ids
        if int(vocab.to_draft(torch.tensor(token).to(vocab.target_ids_D.device))) < 0
    )
    fault = (
        "the draft vocabulary was counted on other text, or with another tokenizer, than these data have: no drafter "
        "proposes a token that it lacks; train from the target (model.start FromTarget) for one of these data"
    )
    what = "supervised tokens of the training data that the draft vocabulary has"
    if ends:
        return faulty(NAME, what, f"it lacks the end-of-text tokens {ends}, so that no draft ever proposes to stop")
    remark = f"the best of this size would have {best:.4f}"
    return judged(NAME, what, float(counts_V[ids_D].sum() / total), "at least", SHARE * best, fault, remark)


def maps(what: str, tensors: Mapping[str, Tensor], ids_D: Tensor | None, V: int) -> Finding:
    """``d2t`` is offsets, and ``t2d`` names the same tokens.

    Args:
        ids_D: the tokens that they should name; None if only the two themselves say it.
    """
    offsets_D, members_V = tensors.get(names.DRAFT_TO_TARGET), tensors.get(names.TARGET_TO_DRAFT)
    if offsets_D is None:
        if ids_D is not None and len(ids_D) < V:
            return faulty(NAME, what, "d2t is missing: engines take draft ids for target ids then; export it again")
        return judged(NAME, what, 0, "at most", 0, "", "none: the draft vocabulary is the target's")
    named_D = torch.arange(len(offsets_D)) + offsets_D.long().cpu()
    if ids_D is None and members_V is not None:
        ids_D = members_V.bool().nonzero()[:, 0]
    absolute = bool((offsets_D.long().diff() > 0).all()) and len(offsets_D) > 1
    if ids_D is not None and len(ids_D) == len(offsets_D):
        absolute = torch.equal(offsets_D.long().cpu(), ids_D.cpu()) and not torch.equal(named_D, ids_D.cpu())
    wrong = int((named_D.diff() <= 0).sum()) + int(((named_D < 0) | (named_D >= V)).sum())
    if ids_D is not None:
        same = len(ids_D) == len(named_D)
        wrong += int((named_D.sort().values != ids_D.cpu()).sum()) if same else len(named_D)
    if members_V is not None:
        wrong += int((members_V.bool().cpu() != torch.isin(torch.arange(V), named_D)).sum())
    fault = f"d2t or t2d name other tokens than the drafter's head has: {OFFSETS}, and t2d be true at those targets"
    if absolute:
        fault = (
            f"d2t holds target ids: {OFFSETS}. An engine adds the draft id once more, and proposes tokens that nobody "
            "drafted; subtract 0..D-1 and export again"
        )
    return judged(NAME, f"{what}: draft id plus offset is the target id", wrong, "at most", 0, fault)


def _exported(subject: Subject) -> Finding:
    drafter, what = subject.drafter, f"d2t and t2d of an export for {EXPORT}"
    try:
        made = FORMATS[EXPORT].tensors(drafter, subject_of(drafter, subject.target))
    except NotServable as error:
        return unchecked(NAME, what, str(error))
    return maps(what, made, drafter.vocab.target_ids_D.cpu(), drafter.config.vocab_size)


def _head(subject: Subject) -> Finding:
    drafter, target = subject.drafter, subject.target
    what = "row j of the head is the target's row of the token that j stands for"
    if drafter.config.hidden_size != target.hidden_size:
        return unchecked(NAME, what, "the drafter is of another width than the target: its head starts at random")
    ids_D = drafter.vocab.target_ids_D
    ours_DH, theirs_VH = drafter.lm_head.weight.detach(), target.head_weight()
    if not subject.begun or drafter.config.head == "target":
        wrong = int((ours_DH != theirs_VH[ids_D].to(ours_DH)).any(-1).sum())
        return judged(
            NAME, what, wrong, "at most", 0,
            "so many rows are another token's: head and vocabulary are ordered differently, so that every draft is "
            "decoded as a wrong token; take the head's rows at vocab.target_ids_D",
        )  # fmt: skip
    some_D = torch.linspace(0, len(ids_D) - 1, min(ROWS, len(ids_D))).long().unique().to(ids_D.device)
    cosines = {by: _cosine(ours_DH[some_D], theirs_VH, ids_D[some_D] + by) for by in (-1, 0, 1)}
    told = f"{what}: mean cosine of {len(some_D)} trained rows, beside those of the neighbouring tokens"
    neighbours = max(cosines[-1], cosines[1])
    if max(cosines.values()) < AKIN:
        return unchecked(NAME, told, "this head does not stem from the target's", cosines[0])
    fault = "the head's rows stem from the neighbouring tokens: the vocabulary is shifted against the head"
    return judged(NAME, told, cosines[0], "above", neighbours, fault)


def _cosine(ours_RH: Tensor, theirs_VH: Tensor, at_R: Tensor) -> float:
    theirs_RH = theirs_VH[at_R.clamp(0, len(theirs_VH) - 1)].to(ours_RH)
    return float(torch.nn.functional.cosine_similarity(ours_RH.double(), theirs_RH.double(), dim=-1).mean())
