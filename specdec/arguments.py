"""Command lines whose mistakes are told in one line."""

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from specdec.imports import guard, refusal


def parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """Parse and build the parts; the parser must have been made with ``exit_on_error=False``.

    Raises:
        ValueError: an argument is unknown, missing or of the wrong type.
    """
    guard()
    try:
        return parser.instantiate(parser.parse_args(argv))
    except ArgumentError as error:
        raise ValueError(short(str(error))) from error


def target_shorthand(argv: list[str]) -> list[str]:
    """``--target NAME`` for ``--target.source NAME``."""
    return ["--target.source" + arg[len("--target") :] if arg.split("=")[0] == "--target" else arg for arg in argv]


def short(message: str) -> str:
    """The first sentences of a long parser message, on one line."""
    if refused := refusal(message):
        return refused
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "Errors:" in lines:  # of every type that an argument could have been: the reasons, not the list of types
        reasons = lines[lines.index("Errors:") + 1 :]
        end = next((i for i, line in enumerate(reasons) if line.startswith("Given value")), len(reasons))
        kept = [line for line in reasons[:end] if not line.endswith("<class 'NoneType'>")]
        return " ".join([lines[0], *kept])
    return " ".join(lines[:3])
