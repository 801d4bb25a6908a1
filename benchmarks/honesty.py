"""Whether a study's test is honest on a real drafter's answers: no difference between copies, and a known one found.

``python benchmarks/honesty.py --drafter DIR --called NAME --out benchmarks/results`` decodes held-out prompts of the
embedded target with one drafter under several sampling seeds. In each of 200 resamplings half of those seeds, drawn at
random, stand for one arm and half for another, on prompts drawn at random: two copies of one drafter, whose answers
differ. Then the second copy is made worse by a known amount: of a share of its target passes nothing is accepted.

Legend: S seeds, P prompts.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.harness import machine
from specdec.decoding import Sampling, parse_shape
from specdec.drafter import load
from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.data import held_out_prompts
from specdec.evaluation.answers import Answer
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.prompts import load_prompts
from specdec.studies.statistics import Estimate, estimate, pooled
from specdec.target import TargetSource
from specdec.utils.files import read_json, write_json, write_text

RESAMPLINGS = 200
Array = npt.NDArray[np.float64]


def decode(drafter: Path, seeds: int, prompts: int, tokens: int, growth: str, temperature: float) -> list[list[Answer]]:
    """The answers of every sampling seed."""
    target = TargetSource().load()
    rows = held_out_prompts(prompts, 64, EmbeddedConfig().seed, target.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        write_text(path, "".join(json.dumps({**row, "category": None}) + "\n" for row in rows))
        asked = load_prompts([str(path)])
    out = []
    for seed in range(seeds):
        sampling = Sampling(temperature=temperature, seed=1000 * seed)
        out += benchmark(target, load(drafter), [parse_shape(growth)], asked, tokens, sampling=sampling, plain=False)
        print(f"decoded with sampling seed {seed}", flush=True)
    return out


def worsened(answers: list[Answer], share: float, draw: np.random.Generator) -> list[Answer]:
    """The answers with nothing accepted in a share of the passes."""
    return [
        one._replace(accepted=tuple(0 if lost else got for got, lost in zip(one.accepted, chosen, strict=True)))
        for one in answers
        for chosen in [draw.random(len(one.accepted)) < share]
    ]


def sums(answers: list[list[Answer]]) -> tuple[Array, Array]:
    """Committed tokens and passes, (S, P) each."""
    committed = np.array(
        [[sum(one.accepted) + len(one.accepted) for one in each] for each in answers], dtype=np.float64
    )
    return committed, np.array([[len(one.accepted) for one in each] for each in answers], dtype=np.float64)


def resample(answers: list[list[Answer]], share: float, prompts: int, draw: np.random.Generator) -> list[Estimate]:
    """The paired difference of two halves of the seeds, the second made worse, in every resampling."""
    seeds, most = len(answers), len(answers[0])
    committed, passes = sums(answers)
    worse_committed, _ = sums([worsened(each, share, draw) for each in answers])
    out = []
    for _ in range(RESAMPLINGS):
        order, at = draw.permutation(seeds), draw.choice(most, size=prompts, replace=False)
        one, two = np.ix_(order[: seeds // 2], at), np.ix_(order[seeds // 2 :], at)
        a, b = pooled(committed[one], passes[one]), pooled(worse_committed[two], passes[two])
        assert a is not None and b is not None
        out.append(estimate(b.minus(a), null=0.0))
    return out


def main() -> None:
    """Decode, resample, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--called", required=True, help="what the drafter is, for the result")
    parser.add_argument("--seeds", type=int, default=6, help="of sampling; half of them stand for an arm")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--drawn", type=int, default=32, help="prompts of a resampling")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--growth", default="chain:depth=5")
    args = parser.parse_args()
    begin = time.monotonic()
    answers = decode(args.drafter, args.seeds, args.prompts, args.tokens, args.growth, args.temperature)
    draw, rows = np.random.default_rng(0), []
    committed, passes = sums(answers)
    length = float(committed.sum() / passes.sum())
    for share in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        found = resample(answers, share, args.drawn, draw)
        known = -share * (length - 1) if share else 0.0
        held = sum(each.low is not None and each.high is not None and each.low <= known <= each.high for each in found)
        told = sum(each.p_value is not None and each.p_value < 0.05 for each in found)
        rows.append({"share": share, "known": known, "held": int(held), "told_apart": int(told)})
    about = machine(1) | {"seconds": round(time.monotonic() - begin), "acceptance_length": length}
    about["drafter"] = read_json(args.drafter / "config.json")["weights_sha256"]
    command = f"python benchmarks/honesty.py --drafter DIR --called {args.called!r} --out benchmarks/results"
    lines = ["# A study's test on one drafter's answers", "",
             f"Acceptance length {length:.2f} ({args.growth}, temperature {args.temperature}); {args.seeds} "
             f"sampling seeds, half of them an arm; {args.drawn} of {args.prompts} prompts of {args.tokens} new tokens "
             f"in each of {RESAMPLINGS} resamplings.", "",
             "| passes with nothing accepted | known difference | told apart (p < 0.05) | intervals that held it |",
             "|---:|---:|---:|---:|"]  # fmt: skip
    lines += [f"| {100 * row['share']:.0f} % | {row['known']:.3f} | {row['told_apart']} of {RESAMPLINGS} | "
              f"{row['held']} of {RESAMPLINGS} |" for row in rows]  # fmt: skip
    lines += ["", "No difference was reported of two copies in "
              f"{100 - 100 * rows[0]['told_apart'] / RESAMPLINGS:.1f} % of the resamplings. They overlap, being of one "
              "set of answers, so that these counts vary more than 200 studies' would.", "",
              f"`{command}`, {about['date']}, {about['cpu']}, {about['seconds']} s. "
              f"Drafter: {args.called}, weights {about['drafter'][:12]}."]  # fmt: skip
    name = f"honesty_{about['date'][:7].replace('-', '')}"
    write_json(args.out / f"{name}.json", {"about": about, "rows": rows})
    write_text(args.out / f"{name}.md", "\n".join(lines) + "\n")
    print((args.out / f"{name}.md").read_text())


if __name__ == "__main__":
    main()
