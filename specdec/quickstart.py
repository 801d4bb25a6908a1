"""``specdec quickstart``: the main job on the embedded default, from nothing to a measured EAGLE-3.1 drafter."""

import json
import logging
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.embedded.build import RECORD, EmbeddedConfig, embedded_target, native_precision
from specdec.embedded.corpus import held_out_prompts
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
    console, begin, mark = Console(), time.monotonic(), out / "quickstart.json"
    plan: dict[str, Any] = {"quickstart": 1, "seed": seed, "shapes": list(SHAPES), "new_tokens": NEW_TOKENS}
    if mark.exists():
        if read_json(mark) != plan:
            raise ValueError(f"{out} holds a quickstart with other settings: choose another --out or remove it")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is no quickstart run: choose another --out")
    else:
        write_json(mark, plan)
    target, precision, prompts = embedded_target(), native_precision(), out / "prompts.jsonl"
    dtype = "bfloat16" if precision == "bf16-mixed" else "float32"  # the evaluation is in float32 in any case
    fit_args = ["--config", CONFIG, "--seed_everything", str(seed), "--out", str(out)]
    fit_args += ["--trainer.precision", precision, "--model.target.dtype", dtype]
    evaluate_args = ["--target", "embedded", "--drafter", str(out / "drafter"), "--prompts", str(prompts)]
    evaluate_args += ["--shape", *SHAPES, "--max_new_tokens", str(NEW_TOKENS), "--out", str(out)]
    evaluate_args += [] if compile else ["--compile", "false"]
    commands = [["specdec", "fit", *fit_args], ["specdec", "evaluate", *evaluate_args]]
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
    text = _closing(out, read_json(target / RECORD), metrics["results"], time.monotonic() - begin)
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    return 0


def _closing(out: Path, target: dict[str, Any], results: list[dict[str, Any]], seconds: float) -> str:
    same, compared = (sum(result[f"{kind}_outputs"] for result in results) for kind in ("identical", "compared"))
    accepted = "".join(
        f"  {result['shape']}: {result['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{result['speedup']:.2f}x the speed of plain decoding\n"
        for result in results
    )
    return (
        f"An EAGLE-3.1 drafter for a {target['parameters'] / 1e6:.1f}M-parameter Llama trained on this machine "
        f"(held-out loss {target['held_out_loss']:.2f} nats):\n{accepted}"
        f"  {same} of {compared} outputs are the target's own, token for token\n"
        f"Kept in {out} ({seconds:.0f} s): drafter/, metrics.json, report.md, report.png, config.yaml, commands.sh\n\n"
        "Next:\n"
        f"  what it stands for          cat {out / 'commands.sh'}\n"
        f"  change one design choice    specdec fit --config {CONFIG} --model.drafter conf/drafter/eagle3.yaml\n"
        f"  another proposal            specdec evaluate --target embedded --drafter {out / 'drafter'} "
        f"--prompts {out / 'prompts.jsonl'} --shape chain:depth=3\n"
        "  your own model and data     specdec fit --model.target.source DIR_OR_HUB_ID --data ChatData "
        "--data.train chats.jsonl"
    )
