"""A command is a function: its parameters are the options, its docstring is the help.

``specdec drift`` calls ``drift(*, target: TargetSource, drafter: list[Path], ...)``. Keyword-only parameters become
``--options``; any others are positional. What the docstring's ``Args`` say of a parameter is its help. A function whose
only parameter is a dataclass, as ``evaluate_command(config: EvaluationConfig)``, has its fields as options.
"""

import argparse
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from specdec.commands.known import nearest_class
from specdec.utils.config import merge_config
from specdec.utils.imports import guard_parsers, refusal
from specdec.utils.numbers import check_numbers


class OwnOptions(argparse.ArgumentParser):
    """Of a command that takes the options of ``fit`` and its own; ValueError for what is wrong, and no usage."""

    def __init__(self, command: str, description: str | None, epilog: str) -> None:
        super().__init__(
            prog=f"specdec {command}", description=description, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """Refuse an argument."""
        raise ValueError(message)


def parser_of(function: Callable[..., Any], name: str) -> ArgumentParser:
    """The parser of the command ``specdec NAME``, with ``--config FILE`` for a YAML file of any of its options."""
    description = re.split(r"\n(?:Args|Returns|Raises):", inspect.getdoc(function) or "")[0]
    parser = ArgumentParser(
        prog=f"specdec {name}",
        description=description.strip(),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", help="a YAML file with any of the options below"
    )
    if config := _config_of(function):
        parser.add_class_arguments(config, as_group=False, fail_untyped=True)
        return parser
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD in kinds
    parser.add_function_arguments(
        function, as_group=False, as_positional=positional, fail_untyped=True
    )
    return parser


def call(function: Callable[..., Any], name: str, argv: list[str]) -> int:
    """Parse the arguments of ``specdec NAME`` and call its function; the exit status, 0 where it returns none."""
    parser = parser_of(function, name)
    config = _config_of(function)
    # behind it everything is another program's
    end = argv.index("--") if "--" in argv else len(argv)
    files, rest = merge_config(argv[:end])
    composed = ["--config", yaml.safe_dump(files, sort_keys=False)] if files else []
    spelled = _spelled(config or function, target_shorthand(rest + argv[end:]))
    arguments = dict(vars(parse_arguments(parser, [*composed, *spelled])))
    arguments.pop("config", None)
    check_numbers(config or function, arguments, "--")
    status = function(config(**arguments)) if config else function(**arguments)
    return status if isinstance(status, int) else 0


def _config_of(function: Callable[..., Any]) -> Any:
    """The dataclass that is the function's only parameter, or None."""
    (first, *more) = inspect.signature(function).parameters or [""]
    hint = get_type_hints(function).get(first)
    return hint if dataclasses.is_dataclass(hint) and not more else None


def parse_arguments(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """Parse, without ``exit_on_error``, and build the parts; ValueError if an argument is unknown, missing or wrong."""
    guard_parsers()
    try:
        return parser.instantiate(parser.parse_args(argv))
    except (ArgumentError, ValueError) as error:
        raise ValueError(shorten_message(str(error))) from error


def _spelled(function: Callable[..., Any], argv: list[str]) -> list[str]:
    """The arguments as jsonargparse reads them: ``--flag`` as ``--flag=true``, ``--list A B`` as ``--list=[A, B]``.

    What follows ``--`` becomes the parameter ``engine_args``, of a command that has one.
    """
    hints = {f"--{name}": hint for name, hint in get_type_hints(function).items()}
    if "--" in argv and "--engine_args" in hints:
        at = argv.index("--")
        return [*_spelled(function, argv[:at]), f"--engine_args={json.dumps(argv[at + 1 :])}"]
    out: list[str] = []
    values: list[str] = []  # behind an option: read from the end
    for word in reversed(argv):
        if not word.startswith("--"):
            values.insert(0, word)
            continue
        hint = hints.get(word)
        if get_origin(hint) is list and not (len(values) == 1 and values[0].startswith("[")):
            quoted = map(json.dumps, values) if get_args(hint)[0] in (str, Path) else values
            word = f"{word}=[{', '.join(quoted)}]"
            values = []
        elif hint is bool and not values:
            word = f"{word}=true"
        out = [word, *values, *out]
        values = []
    return values + out


def target_shorthand(argv: list[str]) -> list[str]:
    """``--target NAME`` for ``--target.source NAME``."""
    return [
        "--target.source" + arg[len("--target") :] if arg.split("=")[0] == "--target" else arg
        for arg in argv
    ]


def fit_options(argv: list[str]) -> list[str]:
    """The options of ``specdec fit``, given to a command where ``--target`` stands for ``--model.target``."""
    return [re.sub(r"^--target\.", "--model.target.", arg) for arg in target_shorthand(argv)]


def shorten_message(message: str) -> str:
    """The first sentences of a long parser message, on one line."""
    if refused := refusal(message):
        return refused
    key = re.search(r'Parser key "([\w.]+)"', message)
    if key and (
        name := re.search(r"Expected a dot import path string: (\w+)\s*$", message, re.MULTILINE)
    ):
        return f"{key[1]}: there is no {name[1]}; {nearest_class(name[1])}".removesuffix("; ")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Errors:" not in lines:
        return " ".join(lines[:3] if key else lines)
    # of every type that an argument could have been: the reasons, not the list of types
    reasons = [
        *itertools.takewhile(
            lambda line: not line.startswith("Given value"), lines[lines.index("Errors:") + 1 :]
        )
    ]
    if ours := [
        line for line in reasons if re.match(r"- [\w.: ]+ must be ", line)
    ]:  # the class was right, a number not
        return ours[0].removeprefix("- ")
    return " ".join(
        [lines[0], *(line for line in reasons if not line.endswith("<class 'NoneType'>"))]
    )
