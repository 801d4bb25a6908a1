"""``specdec bench``: speed and acceptance of a served model, with and without its drafter, as its users see them.

Give the URL of a server, and of one without the drafter; or a target and a drafter, which are served one after the
other, flags of ``vllm serve`` after ``--``.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.embedded.source import TargetSource
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.skipping import without_blank
from specdec.files import staged_directory, write_json
from specdec.imports import flags
from specdec.provenance import provenance
from specdec.serving.arguments import add_launched, launch_of, launched_given, split
from specdec.serving.bench.measure import Served, Work, measure, results, started
from specdec.serving.bench.plot import plot
from specdec.serving.bench.report import print_bench
from specdec.signals import Asked, asked_to_end

RESULT, PLOT = "bench.json", "bench.png"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = ArgumentParser(prog="specdec bench", description=__doc__, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    out.add_argument("--engine", type=Literal["vllm"], default="vllm")
    out.add_argument("--url", type=str | None, default=None, help="a server, as http://127.0.0.1:8000")
    out.add_argument("--baseline_url", type=str | None, default=None, help="the same target without the drafter")
    out.add_argument("--target", type=TargetSource, default=TargetSource())
    out.add_argument("--drafter", type=str | None, default=None, help="instead of --url: a drafter's directory, or an export of one for vLLM")  # fmt: skip # noqa: E501
    add_launched(out)
    out.add_argument("--prompts", type=str, nargs="+", required=True, help="as of specdec evaluate; of conversations the first turn")  # fmt: skip # noqa: E501
    out.add_argument("--layouts", type=str, nargs="+", default=[], help="as of specdec evaluate")
    out.add_argument("--limit", type=int | None, default=None, help="use the first prompts only")
    out.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="users at a time")
    out.add_argument("--max_new_tokens", type=int, default=128, help="new tokens per answer")
    out.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    out.add_argument("--ignore_eos", type=bool, default=False, help="go on behind the end of a text")
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; it must not exist yet")
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument or a file is wrong, or a server cannot be had or does not answer.
    """
    ours, extra = split(argv)
    arguments = parser()
    args = parse(arguments, target_shorthand(ours))
    work = Work(
        without_blank(load_prompts(args.prompts, args.limit, args.layouts)),
        _checked(args.concurrency), args.max_new_tokens, args.temperature, args.ignore_eos,
    )  # fmt: skip
    work.asking("")
    if (args.url is None) == (args.drafter is None):
        raise ValueError("give either --url, or --target and --drafter, which are served then")
    if args.url is None and args.baseline_url is not None:
        raise ValueError("--baseline_url goes with --url: with --drafter the baseline is served here")
    if args.url is not None and extra:
        raise ValueError("flags after -- are vLLM's, which is not started with --url")
    given = ["--target"] * (args.target != TargetSource()) + launched_given(arguments, args)
    if args.url is not None and given:
        raise ValueError(f"{', '.join(given)} would start vLLM, which is not started with --url")
    out = Path(args.out) if args.out else new_run("bench")
    baseline: Served | None = None
    try:
        with asked_to_end(), staged_directory(out) as folder:
            if args.url is None:
                launch = launch_of(args, extra)
                served, baseline = started(launch, args.drafter, work)
                how: dict[str, Any] = {**asdict(launch), "drafter": args.drafter}
            else:
                served = measure(args.url, "served", work)
                if args.baseline_url is not None:
                    baseline = measure(args.baseline_url, "baseline", work)
                how = {}
            found = {
                "engine": args.engine,
                **results(served, baseline, work),
                "settings": {**work._asdict(), "prompts": args.prompts, **how},
                "provenance": provenance(["specdec", "bench", *flags(), *argv]),
            }
            plot(found, folder / PLOT)
            write_json(folder / RESULT, found)
    except Asked as asked:
        return asked.status
    print_bench(found, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    return 0


def _checked(concurrency: Sequence[int]) -> list[int]:
    if min(concurrency) < 1 or len(set(concurrency)) < len(concurrency):
        raise ValueError(f"concurrency must be numbers from 1 on, each once, not {' '.join(map(str, concurrency))}")
    return sorted(concurrency)
