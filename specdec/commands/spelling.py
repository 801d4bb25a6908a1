"""Misspelt names of a command line and its config files, found before anything slow is imported.

Options and specdec's and Lightning's classes are known from ``help.json``, classes of a user's module from its source,
which is read and not run. Only what the parser would refuse for certain is refused; whatever is in doubt is left to it.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser

from specdec.utils.imports import refusal
from specdec.utils.text import nearest_name
from specdec.utils.trust import allowed

HELP = Path(__file__).parents[1] / "help.json"
"""Written by ``python -m specdec.cli``: every command's help, the arguments of every class that a config can name, and
the versions of what they were read from."""
OPTION = re.compile(r"(?m)^  (--[^\n]*(?:\n {20,}[^\n]*)*)")  # with its description
YAML = (".yaml", ".yml", ".json")
PART_KEYS = ("class_path", "init_args", "dict_kwargs")
DYNAMIC = {
    "exec",
    "eval",
    "globals",
    "locals",
    "vars",
    "setattr",
    "__dict__",
    "__getattr__",
    "modules",
}
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@functools.cache
def index() -> dict[str, Any]:
    """What ``help.json`` holds."""
    return json.loads(HELP.read_text(encoding="utf-8"))


def nearest_class(name: str) -> str:
    """``did you mean ...?`` with a class of specdec's, Lightning's or a module the user vouches for, or nothing."""
    own = [one for module in allowed[-1].imports for one in vars(sys.modules[module])]
    return nearest_name(name, [path.rpartition(".")[2] for path in index()["classes"]] + own)


# to packages that need not be here, whatever else they are given
PASS_ON = ("WandbLogger", "CometLogger")


def write(commands: Mapping[str, str]) -> None:
    """Write ``help.json``, of every command's help text."""
    classes = {
        path: arguments_of(path) for text in commands.values() for part in known_parts(text).values()
        for path in part.classes
    }  # fmt: skip
    versions = {library: _version(library) for library in ("lightning", "torch")}
    known = {"versions": versions, "classes": dict(sorted(classes.items())), "commands": commands}
    HELP.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def arguments_of(path: str) -> list[str] | None:
    """The arguments that a class takes in a config; None if that is not known."""
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


def _version(library: str) -> str:
    return version(library).partition("+")[0]


class KnownPart(NamedTuple):
    """An option whose value names a class."""

    classes: tuple[str, ...]  # import paths
    words: tuple[str, ...]  # what may stand there instead
    free: bool  # whether any string may


def known_parts(text: str) -> dict[str, KnownPart]:
    """The options of a help text that take a class, by their names without the dashes."""
    found = {}
    for match in OPTION.finditer(text):
        line = " ".join(match[1].split())
        about = re.search(r"\(type: (.*?)(?:, default: .*?)?, known subclasses: ([^()]*)\)$", line)
        if about:
            words = re.findall(r"'([^']*)'", "".join(re.findall(r"Literal\[.*?\]", about[1])))
            words += ["true", "false"] * ("bool" in about[1])
            free = re.search(r"\b(str|Any|Path)\b", about[1]) is not None
            found[line.split()[0][2:]] = KnownPart(tuple(about[2].split(", ")), tuple(words), free)
    return found


def check(
    command: str, text: str, argv: Sequence[str], allowed: Sequence[str], modules: Sequence[str]
) -> None:
    """Raise ValueError, with the likeliest name, for what a command cannot take.

    Args:
        text: the help of the command.
        allowed: packages of which values may name classes.
        modules: the user's own, of which they may too.
    """
    names = Spelling(command, text, allowed, modules)
    given = list(_options(itertools.takewhile(lambda word: word != "--", argv)))
    for option, _ in given:
        if option not in names.options and not names.above(option):
            names.unknown(f"option --{option}", option, "--")
    for option, value in given:
        if option in ("config", "c"):
            names.file(value)
        else:
            names.value(option, value)
    for option, _ in given:
        names.argument(option)


