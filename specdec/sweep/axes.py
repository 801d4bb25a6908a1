"""Axes and their levels: what a level changes in the training, and in the measures."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.compose import shipped
from specdec.sweep.reading import check_keys
from specdec.values import is_part

MEASURES = ("evaluate", "drift", "robustness")
NOT_AN_AXIS = {
    "seed_everything": "seeds are the study's own: list them under seeds",
    "out": "every fit gets a directory of its own",
    "ckpt_path": "every fit goes on from its newest checkpoint",
}
SHARED = ("prompts", "prompts_count", "prompt_tokens", "limit", "layouts", "drafter", "out", "target", "target.source")
KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*\+?")


@dataclass(frozen=True)
class Setting:
    """A dotted key and its value."""

    key: str
    value: Any

    @property
    def argument(self) -> str:
        """As on the command line."""
        return f"--{self.key}={self.value if isinstance(self.value, str) else json.dumps(self.value)}"

    @property
    def measure(self) -> str | None:
        """The measure that it is for; None: the training."""
        group = self.key.partition(".")[0]
        return group if group in MEASURES else None


@dataclass(frozen=True)
class Level:
    """A value of an axis: config files, then dotted keys, both in the order given."""

    name: str
    files: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()

    @classmethod
    def read(cls, name: str, given: Any, where: str, beside: Path) -> "Level":
        """From a mapping of dotted keys, a config file's name, or a list of both.

        Raises:
            ValueError: it is none of these, or a file is not there.
        """
        if not name or re.search(r"\s", name):
            raise ValueError(f"{where}: a level's name must be one word, not {name!r}")
        files, settings = list[str](), list[Setting]()
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, str):
                files.append(config_file(each, where, beside))
            elif isinstance(each, Mapping):
                settings += read_settings(each, where)
            else:
                raise ValueError(f"{where}: must be dotted keys, a config file or a list of both, not {each!r}")
        return cls(name, tuple(files), tuple(settings))


@dataclass(frozen=True)
class Axis:
    """A name, and levels in the order given."""

    name: str
    levels: tuple[Level, ...]

    @classmethod
    def read(cls, name: str, given: Any, beside: Path) -> "Axis":
        """From a mapping of levels, or the short form: one key and its values, which name the levels.

        Raises:
            ValueError: it is neither, a level's name stands twice, or there are fewer than two.
        """
        where = f"axes.{name}"
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"{where}: an axis's name has letters, digits and . _ + - alone")
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: must be levels with their dotted keys, or one key with a list of values")
        if len(given) == 1 and isinstance(values := next(iter(given.values())), list) and "." in next(iter(given)):
            key = next(iter(given))
            levels = [Level.read(_name(value, where), {key: value}, where, beside) for value in values]
        else:
            levels = [Level.read(level, what, f"{where}.{level}", beside) for level, what in given.items()]
        names = [level.name for level in levels]
        if len(names) < 2:
            raise ValueError(f"{where}: an axis needs at least two levels; what holds for all arms belongs in set")
        if twice := next((level for level in names if names.count(level) > 1), None):
            raise ValueError(f"{where}: {twice} stands twice")
        return cls(name, tuple(levels))

    def level(self, name: str) -> Level:
        """The one of this name."""
        return next(level for level in self.levels if level.name == name)

    @property
    def names(self) -> list[str]:
        """Of its levels."""
        return [level.name for level in self.levels]

    @property
    def keys(self) -> set[str]:
        """The dotted keys that any level gives, files aside."""
        return {setting.key for level in self.levels for setting in level.settings}


def read_settings(given: Any, where: str) -> list[Setting]:
    """Dotted keys and values.

    Raises:
        ValueError: it is no mapping, or a key is none, or one that no arm may change.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: must be dotted keys with their values, not {given!r}")
    for key in given:
        if not KEY.fullmatch(key):
            raise ValueError(f"{where}: {key!r} is no dotted key, such as model.ttt_steps")
        if reason := NOT_AN_AXIS.get(key):
            raise ValueError(f"{where}: {key} cannot be set: {reason}")
        if key in MEASURES:
            raise ValueError(f"{where}: give {key}'s settings by dotted keys, such as {key}.max_new_tokens")
        group, _, rest = key.partition(".")
        if group in MEASURES and rest in SHARED:
            raise ValueError(f"{where}: {key} cannot differ between arms, which are compared prompt by prompt")
    return [Setting(key, value) for key, value in given.items()]


def config_file(name: str, where: str, beside: Path) -> str:
    """Where a config file is: beside the study, in the working folder, or in the package.

    Raises:
        ValueError: nowhere.
    """
    if not name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"{where}: {name!r} is neither a config file (.yaml) nor dotted keys such as model.ttt_steps: 4"
        )
    found = next((str(path) for path in (beside / name, Path(shipped(name))) if path.is_file()), None)
    if found is None:
        raise ValueError(f"{where}: {name}: no such file beside the study, in the working folder or in the package")
    return found


def read_axes(given: Any, beside: Path) -> tuple[Axis, ...]:
    """All axes of a study.

    Raises:
        ValueError: there is none, one is wrong, or two give the same key.
    """
    if not isinstance(given, Mapping) or not given:
        raise ValueError("axes: a study needs at least one axis with its levels")
    axes = tuple(Axis.read(name, what, beside) for name, what in given.items())
    owner: dict[str, str] = {}
    for axis in axes:
        for key in sorted(axis.keys):
            if key.endswith("+"):
                continue
            if key in owner:
                raise ValueError(
                    f"axes {owner[key]} and {axis.name} both give {key}: their effects could not be told apart"
                )
            owner[key] = axis.name
    return axes


def check_levels(given: Any, axes: tuple[Axis, ...], where: str) -> dict[str, str]:
    """Axes with a level of each, as a baseline or what is left out says them.

    Raises:
        ValueError: an axis or a level does not exist.
    """
    known = {axis.name: axis for axis in axes}
    found = {}
    for name, level in check_keys(given, known, where).items():
        text = level if isinstance(level, str) else _name(level, where)
        if text not in known[name].names:
            raise ValueError(f"{where}: axis {name} has no level {text}; it has: {', '.join(known[name].names)}")
        found[name] = text
    return found


def _name(value: Any, where: str) -> str:
    """What a level is called that is known by its value."""
    if is_part(value) and not value.get("init_args"):
        value = value["class_path"]
    if isinstance(value, str):
        value = value.rpartition("/")[2].removesuffix(".yaml") if value.endswith(".yaml") else value
        return value.replace(" ", "")
    if isinstance(value, Mapping):
        raise ValueError(f"{where}: a mapping gives a level no name: write the levels out, name: {{key: value}}")
    return json.dumps(value, separators=(",", ":"))
