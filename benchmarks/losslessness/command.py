"""Speculative decoding beside plain decoding: greedy tokens compared one by one, sampled ones counted.

``python benchmarks/lossless.py --out benchmarks/results`` writes ``lossless_<hardware>_<yyyymm>.md`` and the figures
behind it as ``.json``; it exits with 1 if a token is wrong, a law is not the target's, or a case tested nothing.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from benchmarks.losslessness import plan
from benchmarks.losslessness.greedy import Case, check, plain
from benchmarks.losslessness.report import faults, markdown, to_json
from benchmarks.losslessness.sampled import CASES, Count, count
from benchmarks.machine import load, machine
from specdec.files import write_json, write_text

SEEDS = 5


class Bar:
    """One line of the progress bar, with its rate."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self.progress, self.name, self.done, self.begin = progress, name, 0, time.monotonic()
        self.task: TaskID = progress.add_task(name, total=total, rate="", start=False)

    def __call__(self, more: int) -> None:
        """So many more are done."""
        if not self.done:
            self.begin = time.monotonic()
            self.progress.start_task(self.task)
        self.done += more
        rate = self.done / max(1e-3, time.monotonic() - self.begin)
        self.progress.update(self.task, advance=more, rate=f"{self.done:,}, {rate:,.0f}/s")


def greedy(
    parts: Sequence[plan.Part],
    tokens: dict[torch.dtype, int],
    steps: int,
    bars: dict[torch.dtype, Bar],
    console: Console,
) -> Iterator[list[Case]]:
    """Every part in every dtype and way; all that there is, before the first part and after each."""
    cases = list[Case]()
    yield cases
    for part in parts if tokens else ():
        console.print(f"{part.name}: fitting a drafter", highlight=False)
        drafter = plan.fit(part, plan.load(part, torch.float32), steps)
        for dtype, wanted_tokens in tokens.items():
            target = plan.load(part, dtype)
            target.prove()
            drafter.to(dtype)  # the narrowest comes last: what it loses is not needed again
            wanted = plain(target, drafter, plan.GROWTHS[0], plan.requests(part, target, wanted_tokens))
            for how in plan.ways(part, dtype):
                cases.append(check(part.name, target, drafter, how, wanted, bars[dtype]))
                torch._dynamo.reset()  # graphs hold copies of weights
            done = sum(case.tokens for case in cases if case.dtype == bars[dtype].name)
            console.print(f"{part.name}: {done:,} tokens compared in {bars[dtype].name} so far", highlight=False)
        yield cases


def sampled(draws: int, bar: Bar) -> list[Count]:
    """Every case and seed."""
    return [count(rule, growth, seed, draws, bar) for rule, growth in CASES for seed in range(SEEDS)] if draws else []


def _write(out: Path, about: dict[str, Any], begin: float, cases: list[Case], counts: list[Count]) -> None:
    """What there is so far; of a part of the run it says so by its faults."""
    about |= {"seconds": round(time.monotonic() - begin), "load_at_end": load()}
    write_json(out.with_suffix(".json"), to_json(about, cases, counts))
    write_text(out, markdown(about, cases, counts))


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, or a path that ends in .md")
    parser.add_argument("--tokens", type=int, default=100_000, help="compared in float32, at least; 0 for none")
    parser.add_argument("--tokens64", type=int, default=40_000, help="compared in float64, at least; 0 for none")
    parser.add_argument("--tokens16", type=int, default=40_000, help="compared in bfloat16, at least; 0 for none")
    parser.add_argument("--draws", type=int, default=1_000_000, help="of every rule, growth and seed; 0 for none")
    parser.add_argument("--steps", type=int, default=150, help="of fitting a drafter; a third, embedded")
    names = [part.family for part in plan.PARTS]
    parser.add_argument("--targets", nargs="+", choices=names, default=names, help="only some of them")
    parser.add_argument("--hardware", default="cpu", help="the machine's name in the file's name")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokens = {torch.float32: args.tokens, torch.float64: args.tokens64, torch.bfloat16: args.tokens16}
    tokens = {dtype: wanted for dtype, wanted in tokens.items() if wanted}
    asked = {str(dtype).removeprefix("torch."): wanted for dtype, wanted in tokens.items()}
    versions = {name: version(name) for name in ("torch", "transformers")}
    parts = plan.chosen(args.targets)
    about: dict[str, Any] = {**machine(1), "versions": versions, "steps": args.steps, "asked": asked}
    about["targets"] = [part.name for part in parts]
    out = args.out
    if out.suffix != ".md":
        out = out / f"lossless_{args.hardware}_{about['date'][:7].replace('-', '')}.md"
    console, begin = Console(stderr=True), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {
            dtype: Bar(progress, str(dtype).removeprefix("torch."), int(1.4 * most)) for dtype, most in tokens.items()
        }
        bar = Bar(progress, "draws", args.draws * len(CASES) * SEEDS)
        counts, cases = sampled(args.draws, bar), list[Case]()
        for cases in greedy(parts, tokens, args.steps, bars, console):
            _write(out, about, begin, cases, counts)
    print(out.read_text())
    found = faults(asked, about["targets"], cases, counts)
    for fault in found:
        sys.stderr.write(f"{fault}\n")
    return 1 if found else 0
