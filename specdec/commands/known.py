"""What is known of the commands and of the classes that options name, without an import: ``help.json``.

``python docs/write_help.py`` writes that file: every command's help, the arguments of every class that a config can
name, and the versions of the libraries that they were read from.
"""

import functools
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from specdec.utils import trust
from specdec.utils.text import nearest_name

HELP = Path(__file__).parents[1] / "help.json"


@functools.cache
def index() -> dict[str, Any]:
    """Return what ``help.json`` holds: ``commands``, their ``parts``, ``classes`` and ``versions``."""
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

    classes: list[str]  # import paths
    words: list[str]  # what may stand there instead
    free: bool  # whether any string may

    @property
    def names(self) -> list[str]:
        """The classes' own names and the words."""
        return [*map(last_name, self.classes), *self.words]


def installed_version(library: str) -> str:
    """Return a library's version without its local part, as ``+cpu``."""
    return version(library).partition("+")[0]
