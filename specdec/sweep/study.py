"""STUDY.yaml: what is asked, which design answers it, and what is measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdec.sweep.axes import MEASURES, Axis, Setting, check_levels, config_file, read_axes, read_settings
from specdec.sweep.designs import Combination, Design, design
from specdec.sweep.reading import check_keys, read

FEATURES = ("cached", "on_the_fly")
FEWEST_SEEDS = 3
KEYS = ("name", "fit", "set", "axes", "design", "baseline", "leave_out", "seeds", "features", *MEASURES)


@dataclass(frozen=True)
class Study:
    """A study as read; nothing in it has been parsed as a training yet.

    Args:
        files: config files of every arm, later ones win.
        settings: dotted keys of every arm, over which levels win.
        measures: by name the arguments of the command that measures.
        text: the study written out, with every name of a file found.
    """

    name: str
    files: tuple[str, ...]
    settings: tuple[Setting, ...]
    axes: tuple[Axis, ...]
    design: Design
    baseline: Combination
    seeds: tuple[int, ...]
    features: str
    measures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    text: str = ""


def read_study(path: Path | str, allow_few_seeds: bool = False) -> Study:
    """Read a study.

    Raises:
        ValueError: it cannot be read or is wrong; the message says where and what to do.
    """
    given = read(path)
    try:
        return _study(check_keys(given, KEYS, "study"), Path(path).parent, allow_few_seeds)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _study(given: dict[str, Any], beside: Path, allow_few_seeds: bool) -> Study:
    name = given.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError("name: a study needs a name of letters, digits and . _ + - alone, which names its directory")
    axes = read_axes(given.get("axes"), beside)
    files = tuple(config_file(each, "fit", beside) for each in _texts(given.get("fit", []), "fit"))
    settings = tuple(read_settings(given.get("set") or {}, "set"))
    if wrong := next((each.key for each in settings if each.measure), None):
        raise ValueError(f"set: {wrong}: what holds for the measures of all arms belongs in {wrong.partition('.')[0]}")
    asked = check_levels(given.get("baseline") or {}, axes, "baseline")
    kind = given.get("design", "grid")
    if missing := [axis.name for axis in axes if axis.name not in asked]:
        if asked or kind == "one_factor":
            raise ValueError(
                f"baseline: give a level of {missing[0]} too; it has: {', '.join(axis_of(axes, missing[0]).names)}"
            )
        asked = {axis.name: axis.names[0] for axis in axes}
    baseline = {axis.name: asked[axis.name] for axis in axes}
    features = given.get("features", "cached")
    if features not in FEATURES:
        raise ValueError(f"features: must be {' or '.join(FEATURES)}, not {features}")
    measures = {}
    for measure in MEASURES:
        if measure in given:
            measures[measure] = check_measure(given[measure], measure)
    left_out = given.get("leave_out") or []
    if not isinstance(left_out, list):
        raise ValueError("leave_out: must be a list of levels, as [{axis: level, other_axis: level}]")
    out = [check_levels(each, axes, "leave_out") for each in left_out]
    if not all(out):
        raise ValueError("leave_out: an entry without a level would leave all arms out")
    return Study(
        name=name,
        files=files,
        settings=settings,
        axes=axes,
        design=design(kind, axes, baseline, out),
        baseline=baseline,
        seeds=_seeds(given.get("seeds", list(range(FEWEST_SEEDS))), allow_few_seeds),
        features=features,
        measures=measures,
        text=_text(given, files, axes, baseline),
    )


def axis_of(axes: tuple[Axis, ...], name: str) -> Axis:
    """The one of this name."""
    return next(axis for axis in axes if axis.name == name)


def check_measure(given: Any, name: str) -> dict[str, Any]:
    """A measure's arguments; its command checks them later.

    Raises:
        ValueError: they are no mapping, or name what the study gives.
    """
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"{name}: must be the arguments of specdec {name}, as max_new_tokens: 96, not {given!r}")
    for key in given:
        if key in ("drafter", "out", "target", "target.source"):
            raise ValueError(f"{name}: {key} is the study's to give: remove it")
    return given


def _seeds(given: Any, allow_few: bool) -> tuple[int, ...]:
    if not isinstance(given, list) or any(type(seed) is not int or not 0 <= seed < 2**32 for seed in given):
        raise ValueError(f"seeds: must be a list of numbers from 0 to 2^32 - 1, not {given}")
    if len(set(given)) != len(given):
        raise ValueError(f"seeds: {given} names one twice")
    if not given or (len(given) < FEWEST_SEEDS and not allow_few):
        raise ValueError(
            f"seeds: {len(given)} are too few to tell an effect from chance: give at least {FEWEST_SEEDS}"
            + (", or --allow_few_seeds" if given else "")
        )
    return tuple(given)


def _texts(given: Any, where: str) -> list[str]:
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{where}: must be a list of config files, not {given!r}")
    return found


def _text(given: dict[str, Any], files: tuple[str, ...], axes: tuple[Axis, ...], baseline: Combination) -> str:
    """With files where they were found and what was left to a default."""
    levels = {
        axis.name: {
            level.name: [*level.files, *([{s.key: s.value for s in level.settings}] if level.settings else [])]
            for level in axis.levels
        }
        for axis in axes
    }
    defaults = {"design": "grid", "seeds": list(range(FEWEST_SEEDS)), "features": "cached"}
    full = {**defaults, **given, "fit": list(files), "axes": levels, "baseline": baseline}
    return yaml.safe_dump({key: full[key] for key in KEYS if key in full}, sort_keys=False, allow_unicode=True)
