"""Misspelt names of a command line and its config files, found before anything slow is imported.

Options and specdec's and Lightning's classes are known from ``help.json``. Only what the parser would surely refuse
is refused; whatever is in doubt, as a class of a user's module, is left to it.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdec.commands.known import KnownPart, command_help, index, installed_version, last_name
from specdec.utils.config import PRESETS, packaged_path, preset_file, preset_names, read_yaml
from specdec.utils.text import nearest_name
from specdec.utils.trust import read_yaml_text

YAML = (".yaml", ".yml", ".json")
SHARED = "--allow_imports --allow_env --allow_keys --target"  # of many commands
PART_KEYS = ("class_path", "init_args", "dict_kwargs")
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_spelling(commands: Sequence[str], argv: Sequence[str], own_modules: bool) -> None:
    """Raise ValueError, with the likeliest name, for what a command cannot take.

    Args:
        commands: its name, and that of another whose options it takes too.
        argv: its arguments.
        own_modules: whether values may name classes of the user's own modules.
    """
    spelling = Spelling(commands, own_modules)
    options = list(_options(itertools.takewhile(lambda word: word != "--", argv)))
    for option, _ in options:
        spelling.check_option(option)
    for option, value in options:
        if option in ("config", "c"):
            spelling.check_file(value)
        else:
            spelling.check_value(option, value)
    for option, _ in options:
        spelling.check_argument(option)


def _options(argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line, without dashes and the ``+`` of those that add, and their first values."""
    words = list(argv)
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--") or word.split("=")[0] == "-c":
            option, equals, value = word.lstrip("-").partition("=")
            yield option.removesuffix("+"), preset_file(option, value if equals else following)


