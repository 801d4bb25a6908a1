"""Reads a study file: axes with their levels, the design, the baseline, seeds, and what is measured."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.studies.strict_yaml import read_strictly
from specdec.studies.study import (
    FEWEST_SEEDS,
    MEASURES,
    SEEDS,
    Axes,
    Combination,
    Contrast,
    Level,
    Study,
    arm_name,
    as_list,
    combinations,
    measure_of,
)
from specdec.utils.config import is_part, packaged_path
from specdec.utils.trust import SECRET_NAME, check_reach, read_yaml_text

KINDS: dict[str, type] = {
    "name": str, "fit": object, "set": dict, "axes": dict, "design": str, "baseline": dict, "leave_out": list,
    "seeds": list, "features": str, "primary": list, **dict.fromkeys(MEASURES, dict),
}  # fmt: skip
NAMES: dict[type, str] = {str: "text", list: "a list", dict: "a mapping"}
OF_THE_STUDY = {
    "seed_everything": "list them under seeds",
    "out": "every fit gets its own directory",
    "ckpt_path": "every fit resumes from its newest checkpoint",
    **dict.fromkeys(MEASURES, "give its arguments by dotted keys, such as evaluate.max_new_tokens"),
}
OF_ALL_ARMS = (
    "prompts",
    "prompts_count",
    "prompt_tokens",
    "limit",
    "layouts",
    "drafter",
    "out",
    "target.source",
)


def read_study(path: Path | str, allow_few_seeds: bool = False) -> Study:
    """Read a study file, ``conf/study/...`` of the package too; ValueError, which says where and what to do, if it
    cannot be read or is wrong."""
    path = packaged_path(str(path))
    content = read_strictly(path)
    try:
        return _study(content, Path(path), allow_few_seeds)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _study(content: Any, path: Path, allow_few_seeds: bool) -> Study:
    for key, value in _mapping(content, KINDS, "study").items():
        if not isinstance(value, KINDS[key]):
            raise ValueError(f"{key}: must be {NAMES[KINDS[key]]}, not {value!r}")
    name = content.get("name", "")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(
            "name: a study needs a name of letters, digits and . _ + - alone, which names its directory"
        )
    design = _choice(content, "design", "grid", "one_factor")
    features = _choice(content, "features", "cached", "on_the_fly")
    axes = _axes(content.get("axes", {}), path.parent)
    common = _common(content, path.parent)
    baseline = _baseline(content, axes, design)
    arms = combinations(design, axes, baseline, _left_out(content, axes))
    seeds = _seeds(content, allow_few_seeds)
    measures = _measures(content)
    primary = _primary(content, axes, baseline, arms)
    text = read_yaml_text(path)
    return Study(
        name, common, axes, design, arms, baseline, seeds, features, measures, primary, text
    )


def _choice(content: Mapping[str, Any], key: str, *known: str) -> str:
    """Read one of two words, the first of which is the default."""
    value: str = content.get(key, known[0])
    if value not in known:
        raise ValueError(f"{key}: must be {' or '.join(known)}, not {value}")
    return value


def _axes(content: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Level]]:
    axes = {axis: _axis(levels, f"axes.{axis}", folder) for axis, levels in content.items()}
    if not axes:
        raise ValueError("axes: a study needs at least one axis with its levels")
    keys = {
        axis: set().union(*(level.settings for level in levels.values()))
        for axis, levels in axes.items()
    }
    for axis, other_axis in itertools.combinations(axes, 2):
        if both := keys[axis] & keys[other_axis]:
            raise ValueError(
                f"axes {axis} and {other_axis} both give {min(both)}: their effects could not be separated"
            )
    return axes


def _common(content: Mapping[str, Any], folder: Path) -> Level:
    """Read the config files and settings of all arms."""
    parts = [*as_list(content.get("fit", [])), content.get("set", {})]
    common = _level(parts, "fit and set", folder)
    for key in common.settings:
        if measure := measure_of(key):
            raise ValueError(
                f"set: {key}: what holds for the measures of all arms belongs in {measure}"
            )
    return common


def _baseline(content: Mapping[str, Any], axes: Axes, design: str) -> Combination:
    """Read the baseline's levels, all or none of them; the first level of every axis where none is given."""
    levels_of = _levels(content.get("baseline", {}), axes, "baseline")
    for axis, levels in axes.items():
        if axis not in levels_of and (levels_of or design == "one_factor"):
            raise ValueError(f"baseline: give a level of {axis} too; it has: {', '.join(levels)}")
    return {axis: levels_of.get(axis, next(iter(levels))) for axis, levels in axes.items()}


