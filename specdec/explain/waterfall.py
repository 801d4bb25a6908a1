"""Levels, the bars between them, and the check that they add up to what decoding accepts.

Legend: P prompts, F sums kept of each.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from specdec.evaluation.statistics import Array, Interval, interval, ratio
from specdec.explain.levels import RUNS

OWN_TOKENS, OBSERVED = "own_tokens", "observed"
DOWN = (*RUNS, OWN_TOKENS)
INVISIBLE = 0.01  # tokens per target pass, which no figure shows


class Level(NamedTuple):
    """What is accepted under some conditions."""

    name: str
    accepted: list[list[int]]
    """Drafts, of every pass of every prompt."""
    everywhere: list[list[int]] | None = None
    """The same at every place, where that was measured."""

    @property
    def sums_P2(self) -> Array:  # noqa: N802  shapes are part of names
        """Tokens committed, and passes, of every prompt."""
        return np.array([(sum(own) + len(own), len(own)) for own in self.accepted], dtype=np.float64)

    @property
    def length(self) -> Interval:
        """Tokens committed per pass.

        Raises:
            ValueError: there is none.
        """
        sums_P2 = self.sums_P2
        found = interval(sums_P2[sums_P2[:, 1] > 0])
        if found is None:
            raise ValueError(f"{self.name}: no target pass to measure: give prompts with longer answers")
        return found

    def joint(self, depth: int) -> list[float]:
        """Share of passes that accept at least k drafts, for k = 1 to ``depth``."""
        every = np.array([count for own in self.accepted for count in own])
        return [float((every >= k).mean()) for k in range(1, depth + 1)]

    def less(self, other: "Level") -> Interval:
        """This level's acceptance length less another's; prompts are drawn for both alike.

        Raises:
            ValueError: no prompt has passes on both.
        """
        sums_P4 = np.concatenate([self.sums_P2, other.sums_P2], axis=1)
        both = sums_P4[(sums_P4[:, 1] > 0) & (sums_P4[:, 3] > 0)]
        found = interval(both, lambda sums: ratio(sums[..., :2]) - ratio(sums[..., 2:]))
        if found is None:
            raise ValueError(f"{self.name} and {other.name}: no prompt has a target pass in both")
        return found


class Bar(NamedTuple):
    """What the step from one level to another costs."""

    upper: str
    name: str
    """The level that it leads to."""
    loss: Interval
    """In tokens per target pass; below zero where something is won."""


class Check(NamedTuple):
    """The last level of the waterfall beside what decoding accepts."""

    difference: Interval
    """``own_tokens`` less ``observed``, paired by prompt."""
    passes: int
    """Of decoding."""
    same: int
    """Of them, those that accept what the level says, in prompts with equally many passes."""

    @property
    def holds(self) -> bool:
        """Whether the difference may be zero."""
        mean, low, high = self.difference
        if low is None or high is None:
            return mean == 0
        return abs(mean) < INVISIBLE or low <= 0 <= high


class Waterfall(NamedTuple):
    """All that was measured."""

    levels: list[Level]
    """Those of :data:`DOWN`, then ``observed``, then what lies beyond decoding."""

    @property
    def by_name(self) -> dict[str, Level]:
        """The levels."""
        return {level.name: level for level in self.levels}

    @property
    def bars(self) -> list[Bar]:
        """Those that lead to ``own_tokens``; they add up."""
        return [self._bar(upper, lower) for upper, lower in itertools.pairwise(DOWN)]

    @property
    def beyond(self) -> list[Bar]:
        """Each beside ``observed``."""
        return [self._bar(OBSERVED, level.name) for level in self.levels[len(DOWN) + 1 :]]

    @property
    def check(self) -> Check:
        """Whether the bars explain what decodes."""
        ours, observed = self.by_name[OWN_TOKENS], self.by_name[OBSERVED]
        alike = [pair for pair in zip(ours.accepted, observed.accepted, strict=True) if len(pair[0]) == len(pair[1])]
        same = sum(a == b for one, two in alike for a, b in zip(one, two, strict=True))
        return Check(ours.less(observed), sum(map(len, observed.accepted)), same)

    def _bar(self, upper: str, lower: str) -> Bar:
        levels = self.by_name
        return Bar(upper, lower, levels[upper].less(levels[lower]))

    def told(self, depth: int) -> dict[str, Any]:
        """JSON-ready."""
        check = self.check
        return {
            "levels": [_told_level(level, depth) for level in self.levels],
            "bars": [_told_bar(bar) for bar in self.bars],
            "beyond": [_told_bar(bar) for bar in self.beyond],
            "check": {
                "holds": check.holds,
                "difference": check.difference._asdict(),
                "passes": check.passes,
                "same_passes": check.same,
            },
        }


def _told_level(level: Level, depth: int) -> dict[str, Any]:
    everywhere = None if level.everywhere is None else Level(level.name, level.everywhere).length
    return {
        "name": level.name,
        "acceptance_length": level.length._asdict(),
        "every_place": everywhere._asdict() if everywhere else None,
        "joint": level.joint(depth),
        "committed": [sum(own) + len(own) for own in level.accepted],
        "passes": [len(own) for own in level.accepted],
    }


def _told_bar(bar: Bar) -> dict[str, Any]:
    return {"from": bar.upper, "to": bar.name, "loss": bar.loss._asdict()}
