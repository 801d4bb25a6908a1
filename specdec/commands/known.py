"""What is known of the commands and of the classes that options name, without an import: ``help.json``.

``python docs/write_help.py`` writes that file: every command's help, the arguments of every class that a config can
name, and the versions of the libraries that they were read from.
"""

import functools
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from specdec.utils import trust
from specdec.utils.reading import read_json
from specdec.utils.text import nearest_name

# of a help text: an option or a positional argument with its description, and the type at the end of that
OPTION = re.compile(r"(?m)^  ((?:--?\w|[a-z])[^\n]*(?:\n {20,}[^\n]*)*)")
TYPE = re.compile(
    r"\((?:required, )?type: (.*?)(?:, default: (.*?))?(?:, known subclasses: [^()]*)?\)$"
)
HELP = Path(__file__).parents[1] / "help.json"  # written by python docs/write_help.py
REMEDY = "install specdec again, or in a checkout run python docs/write_help.py"


@functools.cache
def index() -> dict[str, Any]:
    """Return what ``help.json`` holds: ``commands``, their ``parts``, ``classes`` and ``versions``.

    Raises:
        ValueError: the file is gone or damaged.
    """
    content = read_json(HELP)
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name), dict) for name in ("commands", "parts", "classes", "versions")
    ):
        raise ValueError(f"{HELP}: damaged: {REMEDY}")
    return content


def command_help(name: str) -> str:
    """Return the whole help text of a command; ValueError if ``help.json`` is gone or damaged."""
    text = index()["commands"].get(name)
    if not isinstance(text, str):
        raise ValueError(f"{HELP}: damaged, it has no help of {name}: {REMEDY}")
    return text


def last_name(path: str) -> str:
    """Return the class's own name of an import path."""
    return path.rpartition(".")[2]


def nearest_class(name: str) -> str:
    """Return ``did you mean ...?`` with a class of specdec's, Lightning's or an allowed module, or an empty text."""
    names = [last_name(path) for path in index()["classes"]]
    for module in trust.permissions[-1].imports:
        names += vars(sys.modules[module])
    return nearest_name(name, names)


class KnownOption(NamedTuple):
    """An option, or a positional argument, as a help text describes it."""

    type: str  # as jsonargparse prints it; empty if it does not
    about: str  # without type and default
    default: str = ""  # as jsonargparse prints it; empty if it does not


@functools.cache
def known_options(text: str) -> dict[str, KnownOption]:
    """Return the options of a help text by their names without the dashes, and its positional arguments."""
    options = {}
    for entry in OPTION.findall(text):
        names, _, rest = entry.partition("  ")
        line = " ".join(rest.split())
        described = TYPE.search(line)
        about = line[: described.start()] if described else line
        default = (described[2] or "") if described else ""
        option = KnownOption(described[1] if described else "", about.strip(" .,"), default)
        options[re.split(r"[\s,]", names.strip())[0].removeprefix("--")] = option
    return options


def required_names(command: str) -> list[str]:
    """Return what a command cannot do without, by its usage: options with dashes, positional arguments without."""
    usage = command_help(command).partition("\n")[0]
    return re.findall(r"(?<= )(?:--[\w.]+|[a-z]\w*)(?= |$)", usage.partition("[OPTIONS]")[2])


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
