"""Studies made without training: a plan, and measures drawn from a known model."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from specdec.diagnostics.drift_measure import VERSION
from specdec.evaluation.metrics import Answer, write_answers
from specdec.training.losses_file import with_checksum
from specdec.utils.journal import Journal

AXES = {"norm": ["off", "on"], "K": ["1", "4"]}
SHAPES = ("chain of 5", "tree of 12 (depth 6, top 2)")


def arms_of(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination, the last axis fastest."""
    out: list[dict[str, str]] = [{}]
    for axis, levels in axes.items():
        out = [{**one, axis: level} for one in out for level in levels]
    return out


def name_of(levels: dict[str, str]) -> str:
    return " ".join(f"{axis}={level}" for axis, level in levels.items())


def make_study(
    directory: Path,
    axes: dict[str, list[str]] = AXES,
    worth: dict[str, float] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    prompts: int = 12,
    shapes: Sequence[str] = SHAPES,
    arms: Sequence[dict[str, str]] | None = None,
    curves: bool = True,
    primary: Sequence[dict[str, Any]] = (),
) -> Path:
    """A study whose arms' chance of acceptance is 0.6 and what ``worth`` adds for each of their ``axis=level``."""
    arms = arms_of(axes) if arms is None else list(arms)
    draw = np.random.default_rng(0)
    hard = draw.normal(0, 0.08, size=prompts)
    plan: dict[str, Any] = {
        "version": 3, "name": "made", "design": "grid", "axes": axes, "baseline": arms[0], "seeds": list(seeds),
        "prompts_sha256": "ab" * 32, "study_sha256": "cd" * 32, "provenance": {}, "unequal": [], "arms": [],
        "primary": list(primary), "primary_changed": False,
    }  # fmt: skip
    for number, levels in enumerate(arms):
        runs = []
        for seed in seeds:
            tag = f"{number}-{seed}"
            keys = {"fit": f"f{tag}", "evaluate": f"e{tag}"}
            keys |= (
                {"drift": f"d{tag}", "robustness": f"r{tag}"}
                if curves
                else {"drift": None, "robustness": None}
            )
            runs.append({"seed": seed, **keys})
            chance = 0.6 + sum(
                (worth or {}).get(f"{axis}={level}", 0.0) for axis, level in levels.items()
            )
            chances = np.clip(
                chance + hard + draw.normal(0, 0.01) + draw.normal(0, 0.02, size=prompts),
                0.05,
                0.95,
            )
            make_fit(directory / "fits" / keys["fit"], seed, int(levels.get("K", 4)))
            make_evaluation(directory / "measures" / keys["evaluate"], chances, shapes, draw)
            for key in filter(None, keys.values()):
                attempt(directory, key, end="done", seconds=10.0 + number)
            if curves:
                make_drift(directory / "measures" / keys["drift"], int(levels.get("K", 4)), chances)
                make_robustness(directory / "measures" / keys["robustness"], chances, draw)
        difference = [
            f"{axis}: {arms[0][axis]} to {level}"
            for axis, level in levels.items()
            if level != arms[0][axis]
        ]
        plan["arms"].append({"name": name_of(levels), "levels": levels, "is_baseline": number == 0,
                             "differences": difference, "trained_parameters": 1000,
                             "trained_depth": int(levels.get("K", 4)), "tokens": None, "runs": runs})  # fmt: skip
    write(directory / "plan.json", plan)
    return directory


def attempt(directory: Path, key: str, **end: Any) -> None:
    """Note the only attempt at a job, and how it ended, if it did."""
    path = directory / "jobs" / key / "attempts.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path, "specdec.job", {"key": key}) as journal:
        journal.append({"begun": "2026-01-01T00:00:00.000+00:00", "host": "h"})
        if end:
            journal.append(end)
    (path.parent / "config.yaml").write_text("{}\n")


def lose(directory: Path, run: dict[str, Any], kind: str) -> None:
    """As if a job had never begun."""
    shutil.rmtree(directory / ("fits" if kind == "fit" else "measures") / run[kind])
    (directory / "jobs" / run[kind] / "attempts.jsonl").unlink()


