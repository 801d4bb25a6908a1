"""Where the parts of a run write: inside the run's directory, unless the user has typed another place.

A config may come from a stranger. So a path in it is judged by where it ends up, whatever its key is called.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import Namespace

from specdec.utils.trust import PLACES, flags_of_keys, permissions, reaching_keys

Typed = Collection[tuple[str, str]]
"""An option's :func:`plain_key`, and its value."""


class PathText(NamedTuple):
    """A text in a config that may be a path: it stands in ``items`` at ``index``."""

    items: Any
    index: Any
    key: str

    @property
    def text(self) -> str:
        """The text itself."""
        return os.fspath(self.items[self.index])

    @property
    def name(self) -> str:
        """The last word of its key."""
        return self.key.rpartition(".")[2]

    def is_typed(self, typed: Typed) -> bool:
        """Whether the user has typed this value for this key."""
        return (plain_key(self.key), self.text) in typed

    def leads_out(self, root: Path) -> bool:
        """Whether it ends up outside a run's directory, from which it starts if it is relative."""
        text = os.path.expanduser(os.path.expandvars(self.text))
        return not is_inside(os.path.join(root, text), root)


def plain_key(key: str) -> str:
    """A dotted key as the shortest option spells it: ``trainer.logger.init_args.name`` is ``trainer.logger.name``."""
    words = key.lstrip("-").removesuffix("+").split(".")
    return ".".join(word for word in words if word not in ("init_args", "dict_kwargs"))


def typed_values(words: Sequence[str]) -> set[tuple[str, str]]:
    """The options of a command line that have one plain value each: not those inside a config file or ``{...}``."""
    pairs = set[tuple[str, str]]()
    behind = ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else (behind, "", word)
        if plain_key(option) != "config" and (equals or not word.startswith("-")):
            pairs.add((plain_key(option), value))
        behind = "" if equals else option if word.startswith("-") else behind
    return pairs


def path_texts(part: Any, key: str = "", judged: bool = False) -> Iterator[PathText]:
    """The texts of a config that may be paths: every one below ``trainer``, where parts of Lightning are, and elsewhere
    those whose name is in :data:`PLACES`.

    Args:
        part: a config, or any value in it, without references.
        key: the part's dotted name.
        judged: whether every text counts as a path.
    """
    judged = judged or key == "trainer"
    items: Any = vars(part) if isinstance(part, Namespace) else part
    items = list(items) if isinstance(items, tuple) else items
    of_names = isinstance(items, Mapping)
    for index, value in items.items() if of_names else enumerate(items):
        below = key if not of_names else f"{key}.{index}" if key else str(index)
        if isinstance(value, Namespace | Mapping | list | tuple):
            yield from path_texts(value, below, judged)
        elif isinstance(value, str | os.PathLike):
            path = PathText(items, index, below)
            if judged or path.name in PLACES:
                yield path


def make_typed_places_absolute(config: Any, typed: Typed) -> set[tuple[str, str]]:
    """Change a parsed config so that what is saved of it leads where the user has typed, from any folder.

    A relative ``save_dir`` stays: it starts from the run's directory.

    Returns:
        What is typed, with the changed values.
    """
    changed = set(typed)
    for path in path_texts(config):
        if path.name in PLACES and path.name != "save_dir" and path.is_typed(typed):
            path.items[path.index] = os.path.abspath(os.path.expanduser(path.text))
            changed.add((plain_key(path.key), path.text))
    return changed


def move_places_inside(config: Any, root: Path, typed: Typed) -> None:
    """Judge the paths of a parsed config, and change it so that its relative :data:`PLACES` start from a run's
    directory.

    Args:
        config: without references; a path typed in it is absolute (:func:`make_typed_places_absolute`).
        root: the run's directory.
        typed: see :func:`typed_values`; these may lead out.

    Raises:
        ValueError: another path leads out of the directory, and its name is not allowed.
    """
    allowed = permissions[-1].keys
    for path in path_texts(config):
        is_free = path.is_typed(typed) or path.name in allowed
        if not is_free and path.leads_out(root):
            raise ValueError(
                f"config: {path.key} is taken from the command line alone ({path.text!r:.80} would lead out of the "
                "run's directory, if it is a path): remove it, or if it is none, or you trust this file, add "
                f"--allow_keys {path.name}"
            )
        if path.name in PLACES:
            path.items[path.index] = str(root / os.path.expanduser(path.text))


def flags_for(config: Any, root: Path) -> list[str]:
    """The arguments that allow again what is allowed now, and whatever the saved config of a run in ``root`` reaches
    that was typed."""
    keys = {needs for _, needs, _ in reaching_keys(config) if needs}
    keys |= {path.name for path in path_texts(config) if path.leads_out(root)}
    return flags_of_keys(keys)


def checkpoint_folders(root: Path, callbacks: Sequence[Any], typed: Typed) -> list[Path]:
    """Where checkpoints may lie, whose names are made of templates; none, for anywhere, where any name is allowed.

    Args:
        root: the run's directory.
        callbacks: those of the config, once Lightning has given each its folder, a logger's where it has none.
        typed: see :func:`typed_values`; a typed name leads where it says, up to its first ``{``.
    """
    if "filename" in permissions[-1].keys:
        return []
    folders = [root]
    for callback in callbacks:
        folder = Path(getattr(callback, "dirpath", None) or root)
        name = str(getattr(callback, "filename", None))
        folders.append(folder)
        if ("trainer.callbacks.filename", name) in typed:
            folders.append(Path(os.path.dirname(os.path.join(folder, name.partition("{")[0]))))
    return folders


def is_inside(path: Path | str, root: Path | str) -> bool:
    """Whether a path ends up at a folder or below it."""
    place = os.path.abspath(root)
    return os.path.commonpath([place, os.path.abspath(path)]) == place
