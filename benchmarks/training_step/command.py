"""The command line of ``benchmarks/train_step.py``."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.console import Group as Stack
from rich.live import Live
from rich.text import Text

from benchmarks.machine import load, machine
from benchmarks.report import places
from benchmarks.training_step import recipe, report
from benchmarks.training_step.measured import Measured
from benchmarks.training_step.results import Result
from benchmarks.training_step.session import Settings, run
from benchmarks.training_step.systems import KEYS, Group, groups


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(prog="benchmarks/train_step.py", description=__doc__)
    p.description = (
        "Time and memory growth of one EAGLE-3 training step: specdec beside speculators and specforge, each through "
        "its own classes, step by step in turns, and the floor of matrix products below them. Linux, CPU."
    )
    p.add_argument(
        "--peers", metavar="PYTHON", help="python of the environment with the peers; without, they are left out"
    )
    p.add_argument("--workloads", nargs="+", choices=sorted(recipe.WORKLOADS), default=["S", "M"])
    p.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    p.add_argument(
        "--masks", nargs="+", choices=recipe.MASKS, default=["all", "half"],
        help="supervised rows: all; the second half; half, in the answers of four turns",
    )  # fmt: skip
    p.add_argument("--systems", nargs="+", choices=KEYS, default=list(KEYS), metavar="NAME", help=", ".join(KEYS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=7, help="measured steps of each")
    p.add_argument("--warm-up", type=int, default=2, help="steps before these")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="a .md file to write; raw step times go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    return p.parse_args(arguments)


class Screen:
    """A live table with what happens next and the time left; redrawn between steps alone, never during one."""

    def __init__(self, console: Console, plan: list[Group], steps: int, warm_up: int) -> None:
        self.console, self.plan, self.calls = console, plan, steps + warm_up + 1
        self.begin, self.done = time.monotonic(), 0.0
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, index: int, call: int, measured: list[Measured], what: str) -> None:
        """Redraw for the ``call``-th act of group ``index``."""
        group = self.plan[index]
        share = call / (self.calls * len(group.entries))
        done = (sum(g.cost for g in self.plan[:index]) + share * group.cost) / sum(g.cost for g in self.plan)
        spent = time.monotonic() - self.begin
        left = f", about {spent * (1 - done) / done / 60:.1f} min left" if done > 0.02 else ""
        line = f"group {index + 1} of {len(self.plan)}, {100 * done:.0f} %{left}: {what}"
        self.live.update(Stack(report.table(Result(group, measured, [])), Text(line)), refresh=self.console.is_terminal)


def measure(plan: list[Group], settings: Settings, console: Console, keep: Callable[[list[Result]], None]) -> None:
    """All groups, one after the other; after each it is printed, and ``keep`` is called with all so far."""
    results: list[Result] = []
    screen = Screen(console, plan, settings.steps, settings.warm_up)
    with tempfile.TemporaryDirectory(prefix="train_step-") as logs, screen.live:
        for index, group in enumerate(plan):
            calls = 0

            def told(measured: list[Measured], what: str, index: int = index) -> None:
                nonlocal calls
                screen.show(index, calls, measured, what)
                calls += 1

            result = Result.of(group, run(group, settings, Path(logs), told))
            results.append(result)
            screen.live.update(Text(""), refresh=console.is_terminal)
            console.print(report.table(result))
            for sentence in (*result.headline(), *result.warnings(settings.steps)):
                console.print(f"  {sentence}", highlight=False)
            for sentence in result.agreement():
                console.print(f"  losses, {sentence}", highlight=False)
            keep(results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 2 after a wrong argument or a failed worker."""
    a, console = parse(arguments), Console()
    if not console.is_terminal:
        console = Console(width=190)  # a log has room
    try:
        if a.out is not None:
            places(a.out, a.force)
        if a.warm_up < 2 or a.steps < 1 or a.threads < 1:
            raise ValueError("--warm-up must be at least 2, --steps and --threads at least 1")
        plan = groups(a.workloads, a.dtypes, a.masks, a.systems, a.peers is not None)
        if not plan:
            raise ValueError("nothing to measure: the peers need --peers, and specdec-full a mask other than all")
        about = machine(a.threads) | {"seed": a.seed, "steps": a.steps, "warm_up": a.warm_up}
        settings = Settings(sys.executable, a.peers, a.threads, a.warm_up, a.steps, a.seed)

        def keep(results: list[Result]) -> None:
            if a.out is not None:
                report.write(a.out, about | {"load_at_end": load()}, results)

        measure(plan, settings, console, keep)
        if a.out is not None:
            console.print(f"written: {a.out} and {a.out.with_suffix('.json')}", highlight=False)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False)
        return 2
    return 0
