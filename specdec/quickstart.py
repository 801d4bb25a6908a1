"""``specdec quickstart``: the main job on the embedded default, from nothing to a measured EAGLE-3.1 drafter."""

import json
import logging
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.embedded.build import EmbeddedConfig, embedded_target, native_precision, read_record
from specdec.embedded.data import held_out_prompts
from specdec.evaluation.run import FILES, EvaluationConfig, evaluate, print_results
from specdec.fit import run as fit
from specdec.target import TargetSource
from specdec.utils.config import runs_folder
from specdec.utils.files import read_json, write_json, write_text

log = logging.getLogger(__name__)

CONFIG = "conf/quickstart.yaml"
SHAPES = ("chain:depth=5", "tree:depth=6,top_k=2,nodes=12")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 18, 64, 128


def quickstart(*, out: Path | None = None, seed: int = 0, compile: bool = True) -> int:
    """Build a small target, train an EAGLE-3.1 drafter for it, evaluate it, and say what came of it.

    What is there already of an earlier run is used again.

    Example: specdec quickstart --out runs/quickstart

    Args:
        out: run directory; by default runs/quickstart.
        seed: of the drafter's training.
        compile: evaluate with compiled graphs.

    Raises:
        ValueError: the run directory belongs to something else, or a step cannot be done.
    """
    out = out or runs_folder() / "quickstart"
    console, begin = Console(), time.monotonic()
    plan: dict[str, Any] = {"quickstart": 1, "seed": seed, "shapes": list(SHAPES), "new_tokens": NEW_TOKENS}
    _claim(out, plan)
    target = embedded_target()
    precision = native_precision()
    dtype = "bfloat16" if precision == "bf16-mixed" else "float32"  # the evaluation is in float32 in any case
    fit_args = ["--config", CONFIG, "--seed_everything", str(seed), "--out", str(out)]
    fit_args += ["--trainer.precision", precision, "--model.target.dtype", dtype]
    prompts = out / "prompts.jsonl"
    evaluate_args = ["--target", "embedded", "--drafter", str(out / "drafter"), "--prompts", str(prompts), "--shape", *SHAPES, "--max_new_tokens", str(NEW_TOKENS), "--out", str(out)]  # fmt: skip # noqa: E501
    evaluate_args += [] if compile else ["--compile", "false"]
    commands = [["specdec", "pretrain"], ["specdec", "fit", *fit_args], ["specdec", "evaluate", *evaluate_args]]
    write_text(out / "commands.sh", "".join(f"{shlex.join(command)}\n" for command in commands))

    if not (out / "DONE.json").exists() and (status := fit("fit", [*fit_args, "--ckpt_path", "auto"])):
        return status
    if not prompts.exists():
        rows = held_out_prompts(PROMPTS, PROMPT_TOKENS, EmbeddedConfig().seed, TargetSource().load().tokenizer)
        write_text(prompts, "".join(json.dumps({**row, "category": None}) + "\n" for row in rows))
    if (out / "metrics.json").exists():
        log.info("%s is complete already; this is what it holds", out)
        metrics = read_json(out / "metrics.json")
    else:
        for name in FILES:  # of an evaluation that was cut off
            (out / name).unlink(missing_ok=True)
        config = EvaluationConfig(
            drafter=out / "drafter", prompts=[str(prompts)], shape=list(SHAPES), max_new_tokens=NEW_TOKENS,
            compile=compile, out=out,
        )  # fmt: skip
        metrics = evaluate(config)
    print_results(metrics, console)
    console.rule("specdec quickstart")
    console.print(
        _closing(out, target, metrics, time.monotonic() - begin), soft_wrap=True, highlight=False, markup=False
    )
    return 0


def _claim(out: Path, plan: dict[str, Any]) -> None:
    """Make the run directory, or check that it is this run's."""
    mark = out / "quickstart.json"
    if mark.exists():
        if read_json(mark) != plan:
            raise ValueError(f"{out} holds a quickstart with other settings: choose another --out or remove it")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is no quickstart run: choose another --out")
    else:
        write_json(mark, plan)


def _closing(out: Path, target: Path, metrics: dict[str, Any], seconds: float) -> str:
    record = read_record(target)
    chain, tree = metrics["results"]
    same = sum(result["identical_outputs"] for result in metrics["results"])
    compared = sum(result["compared_outputs"] for result in metrics["results"])
    return (
        f"An EAGLE-3.1 drafter for a {record['parameters'] / 1e6:.1f}M-parameter Llama trained on this machine "
        f"(held-out loss {record['held_out_loss']:.2f} nats):\n"
        f"  {chain['shape']}: {chain['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{chain['speedup']:.2f}x the speed of plain decoding\n"
        f"  {tree['shape']}: {tree['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{tree['speedup']:.2f}x\n"
        f"  {same} of {compared} outputs are the target's own, token for token\n"
        f"Kept in {out} ({seconds:.0f} s): drafter/, metrics.json, report.md, config.yaml, commands.sh\n\n"
        "Next:\n"
        f"  what it stands for          cat {out / 'commands.sh'}\n"
        f"  change one design choice    specdec fit --config {CONFIG} --model.drafter conf/drafter/eagle3.yaml\n"
        f"  another proposal            specdec evaluate --target embedded --drafter {out / 'drafter'} "
        f"--prompts {out / 'prompts.jsonl'} --shape chain:depth=3\n"
        "  your own model and data     specdec fit --model.target.source DIR_OR_HUB_ID --data ChatData "
        "--data.train chats.jsonl"
    )
