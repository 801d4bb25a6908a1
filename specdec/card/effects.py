"""Main effects and interactions of a study's axes, as far as its arms can tell them apart.

The effect of a level is its figure less that of the axis' level in the baseline, averaged over the other axes.
An interaction of two levels is a difference of differences: what both together do beyond the sum of what each does.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec.card.crossed import estimate
from specdec.card.linear import Linear, weighted
from specdec.card.study import Study

Levels = tuple[tuple[str, str], ...]
"""Axes and levels, in the order of the axes."""


class Effect(NamedTuple):
    """A contrast of arms."""

    terms: Levels
    """One axis with its level for a main effect, two for an interaction."""
    weights: dict[Levels, float]
    """Of the arms."""
    aliases: list[str]
    """What else the arms cannot tell it from."""

    @property
    def name(self) -> str:
        """The levels, and their axes."""
        return " x ".join(f"{axis}={level}" for axis, level in self.terms)


def effects(
    axes: Mapping[str, Sequence[str]], baseline: Mapping[str, str], arms: Sequence[Mapping[str, str]]
) -> list[Effect]:
    """All main effects and two-way interactions that these arms support.

    In a grid with combinations left out or missing, an effect is averaged over those levels of the other axes
    at which all that it needs is there. In a fraction of a two-level grid it is the difference between the two halves
    of the arms, with the other effects of which that is the difference too; none where arms of it are missing.
    """
    varied = {axis: _first(levels, baseline.get(axis)) for axis, levels in axes.items() if len(levels) > 1}
    present = {tuple((axis, arm[axis]) for axis in varied) for arm in arms}
    found = [
        effect
        for size in (1, 2)
        for chosen in itertools.combinations(varied, size)
        for terms in itertools.product(*([(axis, level) for level in varied[axis][1:]] for axis in chosen))
        if (effect := _full(terms, varied, present))
    ]
    halves = all(len(levels) == 2 for levels in varied.values())
    if not any(len(effect.terms) == 1 for effect in found) and halves and len(varied) > 1:
        return _fraction(varied, present)
    return found


def _first(levels: Sequence[str], first: str | None) -> list[str]:
    start = first if first is not None and first in levels else levels[0]
    return [start, *(level for level in levels if level != start)]


def _full(terms: Levels, varied: Mapping[str, Sequence[str]], present: set[Levels]) -> Effect | None:
    """From the corners of the terms, at all levels of the other axes where every corner is there."""
    own = dict(terms)
    rest = [axis for axis in varied if axis not in own]
    weights: dict[Levels, float] = {}
    for others in itertools.product(*(varied[axis] for axis in rest)):
        corners: dict[Levels, float] = {}
        for high in itertools.product((False, True), repeat=len(own)):
            chosen = {axis: own[axis] if up else varied[axis][0] for axis, up in zip(own, high, strict=True)}
            chosen |= dict(zip(rest, others, strict=True))
            corners[tuple((axis, chosen[axis]) for axis in varied)] = (-1.0) ** (len(own) - sum(high))
        if set(corners) <= present:
            weights |= corners
    places = len(weights) // 2 ** len(own)
    return Effect(terms, {arm: weight / places for arm, weight in weights.items()}, []) if places else None


def _fraction(varied: Mapping[str, Sequence[str]], present: set[Levels]) -> list[Effect]:
    signs: dict[Levels, dict[Levels, int]] = {}
    moving = [axis for axis in varied if len({dict(arm)[axis] for arm in present}) > 1]
    if not moving:
        return []
    for size in range(1, len(moving) + 1):
        for chosen in itertools.combinations(moving, size):
            terms = tuple((axis, varied[axis][1]) for axis in chosen)
            signs[terms] = {arm: _sign(arm, terms) for arm in present}
    if not _regular([column for terms, column in signs.items() if len(terms) <= 2]):
        return []
    out = []
    for terms, column in signs.items():
        if len(terms) > 2 or abs(sum(column.values())) == len(present):  # the defining relation itself
            continue
        scale = 2.0 ** (len(terms) - 1)  # a difference of differences is twice the halves' difference
        weights = {arm: scale * sign / (len(present) / 2) for arm, sign in column.items()}
        aliases = [
            ("" if _equal(column, other, 1) else "minus ") + " x ".join(axis for axis, _ in names)
            for names, other in signs.items()
            if names != terms and (_equal(column, other, 1) or _equal(column, other, -1))
        ]
        out.append(Effect(terms, weights, aliases))
    return out


def _regular(columns: Sequence[Mapping[Levels, int]]) -> bool:
    """Whether any two effects are wholly apart or wholly the same; where arms are missing they are mixed in part."""
    constant = dict.fromkeys(columns[0], 1)
    pairs = itertools.combinations([constant, *columns], 2)
    return all(abs(sum(one[arm] * two[arm] for arm in constant)) in (0, len(constant)) for one, two in pairs)


def _sign(arm: Levels, terms: Levels) -> int:
    low = sum(level not in [at for axis, at in arm if axis == name] for name, level in terms)
    return -1 if low % 2 else 1


def _equal(one: Mapping[Levels, int], two: Mapping[Levels, int], sign: int) -> bool:
    return all(one[arm] == sign * two[arm] for arm in one)


def effects_on(study: Study, figures: Mapping[str, Linear]) -> list[dict[str, Any]]:
    """Of a study's axes, as :func:`measured`; none where there is one axis, whose comparisons say the same.

    Args:
        figures: by arm, of the same seeds and prompts; arms without one are left out.
    """
    axes = [axis for axis, levels in study.axes.items() if len(levels) > 1]
    if study.design == "one_factor" or len(axes) < 2:
        return []
    own = {tuple((axis, arm.levels[axis]) for axis in axes): figures[arm.name]
           for arm in study.arms if arm.name in figures}  # fmt: skip
    found = effects(study.axes, study.baseline or study.base.levels, [dict(levels) for levels in own])
    return [measured(effect, own) for effect in found]


def measured(effect: Effect, figures: Mapping[Levels, Linear]) -> dict[str, Any]:
    """The effect with its interval, from the arms' figures of the same seeds and prompts."""
    arms = list(effect.weights)
    found = estimate(weighted([figures[arm] for arm in arms], [effect.weights[arm] for arm in arms]), null=0.0)
    return {
        "effect": effect.name,
        "kind": "main" if len(effect.terms) == 1 else "interaction",
        "arms": len(arms),
        "aliases": effect.aliases,
        **found.to_json(),
    }
