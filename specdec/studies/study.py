"""Reads a study file: axes with their levels, the design, the baseline, seeds, and what is measured.

Names in it are text: ``on``, ``off`` and ``1`` are what they look like, and no key may stand twice.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdec.report.contrasts import Arm, Weights, contrast
from specdec.utils.config import is_part, shipped
from specdec.utils.trust import SECRET_NAME, check_reach, load_yaml, read_yaml_text

MEASURES = ("evaluate", "drift", "robustness")
FEWEST_SEEDS = 3
KINDS: dict[str, type] = {
    "name": str, "fit": object, "set": dict, "axes": dict, "design": str, "baseline": dict, "leave_out": list,
    "seeds": list, "features": str, "primary": list, **dict.fromkeys(MEASURES, dict),
}  # fmt: skip
NAMES: dict[type, str] = {str: "text", list: "a list", dict: "a mapping"}
OF_THE_STUDY = {
    "seed_everything": "list them under seeds",
    "out": "every fit gets a directory of its own",
    "ckpt_path": "every fit goes on from its newest checkpoint",
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

Combination = dict[str, str]  # axis to level: one arm


@dataclass(frozen=True)
class Level:
    """One value of an axis: config files, then dotted keys (``model.ttt_steps``) with their values."""

    files: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


Axes = Mapping[str, Mapping[str, Level]]  # axis to its levels by name, in the order given


@dataclass(frozen=True)
class Contrast:
    """A primary contrast: levels against others of the same axes, at some levels of further axes, in one outcome.

    Args:
        outcome: see :mod:`specdec.studies.outcomes`.
        expect: ``higher`` or ``lower``, if anything was.
    """

    outcome: str
    effect: Combination
    against: Combination
    at: Mapping[str, Sequence[str]]
    expect: str | None

    def weights(self, arms: Iterable[Arm]) -> Weights:
        """Of arms; empty where these do not support it."""
        chosen = [
            arm
            for arm in arms
            if all(dict(arm)[axis] in levels for axis, levels in self.at.items())
        ]
        return contrast(chosen, [(self.effect, self.against)])

    def to_json(self) -> dict[str, Any]:
        """What ``plan.json`` holds."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """``norm: on - off (K=4)``."""
        if len(self.effect) == 1:
            ((axis, level),) = self.effect.items()
            text = f"{axis}: {level} - {self.against[axis]}"
        else:
            text = f"{arm_name(self.effect)} - {arm_name(self.against)}"
        at = ", ".join(f"{axis}={'|'.join(levels)}" for axis, levels in self.at.items())
        return f"{text} ({at})" if at else text


@dataclass(frozen=True)
class Study:
    """A study as read; no training config has been parsed yet.

    Args:
        common: config files and dotted keys of every arm, over which levels win.
        design: ``grid`` or ``one_factor``.
        combinations: the arms.
        features: ``cached`` or ``on_the_fly``.
        measures: by name the arguments of the command that measures.
        primary: the contrasts that are tested; all else is exploratory.
        text: the file's.
    """

    name: str
    common: Level
    axes: Axes
    design: str
    combinations: tuple[Combination, ...]
    baseline: Combination
    seeds: tuple[int, ...]
    features: str
    measures: Mapping[str, Mapping[str, Any]]
    primary: tuple[Contrast, ...]
    text: str


def read_study(path: Path | str, allow_few_seeds: bool = False) -> Study:
    """Read a study file, ``conf/study/...`` of the package too; ValueError, which says where and what to do, if it
    cannot be read or is wrong."""
    path = shipped(str(path))
    given = read_strictly(path)
    try:
        return _study(given, Path(path), allow_few_seeds)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _study(given: Any, path: Path, allow_few_seeds: bool) -> Study:
    for key, value in _mapping(given, KINDS, "study").items():
        if not isinstance(value, KINDS[key]):
            raise ValueError(f"{key}: must be {NAMES[KINDS[key]]}, not {value!r}")
    name = given.get("name", "")
    design = given.get("design", "grid")
    features = given.get("features", "cached")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(
            "name: a study needs a name of letters, digits and . _ + - alone, which names its directory"
        )
    for where, value, known in (
        ("design", design, "grid one_factor"),
        ("features", features, "cached on_the_fly"),
    ):
        if value not in known.split():
            raise ValueError(f"{where}: must be {known.replace(' ', ' or ')}, not {value}")
    axes = {
        axis: _axis(levels, f"axes.{axis}", path.parent)
        for axis, levels in given.get("axes", {}).items()
    }
    if not axes:
        raise ValueError("axes: a study needs at least one axis with its levels")
    for one, two in itertools.combinations(axes, 2):
        keys = [
            {key for level in axes[axis].values() for key in level.settings} for axis in (one, two)
        ]
        if both := keys[0] & keys[1]:
            raise ValueError(
                f"axes {one} and {two} both give {min(both)}: their effects could not be told apart"
            )
    common = _level(
        [*as_list(given.get("fit", [])), given.get("set", {})], "fit and set", path.parent
    )
    if wrong := next((key for key in common.settings if measure_of(key)), None):
        raise ValueError(
            f"set: {wrong}: what holds for the measures of all arms belongs in {measure_of(wrong)}"
        )
    baseline = _levels(given.get("baseline", {}), axes, "baseline")
    for axis, levels in axes.items():
        if axis not in baseline and (baseline or design == "one_factor"):
            raise ValueError(f"baseline: give a level of {axis} too; it has: {', '.join(levels)}")
    baseline = {axis: baseline.get(axis, next(iter(levels))) for axis, levels in axes.items()}
    if not all(left_out := given.get("leave_out", [])):
        raise ValueError(
            "leave_out: must be a list of levels, as [{axis: level, other_axis: level}]"
        )
    arms = combinations(
        design, axes, baseline, [_levels(each, axes, "leave_out") for each in left_out]
    )
    seeds = given.get("seeds", list(range(FEWEST_SEEDS)))
    if any(type(seed) is not int or not 0 <= seed < 2**32 for seed in seeds) or len(
        set(seeds)
    ) != len(seeds):
        raise ValueError(
            f"seeds: must be numbers from 0 to 2^32 - 1, none of them twice, not {seeds}"
        )
    if not seeds or (len(seeds) < FEWEST_SEEDS and not allow_few_seeds):
        raise ValueError(
            f"seeds: {len(seeds)} are too few for a test: give {FEWEST_SEEDS} at least, or --allow_few_seeds"
        )
    measures = {measure: given[measure] for measure in MEASURES if measure in given}
    for measure, arguments in measures.items():
        if wrong := next(
            (key for key in arguments if key in ("drafter", "out", "target", "target.source")), None
        ):
            raise ValueError(f"{measure}: {wrong} is the study's to give: remove it")
        check_settings(arguments, measure)
    primary = tuple(
        one for each in given.get("primary", []) for one in _contrasts(each, axes, baseline, arms)
    )
    for number, one in enumerate(primary):
        if any(
            dataclasses.replace(one, expect=other.expect) == other for other in primary[:number]
        ):
            raise ValueError(f"primary: {one.outcome}, {one} stands twice")
    text = read_yaml_text(path)
    return Study(
        name, common, axes, design, arms, baseline, tuple(seeds), features, measures, primary, text
    )


def _contrasts(
    given: Any, axes: Axes, baseline: Combination, arms: Sequence[Combination]
) -> Iterable[Contrast]:
    """Read an entry of ``primary``: a contrast for each of its outcomes."""
    given = _mapping(given, ("outcome", "effect", "against", "at", "expect"), "primary")
    outcomes = as_list(given.get("outcome", []))
    expect = given.get("expect")
    if not outcomes or not all(isinstance(each, str) for each in outcomes):
        raise ValueError(
            "primary: give an outcome, such as acceptance_length or drift.kl_at_8, or a list of them"
        )
    if expect not in (None, "higher", "lower"):
        raise ValueError(f"primary: expect: must be higher or lower, not {expect}")
    effect = _levels(given.get("effect", {}), axes, "primary: effect")
    against = _levels(given.get("against", {}), axes, "primary: against") or {
        axis: baseline[axis] for axis in effect
    }
    if (
        not effect
        or set(effect) != set(against)
        or any(effect[axis] == against[axis] for axis in effect)
    ):
        both = f"{arm_name(effect) or 'nothing'} against {arm_name(against) or 'nothing'}"
        raise ValueError(f"primary: effect and against must give other levels of the same axes, not {both}; against is "
                         "the baseline's levels where it is not given")  # fmt: skip
    at: dict[str, tuple[str, ...]] = {}
    for axis, levels in _mapping(given.get("at", {}), axes, "primary: at").items():
        if axis in effect:
            raise ValueError(f"primary: at: {axis} is what is compared: leave it out")
        at[axis] = tuple(
            _levels({axis: level}, axes, "primary: at")[axis] for level in as_list(levels)
        )
    for outcome in outcomes:
        one = Contrast(outcome, effect, against, at, expect)
        if not one.weights([frozenset(arm.items()) for arm in arms]):
            raise ValueError(f"primary: {one}: the study has no arms for both sides")
        yield one


def combinations(
    design: str,
    axes: Mapping[str, Iterable[str]],
    baseline: Combination,
    left_out: Sequence[Combination] = (),
) -> tuple[Combination, ...]:
    """The arms: every combination of levels (``grid``), or the baseline and one change at a time (``one_factor``).

    An arm that has all levels of an entry of ``left_out`` is none; ValueError if that is the baseline, or no arm.
    """
    if design == "grid":
        found = [
            dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())
        ]
    else:
        changes = (
            {axis: level}
            for axis, levels in axes.items()
            for level in levels
            if level != baseline[axis]
        )
        found = [dict(baseline), *({**baseline, **change} for change in changes)]
    for each in left_out:
        if not any(each.items() <= arm.items() for arm in found):
            raise ValueError(f"leave_out: {arm_name(each)} is in no arm of this design: remove it")
        if each.items() <= baseline.items():
            raise ValueError(
                f"the baseline, arm {arm_name(baseline)}, is left out: choose another baseline"
            )
    return tuple(arm for arm in found if not any(each.items() <= arm.items() for each in left_out))


def arm_name(combination: Combination) -> str:
    """An arm's name: its levels in the order of the axes."""
    return " ".join(f"{axis}={level}" for axis, level in combination.items())


