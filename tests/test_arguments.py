"""Command lines and their mistakes."""

import pytest
from jsonargparse import ArgumentParser

from specdec.arguments import parse, short
from specdec.drafter import Entry


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--n", type=int)
    parser.add_argument("--entry", type=Entry)
    return parser


def test_parts_are_built(parser: ArgumentParser) -> None:
    args = parse(parser, ["--n", "2", "--entry", "Narrow", "--entry.bias", "false"])
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
        parse(parser, argv)
    assert "\n" not in str(error.value)


def test_of_many_types_the_reasons_are_kept() -> None:
    text = "Parser key 'x':\n  No type took it\n  Errors:\n  - too big\n  - not a <class 'NoneType'>\n  Given value: 9"
    assert short(text) == "Parser key 'x': - too big"
