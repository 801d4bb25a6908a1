"""Greedy tokens compared with plain decoding's, one by one.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec.decoding import Growth, PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target

# of the greatest logit's size, or of 1 if that is smaller: what rounding in another order may amount to, some units of
# each format's last place, the more as layers add up
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Difference(NamedTuple):
    """A token that differs from plain decoding's, and how close the choice was."""

    prompt: int
    position: int  # among the new tokens
    token: int
    plain_token: int
    gap: float  # how far the less likely of the two lies below the greatest logit after plain decoding's text
    allowed: float

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, prompt: int, ids: list[int], position: int, token: int, plain_token: int) -> Self:
        """Look at the logits after ``ids``; a token that is missing, -1, is as far off as any."""
        logits_V = logits_after(target, torch.tensor([ids]))[0].double()
        best = float(logits_V.max())
        chosen = [float(logits_V[one] if one >= 0 else logits_V.min()) for one in (token, plain_token)]
        allowed = TOLERANCE[target.dtype] * max(1.0, abs(best))
        return cls(prompt, position, token, plain_token, best - min(chosen), allowed)

    @property
    def near_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.gap <= self.allowed


@dataclass(frozen=True)
class GreedyCheck:
    """Greedy tokens compared with plain decoding's.

    Where a token differs, decoding goes on from plain decoding's text, so that every token is compared.
    """

    growth: str
    tokens: int
    accepted: int  # drafts that were taken
    passes: int
    near_ties: tuple[Difference, ...]  # within the tolerance: rounding decided
    wrong: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing but rounding made a difference."""
        return not self.wrong


def check_greedy(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    batch: int = 1,
    compiled: bool = False,
) -> GreedyCheck:
    """Decode every prompt plainly and speculatively, without an end token, and compare all tokens.

    Plain decoding is the eager one; ``batch`` and ``compiled`` are speculative decoding's.
    """
    asked = [Request(prompt, max_new_tokens) for prompt in prompts]
    plain = {number: made.ids for number, made in PlainDecoder(target, batch=batch).generate_all(asked)}
    decoder = SpeculativeDecoder(target, drafter, growth, batch=batch, compiled=compiled)
    ties, wrong = list[Difference](), list[Difference]()
    accepted = passes = 0
    left = [(number, 0) for number in range(len(prompts))]  # and how many tokens of it are compared
    while left:
        rest = [Request([*prompts[n], *plain[n][:done]], max_new_tokens - done) for n, done in left]
        made = dict(decoder.generate_all(rest))
        accepted += sum(sum(one.accepted) for one in made.values())
        passes += sum(len(one.accepted) for one in made.values())
        further = []
        for index, (number, done) in enumerate(left):
            pairs = zip(made[index].ids, plain[number][done:], strict=True)
            first = next((i for i, (token, wanted) in enumerate(pairs) if token != wanted), None)
            if first is None:
                continue
            at = done + first
            text = [*prompts[number], *plain[number][:at]]
            found = Difference.of(target, number, text, at, made[index].ids[first], plain[number][at])
            (ties if found.near_tie else wrong).append(found)
            if at + 1 < max_new_tokens:
                further.append((number, at + 1))
        left = further
    return GreedyCheck(growth.name, len(prompts) * max_new_tokens, accepted, passes, tuple(ties), tuple(wrong))


def logits_after(target: Target, ids_BT: Tensor) -> Tensor:
    """The target's logits after the last token of each row, (B, T) int64 to (B, V)."""
    ids_BT = ids_BT.to(target.device)
    view = View.packed(torch.zeros_like(ids_BT))
    return target.logits(target.forward(ids_BT, view, ()).final_BTH[:, -1:])[:, 0]
