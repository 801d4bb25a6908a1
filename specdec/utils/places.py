"""Where the parts of a run write: inside the run's directory, unless the user has typed another place.

A config may come from a stranger. So a path in it is judged by where it ends up, whatever its key is called.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from specdec.utils.trust import PLACES, load_yaml, permissions

Typed = Collection[tuple[str, str]]
"""The last word of an option's name, and its value."""


def typed_values(words: Sequence[str]) -> set[tuple[str, str]]:
    """What a command line says by itself, not through a config file."""
    pairs = set[tuple[str, str]]()
    behind = ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else (behind, "", word)
        name = option.lstrip("-").rpartition(".")[2].removesuffix("+")
        if name != "config" and (equals or not word.startswith("-")):
            pairs.add((name, value))
            if value.lstrip().startswith(("{", "[")):
                pairs.update(_texts(load_yaml(value, option), name))
        behind = "" if equals else option if word.startswith("-") else behind
    return pairs


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _texts(child, str(key).rpartition(".")[2])
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child, name)
    else:
        yield name, str(value)


def keep_inside(part: Any, root: Path, typed: Typed, key: str = "", judged: bool = False) -> Any:
    """A parsed config, changed so that its relative :data:`PLACES` start from a run's directory.

    Args:
        part: a config, or any value in it, without references.
        root: the run's directory.
        typed: see :func:`typed_values`; these lead where they say, and a ``save_dir`` starts from the directory too.
        key: the part's dotted name.
        judged: whether every text counts as a path, as below ``trainer``, where parts of Lightning are.

    Raises:
        ValueError: a path leads out of the directory.
    """
    name = key.rpartition(".")[2]
    judged = judged or key == "trainer"
    if isinstance(part, Namespace | dict):
        items = vars(part) if isinstance(part, Namespace) else part
        for child, value in items.items():
            below = f"{key}.{child}" if key else str(child)
            items[child] = keep_inside(value, root, typed, below, judged)
    elif isinstance(part, list | tuple):
        return type(part)(keep_inside(value, root, typed, key, judged) for value in part)
    elif isinstance(part, str | os.PathLike) and (judged or name in PLACES):
        text = os.fspath(part)
        free = (name, text) in typed or name in permissions[-1].keys
        end = os.path.join(root, os.path.expanduser(os.path.expandvars(text)))
        if not (free or is_inside(end, root)):
            raise ValueError(
                f"config: {key} is taken from the command line alone ({text!r:.80} leads out of the run's directory): "
                f"remove it, or if you trust this file, add --allow_keys {name}"
            )
        if name == "save_dir" or (name in PLACES and not free):
            return str(root / text)
    return part


def checkpoint_folders(root: Path, callbacks: Sequence[Any], typed: Typed) -> list[Path]:
    """Where checkpoints may lie, whose names are made of templates; none, for anywhere, where the user has decided."""
    if "filename" in {*(name for name, _ in typed), *permissions[-1].keys}:
        return []
    folders = (getattr(callback, "dirpath", None) for callback in callbacks)
    return [root, *(Path(folder) for folder in folders if folder)]


def is_inside(path: Path | str, root: Path | str) -> bool:
    """Whether a path ends up at a folder or below it."""
    place = os.path.abspath(root)
    return os.path.commonpath([place, os.path.abspath(path)]) == place
