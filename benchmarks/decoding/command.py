"""The command line of ``benchmarks/decode.py``."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.decoding import prompts as kinds
from benchmarks.decoding import report
from benchmarks.decoding.prompts import Prompts
from benchmarks.decoding.results import Results
from benchmarks.decoding.scratch import keep
from benchmarks.decoding.session import Settings, run
from benchmarks.decoding.systems import KEYS, Entry, Means, choose
from benchmarks.decoding.worker import Job
from benchmarks.machine import load, machine
from benchmarks.report import places
from specdec.decoding import parse_growth
from specdec.embedded.source import TargetSource

DTYPES = ("float32", "bfloat16")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(prog="benchmarks/decode.py")
    p.description = (
        "Tokens per second of one text at a time: specdec, plain and with a drafter, beside vLLM and transformers on "
        "the same target and drafter, prompt by prompt in turns; and where the time of a round goes. Linux, CPU."
    )
    p.add_argument("--target", default="embedded", help="a directory, or the embedded one")
    p.add_argument("--drafter", metavar="DIR", help="an EAGLE-3 or 3.1 drafter of it; without, plain decoding alone")
    p.add_argument(
        "--growth", nargs="+", default=[], help="beside the chain of 3, such as tree:depth=4,top_k=2,nodes=6"
    )
    p.add_argument("--vllm", metavar="PYTHON", help="python of vLLM's environment; without, it is left out")
    p.add_argument("--assistant", metavar="DIR", help="a smaller target with the same tokenizer, for transformers")
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--systems", nargs="+", choices=KEYS, default=list(KEYS), metavar="NAME", help=", ".join(KEYS))
    p.add_argument("--prompts", type=Path, metavar="JSON", help="sets of token ids instead of the held-out text")
    p.add_argument("--count", type=int, default=16, help="prompts of each held-out set")
    p.add_argument("--sets", nargs="+", metavar="SET", help="of these sets alone; by default all")
    p.add_argument("--tokens", type=int, default=256, help="new tokens of each")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--warm-up", type=int, default=2, help="texts before those measured")
    p.add_argument("--repeats", type=int, default=1, help="times that every prompt is measured")
    p.add_argument(
        "--out", metavar="FILE", help="a .md file with {dtype} in its name; raw figures go to the .json beside"
    )
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    return p.parse_args(arguments)


def check(a: argparse.Namespace) -> dict[str, Path | None]:
    """Whether a run can begin; the file of every dtype.

    Raises:
        ValueError: it cannot.
    """
    if min(a.warm_up, a.count, a.threads, a.repeats) < 1 or a.tokens < 2:
        raise ValueError("--warm-up, --count, --threads and --repeats must be at least 1, --tokens at least 2")
    for growth in a.growth:
        parse_growth(growth)
    if a.out is None:
        return dict.fromkeys(a.dtypes)
    if len(a.dtypes) > 1 and "{dtype}" not in a.out:
        raise ValueError(f"--out {a.out}: two dtypes want two files, so write {{dtype}} somewhere in its name")
    files = {dtype: Path(a.out.replace("{dtype}", dtype)) for dtype in a.dtypes}
    for file in files.values():
        places(file, a.force)
    return dict(files)


def find_prompts(a: argparse.Namespace) -> Prompts:
    """What will be asked.

    Raises:
        ValueError: there is no such set, or not so much text.
    """
    if a.prompts is not None:
        found = kinds.read(a.prompts)
    else:
        found = kinds.held_out(TargetSource(a.target).load(), a.count, a.tokens)
    names = [each.name for each in found.sets]
    if unknown := [name for name in a.sets or [] if name not in names]:
        raise ValueError(f"--sets {unknown[0]}: there is no such set, but {', '.join(names)}")
    return found._replace(sets=[each for each in found.sets if a.sets is None or each.name in a.sets])


def measure(a: argparse.Namespace, console: Console) -> None:
    """Every dtype in turn; after each, its tables are printed and its files are written."""
    files = check(a)
    chosen, left_out = choose(a.systems, Means(a.drafter, a.vllm, a.assistant, a.growth))
    if not chosen:
        raise ValueError("nothing to measure: " + ", ".join(f"{name} ({why})" for name, why in left_out.items()))
    for name, why in left_out.items():
        console.print(f"left out: {name} ({why})", highlight=False)
    settings = Settings(sys.executable, a.vllm, a.threads, a.tokens, a.warm_up, a.repeats)
    torch.set_num_threads(a.threads)
    about: dict[str, Any] = machine(a.threads) | {
        name: getattr(a, name) for name in ("target", "drafter", "assistant", "growth", "tokens", "warm_up", "repeats")
    }
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch, console.status("choosing prompts") as status:
        prompts = find_prompts(a)
        for dtype in a.dtypes:
            kept = keep(a.target, a.drafter, dtype, Path(scratch))

            def job(entry: Entry, dtype: str = dtype, kept: Any = kept) -> Job:
                longest = prompts.longest + a.tokens
                drafter, assistant = (
                    None if path is None else os.path.abspath(path) for path in (a.drafter, a.assistant)
                )
                return Job(
                    entry.module, entry.options, dtype, a.threads, longest, kept.target, drafter, kept.served,
                    kept.method, assistant,
                )  # fmt: skip

            def told(what: str, dtype: str = dtype) -> None:
                status.update(f"{dtype}, {what}")

            status.start()
            measured = run(chosen, prompts, job, settings, Path(scratch), told)
            status.stop()
            results = Results(dtype, prompts.sets, measured, left_out)
            for one in report.tables(results):
                console.print(one)
            for each in prompts.sets:
                for sentence in report.sentences(results, each.name):
                    console.print(f"  {each.name}: {sentence}", highlight=False)
            if (file := files[dtype]) is not None:
                report.write(file, about | {"load_at_end": load()}, results)
                console.print(f"written: {file} and {file.with_suffix('.json')}", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 2 after a wrong argument or a failed worker."""
    a, console = parse(arguments), Console()
    if not console.is_terminal:
        console = Console(width=190)  # a log has room
    try:
        measure(a, console)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False)
        return 2
    return 0