def measure_of(key: str) -> str | None:
    """The measure that a dotted key is for; None: the training."""
    group = key.partition(".")[0]
    return group if group in MEASURES else None


def _axis(given: Any, where: str, beside: Path) -> dict[str, Level]:
    """Read an axis: a mapping of levels, or the short form, one dotted key and its values, which name the levels."""
    if not isinstance(given, dict):
        raise ValueError(
            f"{where}: must be levels with their dotted keys, or one key with a list of values"
        )
    if len(given) == 1 and "." in (key := next(iter(given))) and isinstance(given[key], list):
        pairs = [(_value_name(value, where), {key: value}) for value in given[key]]
    else:
        pairs = list(given.items())
    levels = {name: _level(value, f"{where}.{name}", beside) for name, value in pairs}
    if len(levels) < len(pairs):
        raise ValueError(f"{where}: a level stands twice: {', '.join(name for name, _ in pairs)}")
    if len(levels) < 2:
        raise ValueError(
            f"{where}: an axis needs at least two levels; what holds for all arms belongs in set"
        )
    if odd := next((word for word in (where, *levels) if not re.fullmatch(r"\S+", word)), None):
        raise ValueError(f"{where}: the name of an axis or a level must be one word, not {odd!r}")
    return levels


def _level(given: Any, where: str, beside: Path) -> Level:
    """Read a level: dotted keys, a config file, or a list of both."""
    files = list[str]()
    settings = dict[str, Any]()
    for each in as_list(given):
        if isinstance(each, str) and each.endswith((".yaml", ".yml")):
            found = next(
                (str(path) for path in (beside / each, Path(shipped(each))) if path.is_file()), None
            )
            if found is None:
                raise ValueError(
                    f"{where}: {each}: no such file beside the study, in the working folder or the package"
                )
            files.append(found)
        elif isinstance(each, dict):
            settings |= each
        else:
            raise ValueError(f"{where}: must be dotted keys, as model.ttt_steps: 4, a config file (.yaml) or a list of "
                             f"both, not {each!r}")  # fmt: skip
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


