"""Counts of target passes by seed, prompt and accepted drafts: what acceptance is worked out from.

Legend: S seeds, P prompts, K one more than the deepest draft.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.card.linear import Linear, pooled
from specdec.card.study import Arm, common
from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import Array


class Counts(NamedTuple):
    """Of one arm, with one growth."""

    seeds: list[int]
    prompts: list[str]
    accepted_SPK: Array
    """Target passes that accepted k drafts."""
    speed_SP4: Array
    """New tokens and seconds, and both of plain decoding; 0 where not measured."""

    def of(self, seeds: Sequence[int], prompts: Sequence[str]) -> "Counts":
        """Of some seeds and prompts, in this order."""
        at = np.ix_([self.seeds.index(seed) for seed in seeds], [self.prompts.index(prompt) for prompt in prompts])
        return Counts(list(seeds), list(prompts), self.accepted_SPK[at], self.speed_SP4[at])

    @property
    def depth(self) -> int:
        """The deepest draft."""
        return self.accepted_SPK.shape[-1] - 1

    def length(self) -> Linear | None:
        """Acceptance length, bonus token included, pooled over passes."""
        committed_SP = self.accepted_SPK @ np.arange(1.0, self.depth + 2)
        return pooled(committed_SP, self.accepted_SPK.sum(-1))

    def conditional(self, first: int, last: int) -> Linear | None:
        """Acceptance at positions ``first`` to ``last`` (from 1) of the passes that came so far, pooled."""
        reached_SPK = self.accepted_SPK[..., ::-1].cumsum(-1)[..., ::-1]  # passes that accepted k and more
        return pooled(reached_SPK[..., first : last + 1].sum(-1), reached_SPK[..., first - 1 : last].sum(-1))

    def joint(self, position: int) -> Linear | None:
        """Share of passes that accepted so many drafts and more."""
        return pooled(self.accepted_SPK[..., position:].sum(-1), self.accepted_SPK.sum(-1))

    def rate(self) -> Linear | None:
        """New tokens per second."""
        return pooled(self.speed_SP4[..., 0], self.speed_SP4[..., 1])

    def speedup(self) -> Linear | None:
        """New tokens per second over those of plain decoding in the same process; None where not all were measured."""
        if not (self.speed_SP4 > 0).all():
            return None
        plain, own = pooled(self.speed_SP4[..., 2], self.speed_SP4[..., 3]), self.rate()
        return own.over(plain) if own and plain else None


def counted(arm: Arm) -> dict[str, Counts]:
    """By growth, of the seeds whose evaluation is done and of the prompts that they share."""
    runs = arm.done("evaluate")
    growths = common([list(run.evaluation.answers) for run in runs])
    seeds = [run.seed for run in runs]
    return {name: _counts(seeds, [run.evaluation.answers[name] for run in runs]) for name in growths}


def _counts(seeds: list[int], answers: Sequence[Sequence[Answer]]) -> Counts:
    names = [list(dict.fromkeys(answer.prompt_id for answer in each)) for each in answers]
    prompts = common(names)
    place = {prompt: number for number, prompt in enumerate(prompts)}
    deepest = max((depth for each in answers for answer in each for depth in answer.drafted), default=0)
    accepted_SPK = np.zeros((len(seeds), len(prompts), deepest + 1))
    speed_SP4 = np.zeros((len(seeds), len(prompts), 4))
    for row, each in enumerate(answers):
        for answer in each:
            if answer.prompt_id in place:
                at = row, place[answer.prompt_id]
                accepted_SPK[at] += np.bincount(answer.accepted, minlength=deepest + 1)
                speed_SP4[at] += (answer.tokens, answer.seconds, answer.plain_tokens, answer.plain_seconds)
    return Counts(seeds, prompts, accepted_SPK, speed_SP4)
