"""The command line of ``benchmarks/long_context.py``."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.length.worker import LAYOUTS, Job
from benchmarks.machine import load, machine
from benchmarks.process import environment
from benchmarks.report import conditions, places, rows, table, versions
from specdec.files import write_json, write_text
from specdec.provenance import provenance

COLUMNS = [
    "work",
    "tokens",
    "seconds",
    "CPU seconds",
    "peak MB",
    "growth MB",
    "growth, bytes a token",
    "estimated MB",
    "T x T bytes",
]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(prog="benchmarks/long_context.py")
    p.description = (
        "Memory and time of a training step and of decoding a prompt, by length: a tiny target, so that what grows "
        "with the length is nearly all there is. Each length in a process of its own. Linux, CPU."
    )
    p.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    p.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, help="a .md file to write; the same as JSON goes beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    return p.parse_args(arguments)


def run(job: Job) -> dict[str, Any]:
    """One measurement.

    Raises:
        ValueError: the process failed; the message ends with its last words.
    """
    command = [sys.executable, "-m", "benchmarks.length.worker", json.dumps(job._asdict())]
    done = subprocess.run(command, env=environment(job.threads), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{job.layout}, {job.tokens} tokens: {(done.stderr.strip() or 'no words').splitlines()[-1]}")
    return {**job._asdict(), **json.loads(done.stdout.splitlines()[-1])}


def line(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    T, estimated = found["tokens"], found.get("estimated_mb")
    return [
        found["layout"], f"{T:,}", f"{found['seconds']:.1f}", f"{found['cpu_seconds']:.1f}",
        f"{found['peak_mb']:,.0f}", f"{found['growth_mb']:,.0f}",
        f"{1e6 * found['growth_mb'] / T:,.0f}", "" if estimated is None else f"{estimated:,.0f}",
        f"{T * T / 1e6:,.0f} MB",
    ]  # fmt: skip


def write(out: Path, about: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    """The Markdown file and the JSON beside it."""
    lines = [
        "# Memory and time by length", "",
        f"{about['date'][:10]}. A training step is whole: target, unroll of 3 steps with recomputation, loss of all "
        "tokens, backward pass, optimizer. *Packed* rows hold texts of half the row, a quarter and so on down to 128 "
        "tokens. *Decoding* is a prompt and 16 tokens after it. Growth is over the peak after a short run in the same "
        "process. The last column is what one mask of a byte for every pair of tokens would take.", "",
        *rows(COLUMNS, map(line, measured), 1), "",
        *conditions(about, versions([about["versions"]], "others")),
    ]  # fmt: skip
    write_text(out, "\n".join(lines) + "\n")
    write_json(out.with_suffix(".json"), {"about": about, "measured": measured})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 2 after a wrong argument or a failed worker."""
    a, console = parse(arguments), Console()
    measured: list[dict[str, Any]] = []
    try:
        if a.out is not None:
            places(a.out, a.force)
        about = machine(a.threads) | {"versions": {k: v for k, v in provenance()["versions"].items() if v}}
        for layout in a.layouts:
            for tokens in sorted(a.tokens):
                measured.append(run(Job(layout, tokens, a.threads)))
                console.print(", ".join(line(measured[-1])), highlight=False)
                if a.out is not None:
                    write(a.out, about | {"load_at_end": load()}, measured)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False)
        return 2
    console.print(table(COLUMNS, map(line, measured), 1, "Memory and time by length"))
    return 0
