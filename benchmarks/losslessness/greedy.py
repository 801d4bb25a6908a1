"""Speculative tokens beside plain decoding's, one by one, in batches too.

Legend: T tokens.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.decoding import Growth, PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.greedy_check import Difference, compared
from specdec.target import Target

Told = Callable[[int], None]
"""Called with the tokens that were compared."""


class Way(NamedTuple):
    """How texts are decoded."""

    growth: Growth
    batch: int
    compiled: bool = False


class Case(NamedTuple):
    """One way of decoding on one target, over all its prompts."""

    target: str
    dtype: str
    growth: str
    batch: int
    compiled: bool
    prompts: int
    tokens: int  # compared, those of the runs with an end token included
    passes: int
    accepted: int  # drafts that were taken
    ended_inside: int  # runs whose end token was an accepted draft with further accepted ones behind it
    near_ties: tuple[Difference, ...]
    wrong: tuple[Difference, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, the bonus token included."""
        return 1 + self.accepted / max(1, self.passes)

    @property
    def how(self) -> str:
        """``compiled`` or ``eagerly``."""
        return "compiled" if self.compiled else "eagerly"

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        differences = {name: [d._asdict() for d in getattr(self, name)] for name in ("near_ties", "wrong")}
        return self._asdict() | {"acceptance_length": self.acceptance_length} | differences


class Plain(NamedTuple):
    """What plain decoding says, one text at a time."""

    requests: list[Request]
    whole: list[list[int]]  # new tokens
    ends: frozenset[int]
    ended: list[list[int]]  # the same up to an end token


def plain(target: Target, drafter: Drafter, growth: Growth, requests: list[Request]) -> Plain:
    """Decode plainly; the end token is the one that ``growth`` accepts in the midst of a run in the most texts."""
    decoder = PlainDecoder(target)
    whole = [decoder.generate(*request[:2]).ids for request in requests]
    inside = Counter[int]()
    for request, ids in zip(requests, whole, strict=True):
        made, at = SpeculativeDecoder(target, drafter, growth).generate(*request[:2]), 1
        for count in made.accepted:
            run = ids[at : at + count - 1]  # drafts with another accepted one behind them
            inside.update(token for place, token in enumerate(run, at) if token not in ids[:place])
            at += count + 1
    ends = frozenset(token for token, _ in inside.most_common(1))
    return Plain(requests, whole, ends, [decoder.generate(*r[:2], ends).ids for r in requests])


def check(name: str, target: Target, drafter: Drafter, how: Way, wanted: Plain, told: Told) -> Case:
    """Decode all prompts twice, without an end token and with one, and compare every token."""
    decoder = SpeculativeDecoder(target, drafter, how.growth, batch=how.batch, compiled=how.compiled)
    decoder.prepare(max(len(request.prompt) + request.max_new_tokens for request in wanted.requests))
    whole, first = compared(decoder, wanted.requests, wanted.whole, (), told)
    ended, second = compared(decoder, wanted.requests, wanted.ended, wanted.ends, told)
    found = [*first, *second]
    inside = 0
    for cut, full in zip(ended, whole, strict=True):
        last = len(cut.accepted) - 1
        alike = last >= 0 and cut.accepted[:last] == full.accepted[:last]  # not so behind a near-tie
        inside += alike and cut.ids[-1] in wanted.ends and cut.accepted[last] < full.accepted[last]
    passes = [count for made in whole for count in made.accepted]
    return Case(
        target=name,
        dtype=str(target.dtype).removeprefix("torch."),
        growth=how.growth.name,
        batch=how.batch,
        compiled=how.compiled,
        prompts=len(wanted.requests),
        tokens=sum(len(ids) for ids in (*wanted.whole, *wanted.ended)),
        passes=len(passes),
        accepted=sum(passes),
        ended_inside=inside,
        near_ties=tuple(one for one in found if one.near_tie),
        wrong=tuple(one for one in found if not one.near_tie),
    )
