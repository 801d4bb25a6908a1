"""Which combinations of levels are run: all, one change at a time, or a fraction."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.sweep.axes import Axis
from specdec.sweep.fractions import ROMAN, Fraction, halvings
from specdec.sweep.reading import check_keys, nearest

DESIGNS = ("grid", "one_factor", "fractional")
Combination = dict[str, str]  # axis to level


@dataclass(frozen=True)
class Design:
    """The arms as combinations of levels, and of a fraction how it came about."""

    name: str
    combinations: tuple[Combination, ...]
    fraction: str | None = None
    generators: tuple[str, ...] = ()
    resolution: str | None = None
    aliases: Mapping[str, Sequence[str]] | None = None


def design(
    given: Any,
    axes: Sequence[Axis],
    baseline: Combination,
    left_out: Sequence[Combination],
) -> Design:
    """The arms of a study.

    Args:
        given: ``grid``, ``one_factor`` or ``{fractional: 1/2}``.
        baseline: a level of every axis.
        left_out: levels of some axes; an arm that has all of them is not run.

    Raises:
        ValueError: there is no such design, it does not suit the axes, or what is left out leaves nothing, or
            leaves nothing out, or takes the baseline away.
    """
    made = _made(given, axes, baseline)
    for each in left_out:
        if not any(_has(combination, each) for combination in made.combinations):
            raise ValueError(f"leave_out: {arm_name(each)} is in no arm of this design: remove it")
    if left_out and made.generators:
        raise ValueError("leave_out: a fraction has no arms to spare; give the axes other levels, or take a grid")
    kept = tuple(each for each in made.combinations if not any(_has(each, out) for out in left_out))
    if not kept:
        raise ValueError(f"leave_out: nothing is left of {len(made.combinations)} arms")
    if baseline not in kept:
        raise ValueError(f"the baseline, arm {arm_name(baseline)}, is left out: choose another baseline")
    return dataclasses.replace(made, combinations=kept)


def arm_name(combination: Combination) -> str:
    """What an arm is called: its levels in the order of the axes."""
    return " ".join(f"{axis}={level}" for axis, level in combination.items())


def _made(given: Any, axes: Sequence[Axis], baseline: Combination) -> Design:
    names = [axis.name for axis in axes]
    if given == "grid":
        grid = itertools.product(*(axis.names for axis in axes))
        return Design("grid", tuple(dict(zip(names, levels, strict=True)) for levels in grid))
    if given == "one_factor":
        changes = ({axis.name: level} for axis in axes for level in axis.names if level != baseline[axis.name])
        return Design("one_factor", (dict(baseline), *({**baseline, **change} for change in changes)))
    if isinstance(given, dict) and given:
        return _fractional(str(check_keys(given, ["fractional"], "design")["fractional"]), axes, baseline)
    raise ValueError(
        f"design: no such design: {given}{nearest(str(given), DESIGNS)} (a fraction as {{fractional: 1/2}})"
    )


def _fractional(text: str, axes: Sequence[Axis], baseline: Combination) -> Design:
    count = halvings(text)
    if count is None:
        raise ValueError(f"design: fractional: {text}: must be 1/2, 1/4, 1/8 or 1/2^p")
    if wide := next((axis for axis in axes if len(axis.names) != 2), None):
        raise ValueError(
            f"design: fractional: axis {wide.name} has {len(wide.names)} levels ({', '.join(wide.names)}); a fraction "
            "is of axes with two: leave levels out, or take a grid or one_factor"
        )
    fraction = Fraction.of([axis.name for axis in axes], count)
    others = {axis.name: next(level for level in axis.names if level != baseline[axis.name]) for axis in axes}
    combinations = tuple(
        {axis.name: (baseline if sign > 0 else others)[axis.name] for axis, sign in zip(axes, signs, strict=True)}
        for signs in fraction.signs()
    )
    resolution = ROMAN[fraction.resolution]
    generators = tuple(fraction.described())
    return Design("fractional", combinations, f"1/{2**count}", generators, resolution, fraction.aliases())


def _has(combination: Combination, part: Combination) -> bool:
    return all(combination[axis] == level for axis, level in part.items())
