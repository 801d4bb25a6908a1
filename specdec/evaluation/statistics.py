"""Acceptance, speed and their uncertainty, from answers.

Legend: P prompts, R resamples.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.evaluation.record import Answer

RESAMPLES = 5000
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory of the bootstrap, whatever the number of prompts


class Interval(NamedTuple):
    """A mean with its 95 % interval; no interval (None) from fewer than two prompts."""

    mean: float
    low: float | None
    high: float | None


class Positions(NamedTuple):
    """Acceptance by draft position k = 1, 2, ..., to the deepest draft."""

    joint: list[float]
    """Share of target passes that accepted at least k drafts."""
    conditional: list[float | None]
    """The same among passes that accepted k - 1; None where there is no such pass."""


class Rates(NamedTuple):
    """Tokens per second, pooled over answers; None where no time was measured."""

    speculative: float | None
    plain: float | None

    @property
    def speedup(self) -> float | None:
        """Ratio of the two rates; None where one is missing or plain decoding produced nothing."""
        return self.speculative / self.plain if self.speculative is not None and self.plain else None


def acceptance_length(answers: Sequence[Answer], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Tokens committed per target pass, bonus token included, pooled over all passes.

    The interval is a percentile bootstrap that resamples prompts, not passes: passes of one prompt are alike.

    Raises:
        ValueError: the answers hold no target pass.
    """
    committed: dict[str, int] = {}
    passes: dict[str, int] = {}
    for answer in answers:
        name = answer.prompt_id
        committed[name] = committed.get(name, 0) + sum(_accepted(answer)) + len(answer.accepted)
        passes[name] = passes.get(name, 0) + len(answer.accepted)
    names = [name for name, count in passes.items() if count]
    if not names:
        raise ValueError("no target pass to take statistics of: decode at least one prompt, with more new tokens")
    return _pooled([committed[name] for name in names], [passes[name] for name in names], seed, resamples)


def accepted_per_position(answers: Sequence[Answer]) -> Positions:
    """Joint and conditional acceptance by position; acceptance length = 1 + the sum of the joint ones.

    Raises:
        ValueError: the answers hold no target pass.
    """
    counts = histogram(answers)
    passes = sum(counts)
    if not passes:
        raise ValueError("no target pass to take statistics of: decode at least one prompt, with more new tokens")
    reached = [sum(counts[k:]) for k in range(len(counts))]  # passes with at least k accepted, from k = 0
    return Positions(
        joint=[count / passes for count in reached[1:]],
        conditional=[now / before if before else None for before, now in itertools.pairwise(reached)],
    )


def histogram(answers: Sequence[Answer]) -> list[int]:
    """Number of target passes by accepted drafts: 0, 1, ..., the deepest draft."""
    accepted = [count for answer in answers for count in _accepted(answer)]
    deepest = max((depth for answer in answers for depth in answer.drafted), default=0)
    return np.bincount(np.array(accepted, dtype=np.int64), minlength=deepest + 1).tolist()


def tokens_per_second(answers: Sequence[Answer]) -> Rates:
    """All tokens over all seconds, of speculative and of plain decoding."""
    return Rates(
        _rate(sum(answer.tokens for answer in answers), sum(answer.seconds for answer in answers)),
        _rate(sum(answer.plain_tokens for answer in answers), sum(answer.plain_seconds for answer in answers)),
    )


def speedup_per_prompt(answers: Sequence[Answer], seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """Mean over prompts of each prompt's own speed-up, with an interval over prompts; None: nothing to compare."""
    turns: dict[str, list[Answer]] = {}
    for answer in answers:
        turns.setdefault(answer.prompt_id, []).append(answer)
    ratios = [tokens_per_second(group).speedup for group in turns.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    return _pooled(known, [1] * len(known), seed, resamples) if known else None


def _accepted(answer: Answer) -> tuple[int, ...]:
    assert len(answer.accepted) == len(answer.drafted), f"{answer.prompt_id}: passes and drafts differ in number"
    assert all(0 <= got <= depth for got, depth in zip(answer.accepted, answer.drafted, strict=True)), (
        f"{answer.prompt_id}: more accepted than drafted"
    )
    return answer.accepted


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _pooled(sums: Sequence[float], counts: Sequence[int], seed: int, resamples: int) -> Interval:
    """Sum of the sums over sum of the counts, one of each per prompt, and its bootstrap interval."""
    sums_P, counts_P = np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64)
    mean = float(sums_P.sum() / counts_P.sum())
    prompts = len(sums_P)
    if prompts < 2:
        return Interval(mean, None, None)
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_AT_ONCE // prompts)
    means: list[npt.NDArray[np.float64]] = []
    for start in range(0, resamples, rows):
        chosen_RP = generator.integers(prompts, size=(min(rows, resamples - start), prompts))
        means.append(sums_P[chosen_RP].sum(1) / counts_P[chosen_RP].sum(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return Interval(mean, float(low), float(high))
