"""What a study comes to, before it is run: its arms, how they differ, and how much of it is done."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from specdec.sweep.budget import tokens
from specdec.sweep.designs import arm_name
from specdec.sweep.measures import COMMANDS
from specdec.sweep.plan import Plan


def show(plan: Plan, console: Console) -> None:
    """Print the arms, of a fraction what it leaves undecided, and the number of jobs."""
    study = plan.study
    table = Table("arm", "differs from the baseline in", "fits", *plan.prompts, box=None, padding=(0, 2, 0, 0))
    for arm, runs in zip(plan.arms, plan.runs, strict=True):
        lines = "\n".join(arm.differences) or ("baseline" if arm.levels == study.baseline else "the measures alone")
        counts = [_count(plan, [run[kind] for run in runs]) for kind in ("fit", *plan.prompts)]
        table.add_row(arm.name, lines, *counts)
    console.print(table)
    for line in told(plan):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def told(plan: Plan) -> list[str]:
    """The same in sentences, the arms aside."""
    study, design = plan.study, plan.study.design
    size = f"{len(plan.arms)} arms, {len(study.seeds)} seeds; baseline {arm_name(study.baseline)}"
    lines = [f"{design.name}{f' {design.fraction}' if design.fraction else ''}: {size}"]
    if design.generators:
        lines.append(f"resolution {design.resolution}; generators: {', '.join(design.generators)}")
        aliases = (design.aliases or {}).items()
        lines += [f"  {effect} cannot be told from {', '.join(same)}" for effect, same in aliases]
    budgets = {tokens(arm) for arm in plan.arms}
    if len(budgets) == 1 and (budget := budgets.pop()) is not None:
        lines.append(f"every fit trains on {budget:,} tokens, padding included")
    lines += [f"not equal: {line}" for line in plan.unequal]
    kinds = Counter[str](job.kind for job in plan.jobs.values())
    done = Counter[str](job.kind for key, job in plan.jobs.items() if plan.is_done(key))
    order = ("cache", "fit", *COMMANDS)
    lines.append("jobs: " + ", ".join(f"{done[kind]} of {kinds[kind]} {kind} done" for kind in order if kinds[kind]))
    return lines


def _count(plan: Plan, keys: Sequence[str | None]) -> str:
    there = [key for key in keys if key is not None]
    return f"{sum(map(plan.is_done, there))}/{len(there)} done" if there else ""