def _left_out(content: Mapping[str, Any], axes: Axes) -> list[Combination]:
    entries = content.get("leave_out", [])
    if not all(entries):
        raise ValueError(
            "leave_out: must be a list of levels, as [{axis: level, other_axis: level}]"
        )
    return [_levels(entry, axes, "leave_out") for entry in entries]


def _seeds(content: Mapping[str, Any], allow_few_seeds: bool) -> tuple[int, ...]:
    seeds = content.get("seeds", list(range(SEEDS)))
    are_seeds = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not are_seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds: must be numbers from 0 to 2^32 - 1, none of them twice, not {seeds}"
        )
    if len(seeds) < (1 if allow_few_seeds else FEWEST_SEEDS):
        raise ValueError(
            f"seeds: {len(seeds)} are too few for a test: give {FEWEST_SEEDS} at least, or --allow_few_seeds"
        )
    return tuple(seeds)


STUDYS_OWN = ("drafter", "out", "target", "target.source")


def _measures(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    measures = {measure: content[measure] for measure in MEASURES if measure in content}
    for measure, arguments in measures.items():
        if misplaced := [key for key in arguments if key in STUDYS_OWN]:
            raise ValueError(f"{measure}: {misplaced[0]} is the study's to give: remove it")
        check_settings(arguments, measure)
    return measures


def _primary(
    content: Mapping[str, Any], axes: Axes, baseline: Combination, arms: Sequence[Combination]
) -> tuple[Contrast, ...]:
    entries = content.get("primary", [])
    contrasts = [
        contrast for entry in entries for contrast in _contrasts(entry, axes, baseline, arms)
    ]
    for earlier, contrast in itertools.combinations(contrasts, 2):
        if dataclasses.replace(contrast, expect=earlier.expect) == earlier:
            raise ValueError(f"primary: {contrast.outcome}, {contrast} stands twice")
    return tuple(contrasts)


def _contrasts(
    entry: Any, axes: Axes, baseline: Combination, arms: Sequence[Combination]
) -> Iterator[Contrast]:
    """Read an entry of ``primary``: a contrast for each of its outcomes."""
    entry = _mapping(entry, ("outcome", "effect", "against", "at", "expect"), "primary")
    outcomes = as_list(entry.get("outcome", []))
    expect = entry.get("expect")
    if not outcomes or not all(isinstance(outcome, str) for outcome in outcomes):
        raise ValueError(
            "primary: give an outcome, such as acceptance_length or drift.kl_at_8, or a list of them"
        )
    if expect not in (None, "higher", "lower"):
        raise ValueError(f"primary: expect: must be higher or lower, not {expect}")
    effect = _levels(entry.get("effect", {}), axes, "primary: effect")
    against = _levels(entry.get("against", {}), axes, "primary: against")
    against = against or {axis: baseline[axis] for axis in effect}
    same_axes = effect.keys() == against.keys()
    if not effect or not same_axes or any(effect[axis] == against[axis] for axis in effect):
        both = f"{arm_name(effect) or 'nothing'} against {arm_name(against) or 'nothing'}"
        raise ValueError(
            f"primary: effect and against must give other levels of the same axes, not {both}; against is "
            "the baseline's levels where it is not given"
        )
    at: dict[str, tuple[str, ...]] = {}
    for axis, levels in _mapping(entry.get("at", {}), axes, "primary: at").items():
        if axis in effect:
            raise ValueError(f"primary: at: {axis} is what is compared: leave it out")
        at[axis] = tuple(
            _levels({axis: level}, axes, "primary: at")[axis] for level in as_list(levels)
        )
    for outcome in outcomes:
        contrast = Contrast(outcome, effect, against, at, expect)
        if not contrast.weights([frozenset(arm.items()) for arm in arms]):
            raise ValueError(f"primary: {contrast}: the study has no arms for both sides")
        yield contrast


def _axis(content: Any, where: str, folder: Path) -> dict[str, Level]:
    """Read an axis: a mapping of levels, or the short form, one dotted key and its values, which name the levels."""
    if not isinstance(content, dict):
        raise ValueError(
            f"{where}: must be levels with their dotted keys, or one key with a list of values"
        )
    pairs = list(content.items())
    key, values = pairs[0] if len(pairs) == 1 else ("", None)
    if "." in key and isinstance(values, list):
        pairs = [(_value_name(value, where), {key: value}) for value in values]
    levels = {name: _level(value, f"{where}.{name}", folder) for name, value in pairs}
    if len(levels) < len(pairs):
        raise ValueError(f"{where}: a level stands twice: {', '.join(name for name, _ in pairs)}")
    if len(levels) < 2:
        raise ValueError(
            f"{where}: an axis needs at least two levels; what holds for all arms belongs in set"
        )
    for word in (where, *levels):
        if not re.fullmatch(r"\S+", word):
            raise ValueError(
                f"{where}: the name of an axis or a level must be one word, not {word!r}"
            )
    return levels


def _level(content: Any, where: str, folder: Path) -> Level:
    """Read a level: dotted keys, a config file, or a list of both."""
    files = []
    settings: dict[str, Any] = {}
    for part in as_list(content):
        if isinstance(part, str) and part.endswith((".yaml", ".yml")):
            files.append(_config_file(part, where, folder))
        elif isinstance(part, dict):
            settings |= part
        else:
            raise ValueError(
                f"{where}: must be dotted keys, as model.ttt_steps: 4, a config file (.yaml) or a list of "
                f"both, not {part!r}"
            )
    check_settings(settings, where)
    for key in settings:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise ValueError(f"{where}: {key!r} is no dotted key, such as model.ttt_steps")
        if reason := OF_THE_STUDY.get(key):
            raise ValueError(f"{where}: {key} cannot be set: {reason}")
        if measure_of(key) and key.partition(".")[2] in OF_ALL_ARMS:
            raise ValueError(
                f"{where}: {key} cannot differ between arms, which are compared prompt by prompt"
            )
    return Level(tuple(files), settings)


def _config_file(name: str, where: str, folder: Path) -> str:
    """Return the path of a config file in the study's folder, in the working folder or in the package."""
    for path in (folder / name, Path(packaged_path(name))):
        if path.is_file():
            return str(path)
    raise ValueError(
        f"{where}: {name}: no such file in the study's folder, in the working folder or in the package"
    )


def _value_name(value: Any, where: str) -> str:
    """Return the name of a level that is given by its value alone."""
    if is_part(value) and not value.get("init_args"):
        value = value["class_path"]
    if isinstance(value, str):
        return Path(value).stem if value.endswith(".yaml") else value.replace(" ", "")
    if isinstance(value, dict):
        raise ValueError(
            f"{where}: a mapping gives a level no name: write the levels out, name: {{key: value}}"
        )
    return json.dumps(value, separators=(",", ":"))


def _levels(content: Any, axes: Axes, where: str) -> Combination:
    """Read axes with a level of each, as in a baseline or an entry of ``leave_out``."""
    names = {}
    for axis, level in _mapping(content, axes, where).items():
        names[axis] = _value_name(level, where)
        if names[axis] not in axes[axis]:
            raise ValueError(
                f"{where}: axis {axis} has no level {names[axis]}; it has: {', '.join(axes[axis])}"
            )
    return names


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if keys of a study, which become options of commands, say what only a user may, or hold a
    secret: the study and its configs are copied."""
    check_reach(settings, where)
    for key, value in settings.items():
        if isinstance(value, str) and SECRET_NAME.search(key.rpartition(".")[2]):
            raise ValueError(
                f"{where}: {key} would be written into the study's directory: give it by the environment"
            )


def _mapping(value: Any, known: Iterable[str], where: str) -> dict[str, Any]:
    """Return the value, if it is a mapping with known keys alone; else raise ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a mapping of keys, not {value!r}")
    for key in value:
        if key not in known:
            raise ValueError(f"{where}: no such key: {key}; there are: {', '.join(known)}")
    return value
