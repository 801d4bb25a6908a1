"""``specdec quickstart``: the main job on the embedded default, from nothing to a measured EAGLE-3.1 drafter."""

import json
import logging
import shlex
import time
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse
from specdec.compose import runs_folder
from specdec.embedded.build import embedded_target, read_record
from specdec.embedded.config import EmbeddedConfig, native_precision
from specdec.embedded.data import held_out_prompts
from specdec.embedded.source import TargetSource
from specdec.evaluation.command import FILES, evaluate
from specdec.evaluation.report import print_results
from specdec.files import read_json, write_json, write_text
from specdec.fit import run as fit

log = logging.getLogger(__name__)

CONFIG = "conf/quickstart.yaml"
GROWTHS = ("chain:depth=5", "tree:depth=6,top_k=2,nodes=12")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 18, 64, 128


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: the run directory belongs to something else, or a step cannot be done.
    """
    parser = ArgumentParser(prog="specdec quickstart", description=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--out", type=str | None, default=None, help="run directory; by default runs/quickstart")
    parser.add_argument("--seed", type=int, default=0, help="of the drafter's training")
    parser.add_argument("--compile", type=Literal["on", "off"], default="on", help="evaluate with compiled graphs")
    args = parse(parser, argv)
    out = Path(args.out) if args.out else runs_folder() / "quickstart"
    return quickstart(out, args.seed, compiled=args.compile == "on")


def quickstart(out: Path, seed: int, compiled: bool = True) -> int:
    """Build the target, train, evaluate, and say what came of it. What is there already is used again."""
    console, begin = Console(), time.monotonic()
    plan: dict[str, Any] = {"quickstart": 1, "seed": seed, "growths": list(GROWTHS), "new_tokens": NEW_TOKENS}
    _claim(out, plan)
    target = embedded_target()
    precision = native_precision()
    dtype = "bfloat16" if precision == "bf16-mixed" else "float32"  # the evaluation is in float32 in any case
    fit_args = ["--config", CONFIG, "--seed_everything", str(seed), "--out", str(out)]
    fit_args += ["--trainer.precision", precision, "--model.target.dtype", dtype]
    prompts = out / "prompts.jsonl"
    evaluate_args = ["--target", "embedded", "--drafter", str(out / "drafter"), "--prompts", str(prompts), "--growth", *GROWTHS, "--max_new_tokens", str(NEW_TOKENS), "--out", str(out)]  # fmt: skip # noqa: E501
    evaluate_args += [] if compiled else ["--compile", "off"]
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
        print_results(metrics, console)
    else:
        for name in FILES:  # of an evaluation that was cut off
            (out / name).unlink(missing_ok=True)
        metrics = evaluate(
            TargetSource(), out / "drafter", [prompts], GROWTHS, out,
            max_new_tokens=NEW_TOKENS, compiled=compiled, command=commands[2],
        )  # fmt: skip
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
        f"  {chain['growth']}: {chain['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{chain['speedup']:.2f}x the speed of plain decoding\n"
        f"  {tree['growth']}: {tree['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{tree['speedup']:.2f}x\n"
        f"  {same} of {compared} outputs are the target's own, token for token\n"
        f"Kept in {out} ({seconds:.0f} s): drafter/, metrics.json, report.md, report.png, config.yaml, commands.sh\n\n"
        "Next:\n"
        f"  what it stands for          cat {out / 'commands.sh'}\n"
        f"  change one design choice    specdec fit --config {CONFIG} --model.drafter conf/drafter/eagle3.yaml\n"
        f"  another proposal            specdec evaluate --target embedded --drafter {out / 'drafter'} "
        f"--prompts {out / 'prompts.jsonl'} --growth chain:depth=3\n"
        "  your own model and data     specdec fit --model.target.source DIR_OR_HUB_ID --data ChatData "
        "--data.train chats.jsonl"
    )
