"""``specdec sweep``: every arm of a study trained and measured, each once, and the card of what came of it.

The study is a file of axes with their levels, a design, seeds and measures. All arms are checked before the first
begins. What is done is never run again, and what was interrupted goes on.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from specdec.arguments import parse
from specdec.card import write as write_card
from specdec.compose import runs_folder
from specdec.imports import flags
from specdec.sweep.engine import Engine
from specdec.sweep.local import Local
from specdec.sweep.overview import show, told
from specdec.sweep.plan import Plan, claim, make
from specdec.sweep.ray_engine import Ray
from specdec.sweep.reading import nearest
from specdec.sweep.run import failures, run
from specdec.sweep.slurm import Slurm
from specdec.sweep.study import read_study
from specdec.sweep.table import Shown

log = logging.getLogger(__name__)


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec sweep", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("study", type=str, help="the study: axes, levels, design, seeds, measures")
    out.add_argument("--out", type=str | None, default=None, help="its directory; by default runs/studies/NAME. The same study goes on in it, with arms added too")  # fmt: skip # noqa: E501
    out.add_argument("--plan_only", action="store_true", help="check everything, print the arms and what is done, run nothing")  # fmt: skip # noqa: E501
    out.add_argument("--only", type=str, nargs="+", default=[], metavar="ARM", help="run the arms of these names alone")
    out.add_argument("--engine", type=Literal["local", "ray", "slurm"], default="local", help="where jobs run")
    out.add_argument("--threads", type=int, default=1, help="CPU threads of a job")
    out.add_argument("--workers", type=int | None, default=None, help="jobs at once on this machine; by default as many as fit")  # fmt: skip # noqa: E501
    out.add_argument("--allow_few_seeds", action="store_true", help="fewer than three seeds, from which no effect can be told")  # fmt: skip # noqa: E501
    out.add_argument("--allow_unequal", action="store_true", help="arms of other token budgets or data than the baseline's")  # fmt: skip # noqa: E501
    out.add_class_arguments(Local, "local")
    out.link_arguments("workers", "local.workers")
    out.add_class_arguments(Ray, "ray")
    out.add_class_arguments(Slurm, "slurm")
    return out


def main(argv: list[str]) -> int:
    """Run the command; the exit status: 0, 1 where a job failed, 130 or 143 where somebody ended it.

    Raises:
        ValueError: the study is wrong; nothing has begun then, and the message has the arm's name.
    """
    args = parse(parser(), argv)
    if args.threads < 1:
        raise ValueError(f"--threads must be at least 1, not {args.threads}")
    where = engine(args)
    study = read_study(args.study, args.allow_few_seeds)
    directory = Path(args.out) if args.out else runs_folder() / "studies" / study.name
    claim(directory, study.name)
    alone = max(args.threads, where.cores) if isinstance(where, Local) else None
    plan = make(study, directory, args.threads, args.allow_unequal, alone)
    check_names(plan, args.only)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    if args.plan_only:
        show(plan, console)
        return 0
    for line in told(plan):
        log.info("%s", line)
    plan.write(["specdec", "sweep", *flags(), *argv])
    jobs = plan.left(args.only or None)
    with Shown() as shown:
        outcome = run(directory, jobs.values(), where, watch=shown.watch)
    for line in failures(outcome, plan.jobs):
        log.error("%s", line)
    if outcome.signal is None:
        log.info("the card is in %s", write_card(directory))
    return outcome.status


def engine(args: Namespace) -> Engine:
    """The one that was asked for.

    Raises:
        ValueError: ``--workers`` was given to another than the local one.
    """
    if args.engine != "local" and args.workers is not None:
        raise ValueError(f"--workers is of --engine local; {args.engine} runs what its cluster has room for")
    return args[args.engine]


def check_names(plan: Plan, names: Sequence[str]) -> None:
    """See that there are arms of these names.

    Raises:
        ValueError: there is none of one.
    """
    known = [arm.name for arm in plan.arms]
    if wrong := next((name for name in names if name not in known), None):
        raise ValueError(f"--only {wrong!r}: no such arm{nearest(wrong, known)}")