def _value_name(value: Any, where: str) -> str:
    """The name of a level that is given by its value alone."""
    if is_part(value) and not value.get("init_args"):
        value = value["class_path"]
    if isinstance(value, str):
        return Path(value).stem if value.endswith(".yaml") else value.replace(" ", "")
    if isinstance(value, dict):
        raise ValueError(
            f"{where}: a mapping gives a level no name: write the levels out, name: {{key: value}}"
        )
    return json.dumps(value, separators=(",", ":"))


def _levels(given: Any, axes: Axes, where: str) -> Combination:
    """Axes with a level of each, as in a baseline or an entry of ``leave_out``."""
    found = {
        axis: _value_name(level, where) for axis, level in _mapping(given, axes, where).items()
    }
    for axis, level in found.items():
        if level not in axes[axis]:
            raise ValueError(
                f"{where}: axis {axis} has no level {level}; it has: {', '.join(axes[axis])}"
            )
    return found


def check_settings(given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if keys of a study, which become options of commands, say what only a user may, or hold a
    secret: the study and its configs are copied."""
    check_reach(given, where)
    for key, value in given.items():
        if isinstance(value, str) and SECRET_NAME.search(key.rpartition(".")[2]):
            raise ValueError(
                f"{where}: {key} would be written into the study's directory: give it by the environment"
            )


def as_list(value: Any) -> list[Any]:
    """The value itself if it is a list, else a list of it."""
    return value if isinstance(value, list) else [value]


class _StrictLoader(yaml.SafeLoader):
    """YAML in which only ``true`` and ``false`` are truth values, as in YAML 1.2, and a key may not stand twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as its base has it
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """A mapping whose keys are text, whatever they look like."""
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in found:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                )
            found[key.value] = self.construct_object(value, deep=True)
        return found


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _StrictLoader.construct_mapping)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def read_strictly(path: Path | str) -> Any:
    """The contents of a YAML file, by the strict loader; ValueError, with the line, if it cannot be read."""
    return load_yaml(read_yaml_text(path), path, lambda text: yaml.load(text, _StrictLoader))  # noqa: S506


def _mapping(given: Any, known: Iterable[str], where: str) -> dict[str, Any]:
    """The value, if it is a mapping with known keys alone; else ValueError."""
    if not isinstance(given, dict):
        raise ValueError(f"{where}: must be a mapping of keys, not {given!r}")
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: no such key: {key}; there are: {', '.join(known)}")
    return given
