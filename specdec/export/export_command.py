"""``specdec export``: a saved drafter as a checkpoint that vLLM or SGLang serves."""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from specdec.arguments import parse, target_shorthand
from specdec.embedded.source import TargetSource
from specdec.export.arguments import load_as_stored
from specdec.export.formats import FORMATS
from specdec.export.write import DRAFT_TOKENS, export_drafter
from specdec.imports import flags


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec export", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--drafter", type=str, required=True, help="the drafter's directory")
    out.add_argument("--out", type=str, required=True, help="directory of the checkpoint, not there yet")
    out.add_argument("--format", type=str, default="vllm", help=", ".join(FORMATS))
    out.add_argument("--draft_tokens", type=int, default=DRAFT_TOKENS, help="drafts a pass, in the line that serves it")
    out.add_argument("--evaluation", type=str | None, default=None, help="a directory of specdec evaluate, whose acceptance the model card quotes")  # fmt: skip # noqa: E501
    out.add_argument("--force", action="store_true", help="replace an export that is there")
    return out


def main(argv: list[str]) -> int:
    """Run the command; the line that serves the checkpoint goes to standard output.

    Raises:
        ValueError: an argument is wrong, or the engine cannot serve the drafter.
    """
    args = parse(parser(), target_shorthand(argv))
    if Path(args.out).exists() and not args.force:
        raise ValueError(f"{args.out} exists already: choose another place, remove it first, or give --force")
    drafter = load_as_stored(args.drafter)
    exported = export_drafter(
        drafter,
        args.target.load(),
        args.out,
        args.format,
        draft_tokens=args.draft_tokens,
        served=args.target,
        replace=args.force,
        evaluation=args.evaluation,
        command=["specdec", "export", *flags(), *argv],
    )
    sys.stdout.write(f"{exported.command}\n")
    return 0
