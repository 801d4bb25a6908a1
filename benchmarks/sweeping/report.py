"""The dated Markdown file and the JSON beside it."""

from collections.abc import Sequence
from typing import Any

from benchmarks.report import conditions, rows
from benchmarks.sweeping.campaign import Swept
from benchmarks.sweeping.results import Compared

MOST = 0.03  # overhead that is allowed
NOTES = """\
- **Jobs** are `specdec fit` and `specdec evaluate` on a tiny target on the CPU: four arms of three seeds, each trained
  and decoded with, one thread each.
- **Everything**: SIGKILL of the runner and of all processes below it, in a random order; the same command is then given
  again. *keeper*, *attempt*, *command*, *worker*: of one such process, while the runner lives. A worker is a keeper, an
  attempt under it and the command under that; under Ray the worker is the process of Ray that has started the keeper.
  The moments are random: after a random number of jobs, and a random part of the shortest job's time.
- **Done once**: jobs with exactly one attempt that ended well. **At once**: pairs of attempts at one job that overlap.
  **Alive**: processes of killed workers that still lived a minute later.
- **Losses** are those of all steps in all logs of a fit, as written (all digits), those that were run again included.
  **Answers** are equal where every answer has the same tokens, passes and accepted drafts.
- **Overhead** is the time from a worker's start to the runner's knowledge of its end, beside the time of its command,
  summed over all jobs, as a share of the latter. **All of the slots' time** takes in the runner's own start and every
  pause between two jobs, too: workers x wall clock, without what a worker was idle at the very end. A command's time is
  that of the process as it would be typed, imports included.
"""


def faults(swept: Sequence[Swept], compared: Sequence[Compared]) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    found = []
    for one in swept:
        if one.done_once != one.jobs:
            found.append(f"{one.name}: {one.jobs - one.done_once} of {one.jobs} jobs were not done exactly once")
        if one.at_once:
            found.append(f"{one.name}: {one.at_once} attempts at a job that another was at")
        if one.left_alive:
            found.append(f"{one.name}: {one.left_alive} processes outlived their worker")
        if one.name == "undisturbed" and one.overhead > MOST:
            found.append(f"{one.name}: an overhead of {one.overhead:.1%}, more than {MOST:.0%}")
    for two in compared:
        if not two.holds:
            found.append(
                f"{two.name}: {two.fits - two.weights} of {two.fits} drafters, {two.differing} of {two.losses} losses, "
                f"{two.evaluations - two.answers} of {two.evaluations} evaluations are not the undisturbed sweep's"
            )
    return found


def to_json(about: dict[str, Any], swept: Sequence[Swept], compared: Sequence[Compared]) -> dict[str, Any]:
    """All figures."""
    return {
        "run": about,
        "faults": faults(swept, compared),
        "sweeps": [one._asdict() | {"overhead": one.overhead, "all_of_the_slots": one.idle} for one in swept],
        "compared": [one._asdict() for one in compared],
    }


def markdown(about: dict[str, Any], swept: Sequence[Swept], compared: Sequence[Compared]) -> str:
    """The dated file."""
    parts = [
        f"# A sweep under SIGKILL, {about['date'][:10]}\n",
        *conditions(about, about["versions"], f"; {about['seconds']} s in all"),
        "\n## Result\n",
    ]
    for one in swept:
        where = f"{one.kills} SIGKILLs, " if one.kills else ""
        parts.append(
            f"- {one.name}: {where}{one.done_once} of {one.jobs} jobs done exactly once, {one.at_once} attempts at "
            f"once, {one.left_alive} processes left alive."
        )
    for two in compared:
        parts.append(
            f"- {two.name} beside undisturbed: {two.weights} of {two.fits} drafters bit-equal, **{two.differing}** of "
            f"{two.losses:,} losses differ, {two.answers} of {two.evaluations} evaluations equal pass by pass."
        )
    parts += [
        f"- Overhead of the runner, {one.name}: **{one.overhead:.1%}** of the jobs' own {one.own_seconds:.0f} s; "
        f"{one.idle:.1%} of all of the slots' time; the runner's own CPU time {one.runner['cpu_seconds']:.1f} s."
        for one in swept
        if not one.kills
    ]
    parts += [f"- **Fault**: {fault}." for fault in faults(swept, compared)]
    parts += ["\n## How to read it\n", NOTES, "## Sweeps\n"]
    parts += rows(
        ["sweep", "strikes", "SIGKILLs", "jobs", "done once", "begun again", "at once", "alive", "own s", "seconds"],
        [
            [
                one.name, "<br>".join(one.strikes) or "none", str(one.kills), str(one.jobs), str(one.done_once),
                str(one.begun_again), str(one.at_once), str(one.left_alive), f"{one.own_seconds:.0f}",
                f"{one.seconds:.0f}",
            ]
            for one in swept
        ],
        words=2,
    )  # fmt: skip
    return "\n".join(parts) + "\n"
