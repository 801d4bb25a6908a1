"""The sample that a drafter is overfitted on, and how it is decoded.

Legend: B rows, T tokens, K unroll steps.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.doctor.subject import SAMPLE, Subject
from specdec.evaluation.beginnings import SHORTEST, beginnings
from specdec.evaluation.callback import decoding_copy

PROMPT, ANSWER = 32, 64  # tokens
PROMPTS = 4  # the one is taken whose answer tells most


class Sample(NamedTuple):
    """A prompt and the target's greedy answer."""

    prompt: list[int]
    answer: list[int]  # longer than what is decoded, by as much as a draft may reach beyond it
    decoded: int  # tokens of it that are decoded
    known: list[bool]  # of the answer's tokens, whether the draft vocabulary has them

    @property
    def tells(self) -> int:
        """Tokens that the drafter knows, and that are not the one before: what repeats itself is right by chance."""
        new = (one != other for one, other in pairwise(self.answer[: self.decoded]))
        return sum(known and changed for known, changed in zip(self.known[1:], new, strict=False))


class Decoded(NamedTuple):
    """A decoding of the sample."""

    accepted: int
    refused: int  # drafts that were not accepted although the drafter knows the token

    @property
    def share(self) -> float:
        """Accepted drafts among those that could have been."""
        return self.accepted / max(self.accepted + self.refused, 1)


def chosen(subject: Subject) -> Sample:
    """Of a few real prompts the one whose answer tells most."""
    target, vocab, K = subject.target, subject.drafter.vocab, subject.recipe.steps
    length = ANSWER + K + 2
    room = target.config.max_position_embeddings - length
    try:
        prompts = beginnings(subject.batch, PROMPTS, PROMPT, max(room, SHORTEST))
    except ValueError:  # its advice is for another command
        prompts = [subject.sample().ids_BT[0, :PROMPT].tolist()]
    decoder, best = PlainDecoder(target), None
    for prompt in prompts:
        cut = prompt[-min(room, 2 * SAMPLE) :]
        answer = decoder.generate(cut, length).ids
        known = (vocab.to_draft(torch.tensor(answer, device=target.device)) >= 0).tolist()
        one = Sample(cut, answer, ANSWER, known)
        if best is None or one.tells > best.tells:
            best = one
    assert best is not None
    return best


@torch.no_grad()
def decode(subject: Subject, sample: Sample) -> Decoded:
    """Decode the sample with a chain as deep as the unroll."""
    K, drafter = subject.recipe.steps, subject.module.drafter
    assert drafter is not None
    decoder = SpeculativeDecoder(subject.target, decoding_copy(drafter, subject.target).eval(), Chain(K))
    made = decoder.generate(sample.prompt, sample.decoded)
    accepted = refused = 0
    for known, count in zip(made.context, made.accepted, strict=True):
        accepted += count
        at = known - len(sample.prompt) + count
        refused += count < K and at < len(sample.known) and sample.known[at]
    return Decoded(accepted, refused)
