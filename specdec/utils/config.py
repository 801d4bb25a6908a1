"""Configs: files as given on the command line of ``specdec fit``, values compared and in words, run directories."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.utils.imports import guard_parsers
from specdec.utils.locks import claim_of, is_held
from specdec.utils.trust import check_reach, check_yaml_size, load_yaml, read_yaml_text, redacted

PRESETS = {"model.drafter": "drafter", "model.optimizer": "optimizer"}
"""The options that take a shipped config by its name, and the folders of these."""
SHIPPED = next(base / "conf" for base in Path(__file__).parents[1:3] if (base / "conf").is_dir())


def preset_names(option: str) -> list[str]:
    """Return the names of shipped configs that an option takes."""
    return sorted(file.stem for file in (SHIPPED / PRESETS[option]).glob("*.yaml"))


def preset_file(option: str, value: Any) -> Any:
    """Return the shipped config that a value names, as ``eagle3`` for ``model.drafter``; any other value as it is.

    ``AdamW`` names one too: torch has a class of that name, and so has specdec.
    """
    option = option.removesuffix("+")
    if option not in PRESETS or not isinstance(value, str):
        return value
    name = "adamw" if value == "AdamW" else value
    return (
        str(SHIPPED / PRESETS[option] / f"{name}.yaml") if name in preset_names(option) else value
    )


def packaged_path(path: str) -> str:
    """``conf/...`` as shipped with the package, where the working folder has no such file."""
    if not path.startswith("conf/") or Path(path).exists():
        return path
    places = [base / path for base in Path(__file__).parents[1:3]]
    return next((str(place) for place in places if place.exists()), path)


def read_yaml(path: str) -> dict[str, Any]:
    """A config file, references unresolved; ValueError, with the line, if it is missing, not YAML or not a mapping, or
    says what only the command line may."""

    def load(text: str) -> Any:
        return OmegaConf.to_container(OmegaConf.create(text)) if check_yaml_size(text) else None

    config = load_yaml(read_yaml_text(path), path, load)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config file must be a mapping of keys")
    check_reach(config, path)
    return _located(config, Path(path).parent)


def _located(value: Any, folder: Path, option: str = "") -> Any:
    """The same with parts' files by their whole paths; each lies in this folder, the working folder or the package."""
    if isinstance(value, dict):
        start = f"{option}." if option else ""
        return {key: _located(child, folder, f"{start}{key}") for key, child in value.items()}
    if isinstance(value, list):
        return [_located(child, folder) for child in value]
    value = preset_file(option, value)
    if not isinstance(value, str) or not value.endswith((".yaml", ".yml")):
        return value
    places = (folder / value, Path(packaged_path(value)))
    path = next((str(place.resolve()) for place in places if place.exists()), value)
    if path != value or Path(value).exists():
        load_yaml(read_yaml_text(path), path)  # before the parser reads it
    return path


def compose(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The config files of a command line, merged, later ones over earlier ones, and the remaining arguments.

    ``${...}`` references are left for the parser, which resolves them after the arguments (``omegaconf+``). ValueError
    if a file cannot be read.
    """
    config, rest = merge_config(args)
    words = []
    behind = ""  # the option before a word, whose value the word may be
    for word in rest:
        name, equals, value = word.rpartition("=")
        # a part's file by its whole path: a bare mine.yaml would also be the name of something in a module
        path = _located(packaged_path(value), Path(), name.lstrip("-") or behind)
        words.append(name + equals + path)
        behind = word.lstrip("-") if word.startswith("--") else ""
    return config, words


def merge_config(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The same, with the remaining arguments as they are."""
    guard_parsers()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    try:
        arguments, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    merged: Any = OmegaConf.create({})
    for number, path in enumerate(arguments.config):
        later = read_yaml(packaged_path(path))
        try:
            merged = OmegaConf.merge(merged, later)
        except TypeError as error:
            earlier = ", ".join(arguments.config[:number])
            raise ValueError(
                f"{path}: {_clash(merged, later)} is a list here and a mapping in {earlier}, or the reverse: write it "
                "in the same form"
            ) from error
    config = OmegaConf.to_container(merged)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}, rest


def _clash(earlier: DictConfig, later: dict[str, Any]) -> str:
    """The first key whose value is a list in one config and a mapping in the other, which do not merge; or nothing."""
    for key, value in later.items():
        setting = None
        with contextlib.suppress(OmegaConfBaseException):  # a reference that leads nowhere yet
            setting = earlier.get(key)
        if isinstance(setting, DictConfig) and isinstance(value, dict):
            if below := _clash(setting, value):
                return f"{key}.{below}"
        elif (type(setting), type(value)) in ((DictConfig, list), (ListConfig, dict)):
            return key
    return ""


