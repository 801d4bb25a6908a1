"""What is known of the commands and of the classes that options name, without an import: ``help.json``.

``python -m specdec.cli`` writes that file: every command's help, the arguments of every class that a config can name,
and the versions of the libraries that they were read from.
"""

import functools
import importlib
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

from specdec.utils import trust
from specdec.utils.text import nearest_name

HELP = Path(__file__).parents[1] / "help.json"
OPTION = re.compile(r"(?m)^  (--[^\n]*(?:\n {20,}[^\n]*)*)")  # with its description
SUBCLASSES = re.compile(r"\(type: (.*?)(?:, default: .*?)?, known subclasses: ([^()]*)\)$")
# they pass arguments on to packages that need not be here
PASS_ON = ("WandbLogger", "CometLogger")


@functools.cache
def index() -> dict[str, Any]:
    """Return what ``help.json`` holds: ``commands``, ``classes`` and ``versions``."""
    return json.loads(HELP.read_text(encoding="utf-8"))


def last_name(path: str) -> str:
    """Return the class's own name of an import path."""
    return path.rpartition(".")[2]


def nearest_class(name: str) -> str:
    """Return ``did you mean ...?`` with a class of specdec's, Lightning's or an allowed module, or an empty text."""
    names = [last_name(path) for path in index()["classes"]]
    for module in trust.permissions[-1].imports:
        names += vars(sys.modules[module])
    return nearest_name(name, names)


class KnownPart(NamedTuple):
    """An option whose value names a class."""

    classes: tuple[str, ...]  # import paths
    words: tuple[str, ...]  # what may stand there instead
    free: bool  # whether any string may

    @property
    def names(self) -> list[str]:
        """The classes' own names and the words."""
        return [*map(last_name, self.classes), *self.words]


def known_parts(text: str) -> dict[str, KnownPart]:
    """Return the options of a help text that take a class, by their names without the dashes."""
    parts = {}
    for option in OPTION.findall(text):
        line = " ".join(option.split())
        if about := SUBCLASSES.search(line):
            types, classes = about.groups()
            words = re.findall(r"'([^']*)'", "".join(re.findall(r"Literal\[.*?\]", types)))
            words += ["true", "false"] * ("bool" in types)
            free = re.search(r"\b(str|Any|Path)\b", types) is not None
            name = line.split()[0].removeprefix("--")
            parts[name] = KnownPart(tuple(classes.split(", ")), tuple(words), free)
    return parts


def installed_version(library: str) -> str:
    """Return a library's version without its local part, as ``+cpu``."""
    return version(library).partition("+")[0]


def write_index(commands: Mapping[str, str]) -> None:
    """Write ``help.json``, of every command's help text."""
    parts = [part for text in commands.values() for part in known_parts(text).values()]
    classes = {path: class_arguments(path) for part in parts for path in part.classes}
    content = {
        "versions": {library: installed_version(library) for library in ("lightning", "torch")},
        "classes": dict(sorted(classes.items())),
        "commands": commands,
    }
    HELP.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def class_arguments(path: str) -> list[str] | None:
    """Return the arguments that a class takes in a config; None if that is not known."""
    module, _, name = path.rpartition(".")
    if name in PASS_ON:
        return None
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(
            getattr(importlib.import_module(module), name), fail_untyped=False
        )
    except ValueError:  # of a type that no config can give
        return None
    return sorted({key.partition(".")[0] for key in vars(parser.get_defaults())})
