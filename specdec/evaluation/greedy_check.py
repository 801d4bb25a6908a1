"""Greedy tokens compared with plain decoding's, one by one.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec.decoding import Generation, Growth, PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target

# of the greatest logit's size, or of 1 if that is smaller: what rounding in another order may amount to, some units of
# each format's last place, the more as layers add up. In bfloat16 logits of a small random model were up to 2.4 % off
# float64's in every kind of pass, and two of them are compared
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 2e-3}
MOST_TIES = 0.02  # of all tokens: rounding does not decide more often


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
    accepted: int  # drafts that were taken, without what was decoded again behind a difference
    passes: int
    near_ties: tuple[Difference, ...]  # within the tolerance: rounding decided
    wrong: tuple[Difference, ...]

    @property
    def fault(self) -> str | None:
        """What else than rounding made a difference, or that nothing was checked."""
        if self.wrong:
            return f"{len(self.wrong)} of {self.tokens} tokens are wrong"
        if len(self.near_ties) > max(1, MOST_TIES * self.tokens):
            return f"{len(self.near_ties)} near-ties in {self.tokens} tokens: rounding is not that rough"
        return None if self.passes else "no pass verified anything: ask for more new tokens"


def plain_tokens(target: Target, prompts: Sequence[list[int]], max_new_tokens: int, batch: int = 1) -> list[list[int]]:
    """What eager plain decoding makes of every prompt, without an end token."""
    asked = [Request(prompt, max_new_tokens) for prompt in prompts]
    made = dict(PlainDecoder(target, batch=batch).generate_all(asked))
    return [made[number].ids for number in range(len(asked))]


def check_greedy(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompts: Sequence[list[int]],
    wanted: Sequence[list[int]],
    *,
    batch: int = 1,
    compiled: bool = False,
) -> GreedyCheck:
    """Decode every prompt speculatively, without an end token, and compare all tokens.

    Args:
        wanted: plain decoding's, see :func:`plain_tokens`.
    """
    asked = [Request(prompt, len(ids)) for prompt, ids in zip(prompts, wanted, strict=True)]
    decoder = SpeculativeDecoder(target, drafter, growth, batch=batch, compiled=compiled)
    made, found = compared(decoder, asked, wanted)
    passes = [count for one in made for count in one.accepted]
    near_ties, wrong = (tuple(one for one in found if one.near_tie == near) for near in (True, False))
    return GreedyCheck(growth.name, sum(map(len, wanted)), sum(passes), len(passes), near_ties, wrong)


def compared(
    decoder: SpeculativeDecoder,
    requests: Sequence[Request],
    wanted: Sequence[list[int]],
    end: Collection[int] = (),
    told: Callable[[int], None] = lambda tokens: None,
) -> tuple[list[Generation], list[Difference]]:
    """Decode every request; behind a token that differs it goes on from the wanted text, so that all are compared.

    Args:
        wanted: plain decoding's new tokens of each request.
        end: the tokens that end a text.
        told: called with how many more tokens have been compared.

    Returns:
        What was made of each request at first, and every difference.
    """
    first, found = dict[int, Generation](), list[Difference]()
    left = [(number, 0) for number in range(len(requests))]  # and how many tokens of it are compared
    while left:
        rest = [
            Request([*requests[n].prompt, *wanted[n][:done]], requests[n].max_new_tokens - done) for n, done in left
        ]
        further = []
        for index, made in decoder.generate_all(rest, end):
            number, done = left[index]
            first.setdefault(number, made)
            more = wanted[number][done:]
            agreed = next((i for i, token in enumerate(more) if made.ids[i : i + 1] != [token]), len(more))
            told(min(agreed + 1, len(more)))
            if agreed == len(more) == len(made.ids):
                continue
            at = done + agreed
            token, plain_token = (ids[0] if ids else -1 for ids in (made.ids[agreed:], more[agreed:]))
            text = [*requests[number].prompt, *wanted[number][:at]]
            found.append(Difference.of(decoder.target, number, text, at, token, plain_token))
            if at + 1 < len(wanted[number]):
                further.append((number, at + 1))
        left = further
    return [first[number] for number in range(len(requests))], found


def logits_after(target: Target, ids_BT: Tensor) -> Tensor:
    """The target's logits after the last token of each row, (B, T) int64 to (B, V)."""
    ids_BT = ids_BT.to(target.device)
    view = View.packed(torch.zeros_like(ids_BT))
    return target.logits(target.forward(ids_BT, view, ()).final_BTH[:, -1:])[:, 0]