def runs_folder() -> Path:
    """Where run directories go by default: ``$SPECDEC_RUNS`` or ``runs`` in the working folder."""
    return Path(os.environ.get("SPECDEC_RUNS", "runs"))


def run_names(kind: str) -> Iterator[Path]:
    """Run directories named after what is run and the present second (UTC), the first without a number."""
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    yield runs_folder() / f"{kind}-{stamp}"
    for number in itertools.count(2):
        yield runs_folder() / f"{kind}-{stamp}-{number}"


def new_run(kind: str) -> Path:
    """The first of :func:`run_names` that does not exist and is not about to; it is neither made nor claimed."""
    return next(
        path for path in run_names(kind) if not path.exists() and not is_held(claim_of(path))
    )


def is_part(value: Any) -> bool:
    """Whether it stands for an object of a class."""
    return isinstance(value, Mapping) and "class_path" in value


def normalize_config(value: Any) -> Any:
    """The same without tuples, every class by the name under which it was defined, one of specdec's by its own name."""
    if isinstance(value, Mapping):
        plain = {str(key): normalize_config(child) for key, child in value.items()}
        if is_part(value):
            cls = _loaded(value["class_path"])
            plain["class_path"] = class_name(cls) if cls else value["class_path"]
            plain["init_args"] = plain.get("init_args") or {}
        return plain
    return (
        [normalize_config(child) for child in value] if isinstance(value, list | tuple) else value
    )


def class_name(cls: Any) -> str:
    """The name under which a class or a function is saved: its own in specdec, so that files can move; else its import
    path."""
    ours = cls.__module__.partition(".")[0] == "specdec"
    return cls.__name__ if ours else f"{cls.__module__}.{cls.__qualname__}"


def _loaded(class_path: str) -> type | None:
    module, _, name = class_path.rpartition(".")
    own_modules = (place for place in list(sys.modules) if place.startswith("specdec."))
    for place in [module] if module else itertools.chain([_PLACES.get(name, "")], own_modules):
        part = getattr(sys.modules.get(place), name, None)
        if inspect.isclass(part) and (module or part.__module__ == place):
            if not module:
                _PLACES[name] = place
            return part
    return None


_PLACES: dict[str, str] = {}  # specdec's modules in which names were found


def hyperparameters(value: Any, name: str = "") -> Any:
    """A config, or a module's arguments, as plain data for loggers.

    A part's arguments stand next to its ``class_path``, so that a logger that flattens says ``optimizer/lr``. What is a
    secret by its ``name``, or stands before the host in an address, is three stars.
    """
    if isinstance(value, str) and value:
        return redacted(value, name)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_part(value):
        value = {"class_path": value["class_path"], **(value.get("init_args") or {})}
    elif isinstance(value, functools.partial):
        value = {"class_path": class_name(value.func), **value.keywords}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        value = (
            fields if kind.__bases__ == (object,) else {"class_path": class_name(kind), **fields}
        )
    if isinstance(value, Mapping):
        return {str(key): hyperparameters(child, str(key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [hyperparameters(child, name) for child in value]
    return class_name(value) if inspect.isclass(value) or inspect.isfunction(value) else str(value)


def differences(one: Any, two: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs, as deep down as both have the same keys or are parts of the same class."""
    if one == two:
        return
    if is_part(one) and is_part(two) and one["class_path"] == two["class_path"]:
        yield from differences(one["init_args"], two["init_args"], key)
    elif isinstance(one, dict) and isinstance(two, dict) and not (is_part(one) or is_part(two)):
        for name in one | two:
            yield from differences(one.get(name), two.get(name), f"{key}.{name}" if key else name)
    else:
        yield key, one, two


def difference_keys(value: Any, key: str = "") -> Iterator[str]:
    """All names that :func:`differences` may give to a difference, and those above them."""
    below = value["init_args"] if is_part(value) else value
    for name, child in below.items() if isinstance(below, dict) else ():
        inner = f"{key}.{name}" if key else name
        yield inner
        yield from difference_keys(child, inner)


def to_text(value: Any) -> str:
    """In a few words; of a part, only the arguments that are not its class's own defaults."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]
    if isinstance(value, list):
        return f"[{', '.join(map(to_text, value))}]"
    if is_part(value):
        cls = _loaded(value["class_path"])
        parameters = inspect.signature(cls).parameters if cls else {}
        defaults = {
            name: normalize_config(parameter.default) for name, parameter in parameters.items()
        }
        chosen = [
            (name, child)
            for name, child in value["init_args"].items()
            if defaults.get(name, ...) != child
        ]
        arguments = [f"{name}={to_text(child)}" for name, child in chosen]
        short_name = value["class_path"].rpartition(".")[2]
        return f"{short_name}({', '.join(arguments)})" if arguments else short_name
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} {to_text(child)}' for name, child in value.items())}}}"
    return str(value)
