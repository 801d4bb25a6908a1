"""Config files and command line overrides, with interpolation resolved once, after both.

LightningCLI resolves ``${...}`` file by file, before the overrides; so a value that refers to an overridden one would
silently keep the old figure. Here the references are replaced first, against everything, and LightningCLI gets
plain files.
"""

import datetime
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.utils.files import explain
from specdec.utils.imports import guard

SECRET = re.compile(r"oc\.env:[^}]*(TOKEN|KEY|SECRET|PASSWORD)", re.IGNORECASE)


def shipped(path: str) -> str:
    """``conf/...`` as shipped with the package, where the working folder has no such file."""
    if not path.startswith("conf/") or Path(path).exists():
        return path
    places = [base / path for base in Path(__file__).parents[1:3]]
    return next((str(place) for place in places if place.exists()), path)


def _is_yaml(value: Any) -> bool:
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def read_yaml(path: str) -> DictConfig:
    """A config file, unresolved; ValueError, with the line, if it is missing, not YAML or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        config = OmegaConf.create(text)
    except OSError as error:
        raise explain(error, path) from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except (UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: not a config file: {error}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path}: a config file must be a mapping of keys")
    for key, value in list(_leaves(OmegaConf.to_container(config, resolve=False))):
        if _is_yaml(value):
            places = (Path(path).parent / value, Path(shipped(value)))  # a part's file may lie beside its user
            found = next((str(place.resolve()) for place in places if place.is_file()), value)
            OmegaConf.update(config, key, found)
    return config


def _split(args: list[str]) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Config files, ``(dotted key, value)`` overrides, and the arguments without the config files."""
    files, overrides, rest, left = [], [], [], list(args)
    while left:
        first = left.pop(0)
        name, equals, value = first.partition("=")
        given = [first]
        if not equals and name.startswith("-") and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
            given.append(value)
        if name in ("--config", "-c") and equals:
            files.append(shipped(value))
        elif equals and name.startswith("--"):
            path = Path(shipped(value))
            # by its whole path: a bare mine.yaml would also be the name of something in a module
            value = str(path.resolve()) if _is_yaml(value) and path.is_file() else shipped(value)
            overrides.append((name[2:], value))
            rest.append(f"{name}={value}")
        else:
            rest += given
    return files, overrides, rest


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    else:
        yield path, value


def _parsed(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:  # a glob such as *.txt is text
        return value


def _overlay(tree: DictConfig, overrides: list[tuple[str, str]]) -> None:
    for key, value in overrides:
        parts = key.rstrip("+").split(".")
        for depth in range(1, len(parts)):  # a part chosen by its name becomes a mapping that can hold arguments
            prefix = ".".join(parts[:depth])
            node = OmegaConf.select(tree, prefix, throw_on_resolution_failure=False)
            if node is not None and not OmegaConf.is_config(node):
                OmegaConf.update(tree, prefix, {"class_path": node})
        OmegaConf.update(tree, key.rstrip("+"), _parsed(value), merge=True, force_add=True)


def compose(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The merged config files with every reference resolved, and the remaining arguments; ValueError if a file cannot
    be read, a reference leads nowhere, or a secret of the environment would be written into the saved config."""
    guard()
    files, overrides, rest = _split(args)
    tree = DictConfig({})
    for file in files:
        tree.merge_with(read_yaml(file))
    if any(value == "???" for _, value in overrides):
        raise ValueError("an override cannot be '???': give a value")
    full, where = tree.copy(), " + ".join(files)
    try:
        _overlay(full, overrides)
        for path, value in list(_leaves(OmegaConf.to_container(tree, resolve=False))):
            if not (isinstance(value, str) and "${" in value):
                continue
            if SECRET.search(value):
                raise ValueError(f"{where}: {path} would write a secret of the environment into the saved config")
            OmegaConf.update(tree, path, OmegaConf.select(full, path), merge=False)
        resolved = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}, rest


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
    """The first of :func:`run_names` that does not exist; it is neither made nor claimed."""
    return next(path for path in run_names(kind) if not path.exists())
