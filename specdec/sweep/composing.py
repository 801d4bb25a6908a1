"""An arm's command line of ``specdec fit``, and what in it would contradict itself."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from specdec.compose import read_yaml
from specdec.sweep.axes import Level, Setting
from specdec.sweep.designs import Combination
from specdec.sweep.study import Study


def arguments(study: Study, combination: Combination) -> list[str]:
    """What ``specdec fit`` is given for an arm: files, the levels' after the study's; then keys, deeper ones last.

    Raises:
        ValueError: files of two axes, or such a file and a key of ``set``, say different things.
    """
    levels = levels_of(study, combination)
    _check_files(study.settings, levels)
    files = [*study.files, *(file for level in levels.values() for file in level.files)]
    own = [setting for level in levels.values() for setting in level.settings if setting.measure is None]
    given = {setting.key for setting in own}
    settings = [setting for setting in study.settings if setting.key not in given] + own
    settings.sort(key=lambda setting: setting.key.count("."))  # what is inside a part comes after the part
    return [*(word for file in files for word in ("--config", file)), *(each.argument for each in settings)]


def measures(study: Study, combination: Combination) -> dict[str, dict[str, Any]]:
    """What an arm is measured with: the study's arguments, over which those of its levels win.

    Raises:
        ValueError: a level is for a measure that the study does not have.
    """
    found = {name: dict(given) for name, given in study.measures.items()}
    for axis, level in levels_of(study, combination).items():
        for setting in level.settings:
            if setting.measure is None:
                continue
            if setting.measure not in found:
                raise ValueError(
                    f"level {level.name} of axis {axis} gives {setting.key}, but the study has no {setting.measure}: "
                    "add it, or remove the key"
                )
            found[setting.measure][setting.key.partition(".")[2]] = setting.value
    return found


def levels_of(study: Study, combination: Combination) -> dict[str, Level]:
    """By axis."""
    return {axis.name: axis.level(combination[axis.name]) for axis in study.axes}


def _check_files(settings: tuple[Setting, ...], levels: Mapping[str, Level]) -> None:
    said: dict[str, tuple[str, str, Any]] = {}
    for axis, level in levels.items():
        own: dict[str, tuple[str, str, Any]] = {}
        for file in level.files:
            own |= {key: (axis, file, value) for key, value in _leaves(read(file))}
        for key, (_, file, value) in own.items():
            if key in said and said[key][2] != value:
                raise ValueError(
                    f"{key} is given by {said[key][1]} (axis {said[key][0]}) and by {file} (axis {axis}): "
                    "leave it to one of them"
                )
        said |= own
    for setting in settings:
        for key, (axis, file, value) in said.items():
            if (key == setting.key and value != setting.value) or key.startswith(f"{setting.key}."):
                raise ValueError(
                    f"set gives {setting.key}, and so does {file} (axis {axis}): put it into a file under fit, over "
                    "which levels win, or into the levels, beside their files"
                )


def read(file: str) -> Any:
    """A config file as data, references unresolved."""
    return OmegaConf.to_container(read_yaml(file), resolve=False)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys as on a command line: those of a part's file belong to the part, ``init_args`` is left out."""
    if isinstance(value, str) and key and value.endswith((".yaml", ".yml")):
        value = read(value)
    if not isinstance(value, dict):
        yield key, value
        return
    for name, child in value.items():
        yield from _leaves(child, key if name == "init_args" else f"{key}.{name}" if key else str(name))
