"""``specdec sweep``: every arm of a study trained and measured, each once, and the card of what came of it."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from specdec.studies.card import write_card
from specdec.studies.local import Local
from specdec.studies.plan import StudyPlan, claim, make_plan
from specdec.studies.ray import Ray
from specdec.studies.run import SETTLED, Engine, SweepJob, failures, run
from specdec.studies.slurm import Slurm
from specdec.studies.study import nearest, read_study
from specdec.utils.config import runs_folder
from specdec.utils.progress import progress

log = logging.getLogger(__name__)


def sweep(
    study: Path,
    *,
    out: Path | None = None,
    plan_only: bool = False,
    only: list[str] = [],  # noqa: B006  never changed
    engine: Literal["local", "ray", "slurm"] = "local",
    threads: int = 1,
    allow_few_seeds: bool = False,
    allow_unequal: bool = False,
    local: Local = Local(),  # noqa: B008
    ray: Ray = Ray(),  # noqa: B008
    slurm: Slurm = Slurm(),  # noqa: B008
) -> int:
    """Train and measure every arm of a study, each once, and write the card of what came of it.

    The study is a file of axes with their levels, a design, seeds and measures. All arms are checked before the first
    begins. What is done is never run again, and what was interrupted goes on. The exit status is 0, 1 where a job
    failed, 130 or 143 where somebody ended it.

    Example: specdec sweep conf/study/fusion.yaml --plan_only

    Args:
        study: the study's file: axes, levels, design, seeds, measures
        out: its directory; by default runs/studies/NAME. The same study goes on in it, with arms added too
        plan_only: check everything, print what each arm changes and what is done, run nothing
        only: run the arms of these names alone
        engine: where jobs run
        threads: CPU threads of a job
        allow_few_seeds: fewer than three seeds, from which no effect can be told
        allow_unequal: arms of other token budgets or data than the baseline's
        local: this machine
        ray: a cluster of Ray, or one that is started here
        slurm: a cluster of SLURM

    Raises:
        ValueError: the study is wrong; nothing has begun then, and the message has the arm's name.
    """
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, not {threads}")
    given = read_study(study, allow_few_seeds)
    directory = out or runs_folder() / "studies" / given.name
    claim(directory, given.name)
    alone = max(threads, local.shared_cores) if engine == "local" else None
    plan = make_plan(given, directory, threads, allow_unequal, alone)
    known = [arm.name for arm in plan.arms]
    if wrong := next((name for name in only if name not in known), None):
        raise ValueError(f"--only {wrong!r}: no such arm{nearest(wrong, known)}")
    if plan_only:
        plan.show(Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
        return 0
    for line in plan.summary():
        log.info("%s", line)
    plan.write()
    engines: dict[str, Engine] = {"local": local, "ray": ray, "slurm": slurm}
    return _run(plan, only, engines[engine])


def _run(plan: StudyPlan, only: list[str], engine: Engine) -> int:
    jobs = plan.left(only or None)
    done = sum(map(plan.is_done, jobs))
    with progress(f"study {plan.study.name}", "jobs", len(jobs), done) as advance:

        def watch(entries: Sequence[SweepJob]) -> None:
            nonlocal done
            settled = sum(entry.phase in SETTLED for entry in entries)
            advance(settled - done)
            done = settled

        outcome = run(plan.directory, jobs.values(), engine, watch=watch)
    for line in failures(outcome, plan.jobs):
        log.error("%s", line)
    if outcome.signal is None:
        log.info("the card is in %s", write_card(plan.directory))
    return outcome.status