class Spelling:
    """The names of one command; the arguments are those of :func:`check_spelling`.

    ``where`` names the config file that a value stands in; it is empty for one of the command line.
    """

    def __init__(self, commands: Sequence[str], own_modules: bool) -> None:
        self.command = commands[0]
        self.text = "\n".join([SHARED, *(command_help(name) for name in commands)])
        self.own_modules = own_modules
        self.options = {option[2:] for option in re.findall(r"(?<![\w-])--[\w.]+", self.text)}
        self.parts = {
            option: KnownPart(**about)
            for name in commands
            for option, about in index()["parts"][name].items()
        }
        self.doubt = own_modules  # whether a class may be named whose arguments are not known

    def check_option(self, option: str) -> None:
        """Refuse an option of the command line that there is not."""
        if option not in self.options and not self._holder(option):
            self._refuse_name(f"option --{option}", option, "--")

    def check_argument(self, option: str) -> None:
        """Refuse an option that is an argument of a part if no class that the part could be takes it."""
        holder = self._holder(option)
        if self.doubt or holder is None or holder not in self.parts:
            return
        classes = self.parts[holder].classes
        names = {*PART_KEYS, "help"}
        for path in classes:
            arguments = index()["classes"].get(path)
            if arguments is None:
                return
            names.update(arguments)
        name = option.removeprefix(f"{holder}.").removeprefix("init_args.").partition(".")[0]
        if name not in names:
            choices = ", ".join(sorted(names - {*PART_KEYS, "help"}))
            near = nearest_name(name, names, f"--{holder}.") or f"choose from {choices}"
            self._refuse(f"unknown option --{option}", near, classes[0])

    def _holder(self, option: str) -> str | None:
        """Return the option above this one that takes a part or a mapping, whose names are its own."""
        for dot in re.finditer(r"\.", option):
            above = option[: dot.start()]
            takes_part = f"{above}.help" in self.options or f"--{above} CONFIG" not in self.text
            if above in self.options and takes_part:
                return above
        return None

    def check_file(self, path: str, option: str = "") -> None:
        """Check a config file, of everything or of one option."""
        path = packaged_path(path)
        config = None
        if Path(path).is_file():  # nothing that can be read only once
            with contextlib.suppress(ValueError):  # the parser's reader says what is wrong with it
                config = read_yaml(path)
        elif not option and path.endswith(YAML) and not Path(path).exists():
            raise ValueError(f"{path}: no such file or directory")
        if config is not None and option in self.parts:
            self._check_part(option, config, path)
        elif config is not None:
            self._check_keys(option, config, path)

    def check_value(self, option: str, value: Any, where: str = "") -> None:
        """Check the value of an option, on the command line or in a config file."""
        if option in self.parts:
            self._check_part(option, value, where)
        elif any(other.startswith(f"{option}.") for other in self.options):
            if isinstance(value, dict):
                self._check_keys(option, value, where)
            elif isinstance(value, str) and value.endswith(YAML):
                self.check_file(value, option)
            elif option in PRESETS and isinstance(value, str) and value.isidentifier():
                names = preset_names(option)
                near = nearest_name(value, names) or f"choose from {', '.join(names)}"
                self._refuse(f"{option}: there is no {value}", near, "specdec")
            elif (
                isinstance(value, str)
                and (where or option != "target")  # which is short for a source
                and os.path.exists(value)
                and not os.path.isdir(value)
            ):
                read_yaml_text(value)  # the parser reads all of it

    def _check_keys(self, option: str, config: Mapping[Any, Any], where: str) -> None:
        start = f"{option}." if option else ""
        below = (other for other in self.options if other.startswith(start))
        names = {other.removeprefix(start).split(".")[0] for other in below}
        for key, value in config.items():
            if isinstance(key, str) and "." not in key and not key.startswith("__"):
                name = key.removesuffix("+")
                if name not in names:
                    self._refuse_name(f"key {start}{name} in {where}", start + name)
                self.check_value(start + name, value, where)

    def _check_part(self, option: str, value: Any, where: str) -> None:
        """Check a class by its name, with arguments, in a file, or several."""
        if isinstance(value, list):
            for part in value:
                self._check_part(option, part, where)
        elif isinstance(value, dict) and isinstance(path := value.get("class_path"), str):
            self._check_class(option, path, where)
            self._check_init_args(option, path, value.get("init_args"), where)
        elif isinstance(value, str) and value.endswith(YAML):
            self.check_file(value, option)
        elif isinstance(value, str):
            self._check_class(option, value, where)

    def _check_init_args(self, option: str, path: str, init_args: Any, where: str) -> None:
        classes = self.parts[option].classes
        matching = [known for known in classes if path in (known, last_name(known))]
        names = index()["classes"].get(matching[0]) if len(matching) == 1 else None
        if names is None or not isinstance(init_args, dict):
            return
        for key in init_args:
            if isinstance(key, str) and "." not in key and key.removesuffix("+") not in names:
                near = nearest_name(key, names) or f"it takes {', '.join(names) or 'none'}"
                what = f"{option} in {where}: {path} has no argument {key}"
                self._refuse(what, near, matching[0])

    def _check_class(self, option: str, name: str, where: str) -> None:
        """Check a class by its own name or its import path."""
        part = self.parts[option]
        known = part.free or name in (*part.classes, *part.names)
        if known or not PATH.fullmatch(name) or Path(name).exists():
            return
        if "." in name:
            self.doubt = True
        elif not self.own_modules and not isinstance(yaml.safe_load(name), bool | None):
            near = nearest_name(name, part.names)
            # whose classes are all known
            if near or all(path.startswith("specdec.") for path in part.classes):
                near = near or f"choose from {', '.join(part.names)}"
                place = f"{option} in {where}" if where else option
                self._refuse(f"{place}: there is no {name}", near, part.classes[0])

    def _refuse_name(self, what: str, option: str, dashes: str = "") -> None:
        """Refuse an option or a key."""
        library = "lightning" if option.startswith(("trainer.", "checkpoint.")) else "specdec"
        names = [name for name in self.options if not name.endswith(".help")]
        near = nearest_name(option, names, dashes) or f"see specdec {self.command} --help"
        self._refuse(f"unknown {what}", near, library)

    def _refuse(self, what: str, hint: str, path: str) -> None:
        """Raise ValueError, but where ``path`` is a library's and another version of it is here than was looked at."""
        library = path.split(".")[0]
        known_version = index()["versions"].get(library)
        if known_version is None or installed_version(library) == known_version:
            raise ValueError(f"{what}; {hint}".removesuffix("; "))
