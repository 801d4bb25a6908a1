"""``specdec import``: a checkpoint of an EAGLE drafter, whoever published it, as a drafter to evaluate and train on."""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from specdec.arguments import parse, target_shorthand
from specdec.drafter import load, save
from specdec.embedded.source import TargetSource
from specdec.export.adopt import adopt
from specdec.export.checkpoint import fetch, read_checkpoint


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec import", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--checkpoint", type=str, required=True, help="a directory or a Hub id")
    out.add_argument("--revision", type=str | None, default=None, help="a branch, tag or commit of it on the Hub")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--aux_layers", type=list[int] | None, default=None, help="boundaries that it was trained with, where its config does not say so rightly")  # fmt: skip # noqa: E501
    out.add_argument("--out", type=str, required=True, help="the drafter's directory, not there yet")
    out.add_argument("--force", action="store_true", help="replace a drafter that is there")
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument is wrong, or the checkpoint is no drafter of this target.
    """
    args = parse(parser(), target_shorthand(argv))
    if Path(args.out).exists():
        if not args.force:
            raise ValueError(f"{args.out} exists already: choose another place, remove it first, or give --force")
        load(args.out)  # nothing else is replaced
    checkpoint = read_checkpoint(fetch(args.checkpoint, args.revision))
    layers = tuple(args.aux_layers) if args.aux_layers else None
    drafter = adopt(checkpoint, args.target.load(), layers)
    save(drafter, args.out, replace=args.force)
    sys.stdout.write(f"{args.out}\n")
    return 0
