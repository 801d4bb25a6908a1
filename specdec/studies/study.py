"""Describes what a study declares: axes with their levels, the arms, the contrasts, and what is measured."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.report.contrasts import Arm, Weights, contrast
from specdec.utils.config import read_yaml

MEASURES = ("evaluate", "drift", "robustness")
FEWEST_SEEDS = 3  # without --allow_few_seeds
SEEDS = 5  # where a study gives none

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
        """Return the weights of arms; none where these do not support the contrast."""
        chosen = [
            arm
            for arm in arms
            if all(dict(arm)[axis] in levels for axis, levels in self.at.items())
        ]
        return contrast(chosen, [(self.effect, self.against)])

    def to_json(self) -> dict[str, Any]:
        """Return what ``plan.json`` holds."""
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

    @functools.cached_property
    def varies_data(self) -> bool:
        """Whether each seed is ``data.seed`` too: unless the study or a config file of it gives that one, for all seeds
        or along an axis.

        Raises:
            ValueError: a config file cannot be read.
        """
        levels = [self.common, *(level for axis in self.axes.values() for level in axis.values())]
        configs = [level.settings for level in levels]
        configs += [read_yaml(file) for level in levels for file in level.files]
        return not any(map(_gives_data_seed, configs))


def _gives_data_seed(config: Mapping[str, Any]) -> bool:
    """Return whether a config, or settings by dotted keys, give the seed of the data."""
    data = as_dict(config.get("data"))
    keys = data.keys() | as_dict(data.get("init_args")).keys()
    return "seed" in keys or bool({"data.seed", "data.init_args.seed"} & config.keys())


def combinations(
    design: str,
    axes: Mapping[str, Iterable[str]],
    baseline: Combination,
    left_out: Sequence[Combination] = (),
) -> tuple[Combination, ...]:
    """Return the arms: every combination of levels (``grid``), or the baseline and single changes (``one_factor``).

    An arm that has all levels of an entry of ``left_out`` is none; ValueError if that is the baseline, or no arm.
    """
    if design == "grid":
        arms = [
            dict(zip(axes, levels, strict=True)) for levels in itertools.product(*axes.values())
        ]
    else:
        arms = [dict(baseline)]
        for axis, levels in axes.items():
            arms += [{**baseline, axis: level} for level in levels if level != baseline[axis]]
    for entry in left_out:
        if not any(entry.items() <= arm.items() for arm in arms):
            raise ValueError(f"leave_out: {arm_name(entry)} is in no arm of this design: remove it")
        if entry.items() <= baseline.items():
            raise ValueError(
                f"the baseline, arm {arm_name(baseline)}, is left out: choose another baseline"
            )
    return tuple(arm for arm in arms if not any(entry.items() <= arm.items() for entry in left_out))


def arm_name(combination: Combination) -> str:
    """An arm's name: its levels in the order of the axes."""
    return " ".join(f"{axis}={level}" for axis, level in combination.items())


def measure_of(key: str) -> str | None:
    """The measure that a dotted key is for; None: the training."""
    group = key.partition(".")[0]
    return group if group in MEASURES else None


def as_dict(value: Any) -> dict[str, Any]:
    """The value itself if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The value itself if it is a list, else a list of it."""
    return value if isinstance(value, list) else [value]
