"""EAGLE-1, 2, 3 and 3.1 trained on the same tokens with the same seeds, and their acceptance length.

``python benchmarks/generations.py --out runs/generations`` trains what is not there yet, decodes held-out prompts with
every drafter, and writes ``table.md`` and ``answers.json`` into the folder.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from specdec.decoding import parse_growth
from specdec.drafter import load
from specdec.embedded.config import EmbeddedConfig, native_precision
from specdec.embedded.data import held_out_prompts
from specdec.embedded.source import TargetSource
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.prompts import load_prompts
from specdec.files import read_json, write_json, write_text
from specdec.provenance import provenance

CHAIN, STATIC, TREE = "chain:depth=5", "static", "tree:depth=6,top_k=2,nodes=12"
ROWS = (("EAGLE-1", "eagle1", CHAIN), ("EAGLE-1", "eagle1", STATIC), ("EAGLE-2", "eagle1", TREE),
        ("EAGLE-3", "eagle3", CHAIN), ("EAGLE-3", "eagle3", TREE),
        ("EAGLE-3.1", "eagle3_1", CHAIN), ("EAGLE-3.1", "eagle3_1", TREE))  # fmt: skip
DIFFERENCES = (("EAGLE-3.1", "EAGLE-3", CHAIN), ("EAGLE-3.1", "EAGLE-3", TREE),
               ("EAGLE-3.1", "EAGLE-1", CHAIN), ("EAGLE-3.1", "EAGLE-2", TREE))  # fmt: skip
TRAINED = {name: [of_row for _, other, of_row in ROWS if other == name] for _, name, _ in ROWS}
TITLES = list(dict.fromkeys(title for title, _, _ in ROWS))
RESAMPLES = 5000
PerSeed = Sequence[Sequence[tuple[str, Sequence[int]]]]


def train(name: str, seed: int, out: Path, steps: int) -> None:
    """One run of ``specdec fit`` in a process of its own with one thread, unless it is done."""
    if (out / "DONE.json").exists():
        return
    precision = native_precision()
    dtype = "bfloat16" if precision == "bf16-mixed" else "float32"
    command = [sys.executable, "-m", "specdec", "fit", "--config", "conf/quickstart.yaml"]
    command += ["--config", f"conf/train/{name}.yaml", "--seed_everything", str(seed), "--out", str(out)]
    command += ["--trainer.precision", precision, "--model.target.dtype", dtype, "--trainer.max_steps", str(steps)]
    command += ["--acceptance.every_n_validations", "0"]
    with (out.parent / f"{out.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def decode(drafter: Path, growth: str, prompts: Path, tokens: int) -> list[tuple[str, list[int]]]:
    """(prompt, accepted drafts per target pass)."""
    target, rows = TargetSource().load(), load_prompts([str(prompts)])
    (answers,) = benchmark(target, load(drafter), [parse_growth(growth)], rows, tokens, plain=False)
    return [(answer.prompt_id, list(answer.accepted)) for answer in answers]


def lengths(per_seed: PerSeed) -> np.ndarray:
    """Acceptance length, bonus token included: of all, then of every resample, in which seeds and prompts are both
    drawn anew; the same draws for every drafter, so that differences are paired."""
    committed_SP = np.array([[sum(passes) + len(passes) for _, passes in answers] for answers in per_seed])
    passes_SP = np.array([[len(passes) for _, passes in answers] for answers in per_seed])
    S, P = passes_SP.shape
    generator = np.random.default_rng(0)
    means = [committed_SP.sum() / passes_SP.sum()]
    for _ in range(RESAMPLES):
        at = np.ix_(generator.integers(S, size=S), generator.integers(P, size=P))
        means.append(committed_SP[at].sum() / passes_SP[at].sum())
    return np.array(means)


def figure(values: np.ndarray, sign: str = "") -> str:
    """The value and its 95 % interval."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return f"{values[0]:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def draw(rows: Sequence[tuple[str, str, np.ndarray]], path: Path) -> None:
    """Acceptance length with intervals, a colour for each growth."""
    figure = plt.figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.gca()
    growths = dict.fromkeys(growth for _, growth, _ in rows)
    for colour, growth in zip(("#4878a8", "#58a068", "#d08040"), growths, strict=True):
        found = [(title, values) for title, of_row, values in rows if of_row == growth]
        means = np.array([values[0] for _, values in found])
        ends = np.array([np.percentile(values[1:], [2.5, 97.5]) for _, values in found])
        bars = [means - ends[:, 0], ends[:, 1] - means]
        at = [TITLES.index(title) for title, _ in found]
        axes.errorbar(means, at, xerr=bars, fmt="o", color=colour, capsize=3, label=growth)
    axes.set_yticks(range(len(TITLES)), TITLES)
    axes.set_xlabel("acceptance length (bonus token included)")
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, decode, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    prompts = args.out / "prompts.jsonl"
    rows = held_out_prompts(args.prompts, 64, EmbeddedConfig().seed, TargetSource().load().tokenizer)
    write_text(prompts, "".join(json.dumps({**row, "category": None}) + "\n" for row in rows))
    jobs = [(name, seed, args.out / f"{name}-{seed}") for seed in range(args.seeds) for name in TRAINED]
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(lambda job: train(*job, args.steps), jobs))
    found: dict[tuple[str, str], list[list[tuple[str, list[int]]]]] = {}
    for name, _, out in jobs:
        for growth in TRAINED[name]:
            stored = out / f"answers-{args.prompts}x{args.tokens}-{re.sub(r'[^a-z0-9]+', '_', growth)}.json"
            if not stored.exists():
                write_json(stored, decode(out / "drafter", growth, prompts, args.tokens))
            found.setdefault((name, growth), []).append(read_json(stored))
            print(f"decoded with {out.name}, {growth}", flush=True)
    lines = ["| generation | growth | acceptance length | by seed |", "|---|---|---:|---|"]
    drawn: list[tuple[str, str, np.ndarray]] = []
    measured: dict[tuple[str, str], np.ndarray] = {}
    for title, name, growth in ROWS:
        per_seed = found[name, growth]
        measured[title, growth] = lengths(per_seed)
        drawn.append((title, parse_growth(growth).name, measured[title, growth]))
        alone = ", ".join(f"{lengths([answers])[0]:.2f}" for answers in per_seed)
        lines.append(f"| {title} | {drawn[-1][1]} | {figure(measured[title, growth])} | {alone} |")
    lines += ["", "| difference, paired | growth | |", "|---|---|---:|"]
    for one, other, growth in DIFFERENCES:
        difference = figure(measured[one, growth] - measured[other, growth], "+")
        lines.append(f"| {one} less {other} | {parse_growth(growth).name} | {difference} |")
    write_text(args.out / "table.md", "\n".join(lines) + "\n")
    draw(drawn, args.out / "generations.png")
    answers = {f"{name} {growth}": per_seed for (name, growth), per_seed in found.items()}
    write_json(args.out / "answers.json", {"provenance": provenance(), "answers": answers})
    print("\n".join(lines))


if __name__ == "__main__":
    main()
