"""Command lines and their mistakes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from specdec.commands.parser import call, parse_arguments, parser_of, shorten_message
from specdec.drafter import Entry


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--n", type=int)
    parser.add_argument("--entry", type=Entry)
    return parser


def test_parts_are_built(parser: ArgumentParser) -> None:
    args = parse_arguments(parser, ["--n", "2", "--entry", "Narrow", "--entry.bias", "false"])
    assert args.n == 2 and args.entry.bias is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "many"], "many"),
        (["--colour", "red"], "colour"),
        (["--entry", "Door"], "Door"),
        (["--entry", "os.system"], r"os\.system \(entry\) was not imported"),
    ],
)
def test_a_mistake_is_one_line(parser: ArgumentParser, argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_arguments(parser, argv)
    assert "\n" not in str(error.value)


def test_of_many_types_the_reasons_are_kept() -> None:
    text = "Parser key 'x':\n  No type took it\n  Errors:\n  - too big\n  - not a <class 'NoneType'>\n  Given value: 9"
    assert shorten_message(text) == "Parser key 'x': - too big"


@dataclass(frozen=True)
class Place:
    """A place.

    Args:
        source: its name.
    """

    source: str = "here"


def command_of_options(
    *, target: Place = Place(), drafter: Path, prompts: list[str], sizes: list[int] = [1], plain: bool = True  # noqa: B006
) -> None:  # fmt: skip
    """Do a thing.

    Example: ``specdec thing --drafter D``.

    Args:
        target: where from.
        drafter: its directory.
        prompts: files.
        sizes: how large.
        plain: plainly too.
    """
    called.update(target=target, drafter=drafter, prompts=prompts, sizes=sizes, plain=plain)


def command_with_positions(a: Path, b: Path, *, json: bool = False) -> int:
    """Compare two things.

    Args:
        a: one.
        b: the other.
        json: print JSON.
    """
    called.update(a=a, b=b, json=json)
    return 3


called: dict[str, Any] = {}


def test_a_function_is_a_command() -> None:
    argv = [
        "--target",
        "there",
        "--drafter",
        "D",
        "--prompts",
        "a b",
        "[c",
        "--sizes",
        "1",
        "2",
        "--plain",
        "false",
    ]
    assert call(command_of_options, "thing", argv) == 0
    assert called == {
        "target": Place("there"), "drafter": Path("D"), "prompts": ["a b", "[c"], "sizes": [1, 2], "plain": False,
    }  # fmt: skip
    called.clear()
    assert call(command_with_positions, "thing", ["x", "y", "--json"]) == 3
    assert called == {"a": Path("x"), "b": Path("y"), "json": True}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--drafer", "D"], "drafer"),
        (["--drafter", "D"], "prompts"),
        (["--drafter", "D", "--prompts", "a", "--sizes", "x"], "sizes"),
        (["--drafter", "D", "--prompts", "a", "--plain", "maybe"], "plain"),
    ],
)
def test_a_commands_mistake_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call(command_of_options, "thing", argv)
    assert "\n" not in str(error.value)


def test_its_docstring_is_its_help() -> None:
    text = " ".join(parser_of(command_of_options, "thing").format_help().split())
    assert "specdec thing --drafter D" in text and "its directory." in text and "--config" in text
