"""``specdec card``: what a study found, for readers and for machines."""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from specdec.arguments import parse
from specdec.card.write import DETECT, write
from specdec.imports import flags


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: there is no study, a measurement cannot be read, or the card was edited.
    """
    parser = ArgumentParser(prog="specdec card", description=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("directory", type=str, help="the study's directory, finished or not")
    parser.add_argument("--out", type=str | None, default=None, help="the card's directory; card/ in the study's if not given")  # fmt: skip # noqa: E501
    parser.add_argument("--force", action="store_true", help="write it again, over an edited one too")
    parser.add_argument("--detect", type=float, default=DETECT, help="difference in acceptance length to plan for")
    args = parse(parser, argv)
    out = Path(args.out) if args.out else None
    command = ["specdec", "card", *flags(), *argv]
    found = write(Path(args.directory), out, force=args.force, detect=args.detect, command=command)
    sys.stdout.write(f"{found / 'card.html'}\n")
    return 0