class Spelling:
    """The names of one command; see :func:`check`."""

    def __init__(
        self, command: str, text: str, allowed: Sequence[str], modules: Sequence[str]
    ) -> None:
        self.command = command
        self.text = text
        self.allowed = (*allowed, *modules)
        self.modules = modules
        self.options = {option[2:] for option in re.findall(r"(?<![\w-])--[\w.]+", text)}
        self.parts = known_parts(text)
        self.arguments = index()["classes"]
        self.doubt = bool(modules)  # whether a class may be named whose arguments are not known

    def above(self, option: str) -> str | None:
        """The option above this one that takes a part or a mapping, whose names are its own."""
        above = (option[: dot.start()] for dot in re.finditer(r"\.", option))
        taking = (one for one in above if one in self.options)
        return next(
            (o for o in taking if f"{o}.help" in self.options or f"--{o} CONFIG" not in self.text),
            None,
        )

    def argument(self, option: str) -> None:
        """An option that is an argument of a part, of whichever class it is."""
        part = self.above(option)
        classes = self.parts[part].classes if part in self.parts and not self.doubt else ()
        taken = [self.arguments.get(path) for path in classes]
        if not taken or None in taken:
            return
        name = option[len(f"{part}.") :].removeprefix("init_args.").partition(".")[0]
        names = {*itertools.chain.from_iterable(taken), *PART_KEYS, "help"}
        if name not in names:
            own = sorted(names - {*PART_KEYS, "help"})
            near = nearest_name(name, names, f"--{part}.") or f"choose from {', '.join(own)}"
            self.refuse(f"unknown option --{option}", near, classes[0])

    def file(self, path: str, option: str = "") -> None:
        """A config file, of everything or of one option."""
        from specdec.utils.config import read_yaml, shipped

        path = shipped(path)
        config = None
        if Path(path).is_file():  # nothing that can be read only once
            with contextlib.suppress(ValueError):  # which whoever reads it explains
                config = read_yaml(path)
        elif not option and path.endswith(YAML) and not Path(path).exists():
            raise ValueError(f"{path}: no such file or directory")
        if config is not None:
            (self._part if option in self.parts else self._keys)(option, config, path)

    def value(self, option: str, value: Any, where: str = "") -> None:
        """The value of an option, on the command line or in a config file."""
        if option in self.parts:
            self._part(option, value, where)
        elif any(other.startswith(f"{option}.") for other in self.options):
            if isinstance(value, dict):
                self._keys(option, value, where)
            elif isinstance(value, str) and value.endswith(YAML):
                self.file(value, option)

    def _keys(self, option: str, config: Mapping[Any, Any], where: str) -> None:
        start = f"{option}." if option else ""
        names = {
            other[len(start) :].split(".")[0] for other in self.options if other.startswith(start)
        }
        for key, value in config.items():
            if isinstance(key, str) and "." not in key and not key.startswith("__"):
                name = key.removesuffix("+")
                if name not in names:
                    self.unknown(f"key {start}{name} in {where}", start + name)
                self.value(start + name, value, where)

    def _part(self, option: str, value: Any, where: str) -> None:
        """A class by its name, with arguments, in a file, or several."""
        if isinstance(value, list):
            for one in value:
                self._part(option, one, where)
        elif isinstance(value, dict) and isinstance(path := value.get("class_path"), str):
            self._class(option, path, where)
            known = [
                one for one in self.parts[option].classes if path in (one, one.rpartition(".")[2])
            ]
            taken = self.arguments.get(known[0]) if len(known) == 1 else None
            given = value.get("init_args") or {}
            for key in given if isinstance(given, dict) else ():
                if (
                    taken is not None
                    and isinstance(key, str)
                    and key.removesuffix("+") not in taken
                    and "." not in key
                ):
                    what = f"{option} in {where}: {path} has no argument {key}"
                    self.refuse(
                        what,
                        nearest_name(key, taken) or f"it takes {', '.join(taken) or 'none'}",
                        known[0],
                    )
        elif isinstance(value, str) and value.endswith(YAML):
            self.file(value, option)
        elif isinstance(value, str):
            self._class(option, value, where)

    def _class(self, option: str, name: str, where: str) -> None:
        """A class by its own name or its import path."""
        part = self.parts[option]
        place = f"{option} in {where}" if where else option
        names = [path.rpartition(".")[2] for path in part.classes] + [*part.words]
        if (
            part.free
            or name in part.classes
            or name in names
            or not PATH.fullmatch(name)
            or Path(name).exists()
        ):
            return
        if "." in name:
            self._imported(name, place)
        elif not self.modules and not isinstance(yaml.safe_load(name), bool | None):
            near = nearest_name(name, names)
            # whose classes are all known
            if near or all(path.startswith("specdec.") for path in part.classes):
                self.refuse(
                    f"{place}: there is no {name}",
                    near or f"choose from {', '.join(names)}",
                    part.classes[0],
                )

    def _imported(self, path: str, place: str) -> None:
        """A class by its import path: the source of its module says whether it has the name."""
        self.doubt = True
        allowed = any(f"{path}.".startswith(f"{name}.") for name in self.allowed)
        file, name = source_of(path)
        names = names_in(file) if file and name else None
        if names is not None and name not in names:
            module = path[: path.rfind(f".{name}")]
            near = (
                nearest_name(name, [one for one in names if one[:1].isupper()], f"{module}.")
                or f"see {file}"
            )
            more = "" if allowed else f" and add --allow_imports {module}, if you trust it"
            self.refuse(f"{place}: {module} has no {name}", near + more, path)
        elif not allowed:
            own = (
                ""
                if file
                else nearest_name(path.split(".")[0], [one.stem for one in Path().glob("*.py")])
            )
            line = refusal(f"Importing '{path}' is not allowed; argument {place.split()[0]}")
            raise ValueError(f"{line}; {own}".removesuffix("; "))

    def unknown(self, what: str, option: str, dashes: str = "") -> None:
        """Refuse an option or a key."""
        library = "lightning" if option.startswith(("trainer.", "checkpoint.")) else "specdec"
        names = [name for name in self.options if not name.endswith(".help")]
        self.refuse(
            f"unknown {what}",
            nearest_name(option, names, dashes) or f"see specdec {self.command} --help",
            library,
        )

    def refuse(self, what: str, hint: str, path: str) -> None:
        """Raise ValueError, but where ``path`` is a library's and another version of it is here than was looked at."""
        library = path.split(".")[0]
        if library not in index()["versions"] or _version(library) == index()["versions"][library]:
            raise ValueError(f"{what}; {hint}".removesuffix("; "))


def _options(argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The options of a command line, without dashes and the ``+`` of those that add, and their first values."""
    argv = list(argv)
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word.startswith("--") or word.split("=")[0] == "-c":
            option, equals, value = word.lstrip("-").partition("=")
            yield option.removesuffix("+"), value if equals else following


def source_of(path: str) -> tuple[Path | None, str]:
    """The file of the innermost module of an import path, and the name in it that comes next; imports nothing.

    No file if it is not to be found, or no Python source.
    """
    first, *rest = path.split(".")
    try:
        spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [os.getcwd()])
    except (ImportError, ValueError):
        return None, ""
    while spec is not None and rest:
        inner = PathFinder.find_spec(
            f"{spec.name}.{rest[0]}", spec.submodule_search_locations or []
        )
        if inner is None:
            break
        spec = inner
        rest = rest[1:]
    if spec is None or not (spec.origin or "").endswith(".py"):
        return None, ""
    return Path(str(spec.origin)), rest[0] if rest else ""


def names_in(file: Path) -> set[str] | None:
    """All names that a module's source binds; None if its source cannot tell."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return None if names & (DYNAMIC | {"*"}) else names