def make_fit(directory: Path, seed: int, steps: int) -> None:
    (directory / "drafter").mkdir(parents=True)
    write(directory / "DONE.json", {"steps": 40, "metrics": {"val/loss": 2.0}})
    config = {
        "seed_everything": seed, "out": str(directory), "ckpt_path": None, "model": {"ttt_steps": steps},
        "trainer": {"devices": 1, "accumulate_grad_batches": 2},
        "data": {"class_path": "TextData", "init_args": {"batch_size": 4, "seq_len": 32}},
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    write(directory / "provenance.json", {"versions": {"torch": "0.0"}, "torch_threads": 1})
    lines = [with_checksum(f"{step} 0 {float(8 - step / 10).hex()}") for step in range(40)]
    (directory / "losses.txt").write_text("".join(lines))
    write(directory / "drafter" / "config.json", {"weights_sha256": "ef" * 32})


def make_evaluation(
    directory: Path, chances: np.ndarray, shapes: Sequence[str], draw: np.random.Generator
) -> None:
    answers = []
    for number in range(len(shapes)):
        own = []
        for prompt, chance in enumerate(chances):
            accepted = tuple(
                np.minimum(
                    draw.geometric(1 - min(0.97, chance + 0.08 * number), size=24) - 1, 5 + number
                ).tolist()
            )
            tokens = sum(accepted) + len(accepted)
            seconds = 0.01 * len(accepted)
            own.append(
                Answer(f"p{prompt}", None, tokens, accepted, (5 + number,) * len(accepted), seconds, 0.006 * tokens,
                       tokens, True)
            )  # fmt: skip
        answers.append(own)
    directory.mkdir(parents=True)
    write_answers(directory / "answers.jsonl", shapes, answers)
    results = [{"shape": shape, "acceptance_length": {"mean": 1.0}} for shape in shapes]
    write(directory / "metrics.json", {"results": results, "target": {"fingerprint": "t"}, "provenance": {},
          "drafter": {"weights_sha256": "d"},
                                       "settings": {"prompts_sha256": "ab", "max_new_tokens": 96}})  # fmt: skip


def make_drift(directory: Path, depth: int, chances: np.ndarray) -> None:
    def values(start: float, slope: float) -> list[list[float]]:
        return [[float(start + slope * k + chance) for chance in chances] for k in range(6)]

    series: dict[str, Any] = {
        "state_rms": {"title": "Size of the state fed back", "unit": "root mean square", "values": values(1, 0.2)},
        "sink_mass": {"title": "Attention to the first token", "unit": "share", "values": values(0.1, 0.02)},
        "conditional_acceptance": {
            "title": "Conditional acceptance", "unit": "share of chains",
            "values": [[float(chance - 0.1 * chance**2 * (k >= depth)) for chance in chances] for k in range(6)],
        },
        "kl": {"title": "Divergence from the target", "unit": "nats", "values": values(0.5, 0.3)},
    }  # fmt: skip
    for one in series.values():
        one["weights"] = [[4 + prompt % 2 for prompt in range(len(chances))] for _ in range(6)]
    # no chain of the first came so deep
    series["kl"]["values"][5][0], series["kl"]["weights"][5][0] = None, 0
    prompts = [f"p{prompt}" for prompt in range(len(chances))]
    write(
        directory / "drift.json",
        {
            "version": VERSION,
            "trained_depth": depth,
            "depths": 6,
            "prompts": prompts,
            "series": series,
        },
    )


def make_robustness(directory: Path, chances: np.ndarray, draw: np.random.Generator) -> None:
    conditions = []
    for number, name in enumerate(("clean", "typos", "system prompt", "long context")):
        passes = [30.0] * len(chances)
        committed = [
            float(p * (1 + 2 * c - 0.3 * number + draw.normal(0, 0.05)))
            for p, c in zip(passes, chances, strict=True)
        ]
        conditions.append({"name": name, "title": name.capitalize(), "group": "text", "committed": committed,
                           "passes": passes, "skipped": "no room" if number == 3 else None})  # fmt: skip
    prompts = [f"p{prompt}" for prompt in range(len(chances))]
    write(
        directory / "robustness.json",
        {"version": 1, "prompts": prompts, "conditions": conditions, "clean": "clean"},
    )


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
