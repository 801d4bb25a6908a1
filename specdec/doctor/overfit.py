"""One sample, trained on until every draft of it is accepted.

The text is a real prompt with the target's own greedy answer, so that the drafts that would be accepted are known. It
is trained on by the set-up's own module, loss, precision and clipping under Lightning, first with its own optimizer at
its own rate, then, where that is too slow for a minute, with AdamW at a rate for one sample. Noise is left out.

Legend: T tokens, K unroll steps, S slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.doctor.finding import Finding, Verdict, judged, unchecked
from specdec.doctor.lesson import LEARNT, Curve, Ended, trained
from specdec.doctor.sample import Sample, chosen
from specdec.doctor.subject import Subject, unrolled
from specdec.evaluation.callback import decoding_copy

NAME = "overfit"
LEAST = 1 / 8  # of the answer's tokens tell something
CLEAR = 0.5  # of the learnt drafts are the text's, at one offset


def overfit(subject: Subject) -> Iterator[Finding]:
    """The last check, since it trains the drafter."""
    sample = chosen(subject)
    lengths = f"{len(sample.prompt)} + {sample.decoded} tokens"
    what = f"accepted drafts of one sample, {lengths}, a chain of {subject.recipe.steps}"
    if sample.tells < LEAST * sample.decoded:
        why = (
            "the target's own greedy answers to the rows' prompts are one token over and over, or of tokens that the "
            "draft vocabulary lacks: whatever is wrong, such drafts are accepted, or none is"
        )
        yield unchecked(NAME, what, why, sample.tells)
        return
    curve = trained(subject, sample)
    subject.curve = [look._asdict() for look in curve.looks]
    yield from _findings(subject, sample, curve, what)


def _findings(subject: Subject, sample: Sample, curve: Curve, what: str) -> Iterator[Finding]:
    first, last = curve.looks[0], curve.looks[-1]
    least = min(look.loss for look in curve.looks)
    steps = sum(max(look.step for look in curve.looks if look.optimizer == name) for name in _names(curve))
    told = f"{steps} steps in {last.seconds:.0f} s, {', '.join(_names(curve))}"
    yield judged(
        NAME, "the sample's loss, at its least", least, "below", first.loss,
        f"the loss never fell below where it began ({told}): nothing is learnt",
    )  # fmt: skip
    done = curve.decoded
    counted = f"{done.accepted} accepted, {done.refused} refused; right in training {last.right:.1%}; {told}"
    if not done.refused:
        yield judged(NAME, what, done.share, "at least", 1.0, "", counted)
        return
    fault = _why(subject, sample)
    if not fault and last.right >= LEARNT and done.share < LEARNT:
        fault = "what training has right, decoding has not: the two run the drafter differently; see parity above"
    if not fault and curve.ended is Ended.STALLED:
        fault = "learning stopped by itself before the sample was learnt: a part is missing, or cut off from learning"
    if fault:
        yield judged(NAME, what, done.share, "at least", 1.0, f"{counted}. {fault}")
        return
    why = f"the time was over ({subject.seconds:g} s): {counted}; give --seconds more"
    yield Finding(NAME, what, Verdict.UNCHECKED, done.share, "at least", 1.0, why)


def _names(curve: Curve) -> list[str]:
    return list(dict.fromkeys(look.optimizer for look in curve.looks))


@torch.no_grad()
def _why(subject: Subject, sample: Sample) -> str:
    """Whether the learnt drafts are the text's tokens at another place than the next."""
    drafter = subject.module.drafter
    assert drafter is not None
    drafter = decoding_copy(drafter, subject.target).eval()
    ids_1T = torch.tensor([[*sample.prompt, *sample.answer]], device=subject.target.device)
    (step,) = unrolled(drafter, ids_1T, subject.aux(ids_1T, subject.target.dtype), 1)
    drafts_T: Tensor = drafter.vocab.to_target(drafter.logits(step.normed_BTH[0]).argmax(-1))
    slots_S = torch.arange(len(sample.prompt), ids_1T.shape[1] - 4, device=ids_1T.device)
    like: dict[int, float] = {}
    for by in (0, -2, -1, 1, 2):
        wanted_S = ids_1T[0, slots_S + 2 + by]
        known_S = drafter.vocab.to_draft(wanted_S) >= 0
        like[by] = float((drafts_T[slots_S] == wanted_S)[known_S].double().mean())
    best = max(like, key=like.__getitem__)
    if not best or like[best] < CLEAR or like[best] < 2 * like[0]:
        return ""
    return (
        f"the learnt drafts are the text's tokens {best:+d} from the next ({like[best]:.0%} of those known): the "
        f"labels are shifted by {best:+d} in training"
    )
