"""Cached training on the embedded target: its wait for features as a share of the step, and how fast a cache is read.

Beside it the same run on the fly, whose losses must be the same, and the disk's own throughput.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.features.measure import Run, Some, build, read_files, read_rows, train
from benchmarks.machine import load, machine
from benchmarks.report import conditions, places, rows, table
from specdec.features import Cached, OnTheFly
from specdec.training.module import DrafterModule


def main() -> int:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the report, .md; raw figures go beside it")
    parser.add_argument("--directory", type=Path, help="where the cache is made; by default a temporary folder")
    parser.add_argument("--rows", type=int, default=256, help="rows that are stored")
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="steps measured of each run")
    parser.add_argument("--skip", type=int, default=8, help="steps before them")
    parser.add_argument("--shard_mb", type=float, default=256.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--force", action="store_true", help="write over an earlier report")
    args = parser.parse_args()
    out, raw = places(args.out, args.force)
    torch.set_num_threads(args.threads)
    about = machine(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        found = _measure(args, (args.directory or Path(temporary)) / "cache")
    about["load_at_end"] = load()
    lines = _report(found, about)
    out.write_text("\n".join(lines) + "\n")
    raw.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n")
    return 0


def _measure(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    module = DrafterModule()
    L = module.target.num_layers
    layers = [2, L // 2, L - 3]

    stored = Some(args.rows, args.seq_len, args.batch_size)
    rate = build(cache, stored, module, layers, args.shard_mb)
    shards = list(cache.glob("shard-*"))
    found: dict[str, Any] = {
        "tokens": stored.splits.train.ids_BT.numel(),
        "bytes": sum(shard.stat().st_size for shard in shards),
        "shards": len(shards),
        "layers": layers,
        "extraction_tokens_per_second": rate,
        "batch": [args.batch_size, args.seq_len],
    }
    runs: dict[str, Run] = {}
    ways = {
        "on the fly": (OnTheFly(), False),
        "cached, in memory": (Cached(str(cache)), False),
        "cached, from the disk": (Cached(str(cache)), True),
    }
    for name, (features, cold) in ways.items():
        runs[name] = train(features, stored, args.steps, args.skip, cold)
    found["runs"] = {name: run._asdict() for name, run in runs.items()}
    found["same_losses"] = len({tuple(run.losses) for run in runs.values()}) == 1
    found["mb_per_second"] = {
        "rows of the cache, random": [read_rows(cache, stored, layers, cold) for cold in (True, False)],
        "its files, end to end": [read_files(cache, cold) for cold in (True, False)],
    }
    return found


def _report(found: dict[str, Any], about: dict[str, Any]) -> list[str]:
    B, T = found["batch"]
    columns = ["features", "step, s", "wait, ms", "longest wait, ms", "share of step time"]
    lines = []
    for name, run in found["runs"].items():
        share = sum(run["waits"]) / sum(run["steps"])
        lines.append([
            name, f"{statistics.median(run['steps']):.3f}", f"{1e3 * statistics.median(run['waits']):.1f}",
            f"{1e3 * max(run['waits']):.1f}", f"{100 * share:.2f} %",
        ])  # fmt: skip
    speed_columns = ["MB/s", "from the disk", "in memory"]
    speeds = [[name, *(f"{x:,.0f}" for x in both)] for name, both in found["mb_per_second"].items()]
    console = Console()
    console.print(table(columns, lines, 1, "Training steps"))
    console.print(table(speed_columns, speeds, 1, "Reading"))
    same = "the same to the last bit" if found["same_losses"] else "NOT the same"
    return [
        "# Waiting for cached features",
        "",
        *conditions(about, {"torch": torch.__version__}),
        f"- EAGLE-3.1 on the embedded target, float32, batches of {B} x {T} tokens, K = 7; boundaries "
        f"{found['layers']} and the final state of {found['tokens']:,} tokens: {found['bytes'] / 1e6:,.0f} MB in "
        f"{found['shards']} shards, stored at {found['extraction_tokens_per_second']:,.0f} tokens/s.",
        "- From the disk: every page of the cache is let go of before each batch is announced.",
        f"- Losses of the three runs: {same}.",
        "",
        *rows(columns, lines, 1),
        "",
        "Wait is the time that the loader waits for a batch's features, of the steps measured.",
        "",
        *rows(speed_columns, speeds, 1),
        "",
        "Rows are copied out of the mapped shards in random order; files are read in pieces of 8 MiB.",
    ]
