"""``specdec serve``: a target in vLLM with a drafter, until Ctrl-C; flags of ``vllm serve`` go after ``--``."""

import contextlib
import logging
import sys
import tempfile
from pathlib import Path

from jsonargparse import ArgumentParser

from specdec.arguments import parse, target_shorthand
from specdec.embedded.source import TargetSource
from specdec.serving.arguments import add_launched, launch_of, log_told, running, split
from specdec.serving.drafted import drafted
from specdec.serving.known import warn_of_draws
from specdec.serving.server import ServerError
from specdec.signals import Asked, asked_to_end

log = logging.getLogger(__name__)

FELL = 1


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec serve", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--drafter", type=str, required=True, help="a drafter's directory, or an export of one for vLLM")
    add_launched(out)
    out.add_argument(
        "--log",
        type=str | None,
        default=None,
        help="a new file for what vLLM says; without it only its end is shown, if it fails",
    )
    return out


def main(argv: list[str]) -> int:
    """Run the command; the URL goes to standard output once the server is healthy.

    Returns:
        0 if it was stopped while it served, 1 if vLLM ended by itself then, 128 and the signal's number if it was
        stopped before.

    Raises:
        ValueError: an argument is wrong, vLLM cannot serve the drafter, or did not come up.
    """
    argv, extra = split(argv)
    args = parse(parser(), target_shorthand(argv))
    launch = launch_of(args, extra)
    serving = False
    try:
        with asked_to_end(), contextlib.ExitStack() as stack:
            stack.enter_context(log_told())
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-serve-")))
            made = drafted(args.drafter, launch.target, scratch / "drafter")
            where = Path(args.log) if args.log else scratch / "server.log"
            server = stack.enter_context(running(launch, made, where))
            serving = True  # whoever reads the address may end it
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            warn_of_draws(where)
            log.info(
                "%s drafts %d tokens a pass, method %s; Ctrl-C stops it", args.drafter, args.draft_tokens, made.method
            )
            server.wait()
    except Asked as asked:
        return 0 if serving else asked.status
    except ServerError as error:
        if not serving:
            raise
        sys.stderr.write(f"specdec serve: error: {error}\n")
    return FELL
