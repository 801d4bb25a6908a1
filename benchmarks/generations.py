"""EAGLE-1, 2, 3 and 3.1 trained on the same tokens with the same seeds, and their acceptance length.

``python benchmarks/generations.py --out runs/generations`` trains what is not there yet, decodes held-out prompts with
every drafter, and writes ``table.md`` and ``answers.json`` into the folder.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

TRAINED = ("eagle1", "eagle3", "eagle3_1")  # EAGLE-2 has EAGLE-1's drafter
GROWTHS = ("chain:depth=5", "tree:depth=6,top_k=2,nodes=12")
ROWS = (("EAGLE-1", "eagle1", 0), ("EAGLE-2", "eagle1", 1), ("EAGLE-3", "eagle3", 0), ("EAGLE-3", "eagle3", 1),
        ("EAGLE-3.1", "eagle3_1", 0), ("EAGLE-3.1", "eagle3_1", 1))  # fmt: skip
RESAMPLES = 5000


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


def decode(drafter: Path, prompts: Path, tokens: int) -> list[list[tuple[str, list[int]]]]:
    """For every growth, (prompt, accepted drafts per target pass)."""
    target = TargetSource().load()
    growths = [parse_growth(text) for text in GROWTHS]
    answers = benchmark(target, load(drafter), growths, load_prompts([str(prompts)]), tokens, plain=False)
    return [[(answer.prompt_id, list(answer.accepted)) for answer in of_one] for of_one in answers]


def interval(per_seed: Sequence[Sequence[tuple[str, Sequence[int]]]]) -> tuple[float, float, float]:
    """Acceptance length, bonus token included, and its 95 % interval: seeds and prompts are both drawn anew."""
    committed_SP = np.array([[sum(passes) + len(passes) for _, passes in answers] for answers in per_seed])
    passes_SP = np.array([[len(passes) for _, passes in answers] for answers in per_seed])
    S, P = passes_SP.shape
    generator = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES):
        at = np.ix_(generator.integers(S, size=S), generator.integers(P, size=P))
        means.append(committed_SP[at].sum() / passes_SP[at].sum())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(committed_SP.sum() / passes_SP.sum()), float(low), float(high)


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
    found: dict[str, list[list[list[tuple[str, list[int]]]]]] = {name: [] for name in TRAINED}
    for name, _, out in jobs:
        stored = out / f"answers-{args.prompts}x{args.tokens}.json"
        if not stored.exists():
            write_json(stored, decode(out / "drafter", prompts, args.tokens))
        found[name].append(read_json(stored))
        print(f"decoded with {out.name}", flush=True)
    lines = ["| generation | growth | acceptance length | by seed |", "|---|---|---:|---|"]
    for title, name, growth in ROWS:
        per_seed = [of_seed[growth] for of_seed in found[name]]
        mean, low, high = interval(per_seed)
        alone = ", ".join(f"{interval([answers])[0]:.2f}" for answers in per_seed)
        figure = f"{mean:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(f"| {title} | {parse_growth(GROWTHS[growth]).name} | {figure} | {alone} |")
    write_text(args.out / "table.md", "\n".join(lines) + "\n")
    write_json(args.out / "answers.json", {"provenance": provenance(), "answers": found})
    print("\n".join(lines))


if __name__ == "__main__":
    main()
