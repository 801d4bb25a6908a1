"""What is measured by decoding, as torchmetrics. ``docs/metrics.md`` defines every number.

Legend: Q target passes, P prompts.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torchmetrics import MetricCollection

from specdec.evaluation.answer_metric import AnswerMetric, measured, speedup
from specdec.evaluation.statistics import Interval
from specdec.evaluation.table import Passes, per_prompt

CONTEXT_EDGES = tuple(2**power for power in range(7, 18))  # 128 to 131,072 tokens


class Positions(NamedTuple):
    """Acceptance by draft position k = 1, 2, ..., to the deepest draft."""

    joint: list[float]
    """Share of target passes that accepted at least k drafts; empty without a pass."""
    conditional: list[float | None]
    """The same among passes that accepted k - 1; None where there is no such pass."""


class PassTimes(NamedTuple):
    """Milliseconds per target pass; None where not measured."""

    draft_ms: Interval | None
    verify_ms: Interval | None


class Rates(NamedTuple):
    """Tokens per second, pooled over answers; None where no time was measured."""

    speculative: float | None
    plain: float | None


class Group(NamedTuple):
    """Some of the passes and answers."""

    name: str
    prompts: int
    passes: int
    acceptance_length: Interval | None
    speedup: Interval | None


class AcceptanceLength(AnswerMetric):
    """Tokens committed per target pass, bonus token included, pooled over passes."""

    def compute(self) -> Interval | None:
        return self.length(self.every_pass())


class AcceptedDrafts(AnswerMetric):
    """Drafts accepted per target pass, without the bonus token: acceptance length less one."""

    def compute(self) -> Interval | None:
        passes = self.every_pass()
        return self.interval(per_prompt(passes.prompt, passes.accepted, 1))


class DraftAcceptanceRate(AnswerMetric):
    """Drafts accepted over those of every pass's longest path."""

    def compute(self) -> Interval | None:
        passes = self.every_pass()
        sums_P2 = per_prompt(passes.prompt, passes.accepted, passes.drafted)
        return self.interval(sums_P2[sums_P2[:, 1] > 0])


class AcceptedHistogram(AnswerMetric):
    """Number of target passes by accepted drafts: 0, 1, ..., the deepest draft."""

    def compute(self) -> list[int]:
        return _histogram(self.every_pass())


class AcceptedPerPosition(AnswerMetric):
    """Joint and conditional acceptance by position; acceptance length is 1 + the sum of the joint ones."""

    def compute(self) -> Positions:
        counts = _histogram(self.every_pass())
        reached = [sum(counts[k:]) for k in range(len(counts))]  # passes with at least k accepted, from k = 0
        if not reached[0]:
            return Positions([], [])
        return Positions(
            joint=[count / reached[0] for count in reached[1:]],
            conditional=[now / before if before else None for before, now in itertools.pairwise(reached)],
        )


class PassTime(AnswerMetric):
    """Milliseconds of drafting and of verification per target pass."""

    def compute(self) -> PassTimes:
        passes, times = self.every_pass(), []
        for ns_Q in (passes.draft_ns, passes.verify_ns):
            known_Q = ns_Q >= 0
            sums_P2 = per_prompt(passes.prompt[known_Q], ns_Q[known_Q], 1)
            times.append(self.interval(sums_P2 / (1e6, 1)))
        return PassTimes(*times)


class TokensPerSecond(AnswerMetric):
    """All tokens over all seconds, of speculative and of plain decoding."""

    def compute(self) -> Rates:
        turns = self.every_turn()
        return Rates(
            _rate(turns.tokens.sum(), turns.nanoseconds.sum()),
            _rate(turns.plain_tokens.sum(), turns.plain_nanoseconds.sum()),
        )


class Speedup(AnswerMetric):
    """Ratio of the two pooled rates, of prompts decoded both ways."""

    def compute(self) -> Interval | None:
        return self.pooled_speedup(self.every_turn())


class SpeedupPerPrompt(AnswerMetric):
    """Mean over prompts of each prompt's own speed-up, all its turns together."""

    def compute(self) -> Interval | None:
        ratio_P = speedup(measured(self.every_turn()))
        return self.interval(np.stack([ratio_P, np.ones_like(ratio_P)], axis=-1))


class ByCategory(AnswerMetric):
    """Acceptance length and speed-up of every category that has an answer, in the order of ``categories``."""

    def compute(self) -> list[Group]:
        passes, turns, out = self.every_pass(), self.every_turn(), []
        for index, name in enumerate(self.categories or []):
            own, answered = passes.where(passes.category == index), turns.where(turns.category == index)
            if prompts := len(np.unique(answered.prompt)):
                out.append(Group(name, prompts, len(own.prompt), self.length(own), self.pooled_speedup(answered)))
        return out


class ByContext(AnswerMetric):
    """Acceptance length by committed tokens before the pass, in buckets that double; empty where not recorded."""

    def compute(self) -> list[Group]:
        passes, out = self.every_pass(), []
        for low, high in itertools.pairwise((0, *CONTEXT_EDGES, np.iinfo(np.int64).max)):
            own = passes.where((low <= passes.context) & (passes.context < high))
            if len(own.prompt):
                name = f"{low}-{high - 1}" if high in CONTEXT_EDGES else f"{low} and more"
                out.append(Group(name, len(np.unique(own.prompt)), len(own.prompt), self.length(own), None))
        return out


METRICS: dict[str, type[AnswerMetric]] = {
    "acceptance_length": AcceptanceLength,
    "accepted_drafts": AcceptedDrafts,
    "draft_acceptance_rate": DraftAcceptanceRate,
    "accepted_per_position": AcceptedPerPosition,
    "histogram": AcceptedHistogram,
    "pass_time": PassTime,
    "tokens_per_second": TokensPerSecond,
    "speedup": Speedup,
    "speedup_per_prompt": SpeedupPerPrompt,
    "by_category": ByCategory,
    "by_context": ByContext,
}


def decoding_metrics(categories: Sequence[str] | None = None, only: Sequence[str] = tuple(METRICS)) -> MetricCollection:
    """The metrics by the names that ``metrics.json`` gives them; the answers are kept once for all.

    Args:
        categories: as of :class:`AnswerMetric`.
        only: some of the names.
    """
    metrics: dict[str, Any] = {name: METRICS[name](categories) for name in only}
    return MetricCollection(metrics, compute_groups=[list(only)])


def _histogram(passes: Passes) -> list[int]:
    deepest = int(passes.drafted.max(initial=0))
    return np.bincount(passes.accepted, minlength=deepest + 1).tolist()


def _rate(tokens: Any, nanoseconds: Any) -> float | None:
    return float(tokens / (nanoseconds / 1e9)) if nanoseconds else None
