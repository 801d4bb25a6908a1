"""``specdec quickstart``: the main job on the embedded target, from nothing to a measured EAGLE-3.1 drafter."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.commands.fit import run as fit
from specdec.commands.pretraining import RECORD, PretrainConfig, pretrain
from specdec.decoding import SpeculativeDecoder, parse_shape
from specdec.embedded import SEED, held_out_prompts
from specdec.evaluation.config import load_pair
from specdec.evaluation.metrics import METRICS, read_answers
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.run import ANSWERS, PLOT, EvaluationConfig, evaluate, print_results
from specdec.target import TargetSource
from specdec.training.run_directory import CLAIM, write_run_sums
from specdec.utils.config import runs_folder
from specdec.utils.files import write_json, write_text
from specdec.utils.machine import multiplies_bfloat16
from specdec.utils.reading import check_sums, read_json
from specdec.utils.text import duration, printable

CONFIG = "conf/quickstart.yaml"
EVALUATION = "evaluation"  # the folder of its results in the run directory
SHAPES = ("chain:depth=4", "tree:depth=6,top_k=2,nodes=12")
PROMPTS = 20
PROMPT_TOKENS = 32
NEW_TOKENS = 96
# seconds of each stage on two cores (benchmarks/results has the machine), for what is said beforehand
PRETRAINS = 3600
TRAINS = 130
DECODES = 40
COMPILES = 100


def quickstart(*, out: Path | None = None, seed: int = 0, full: bool = False) -> int:
    """Train an EAGLE-3.1 drafter for a small target, decode held-out prompts with it, and say what came of it.

    An interrupted run goes on where it was; what is there already of an earlier one is used again.

    Example: specdec quickstart --out runs/quickstart

    Args:
        out: run directory; by default runs/quickstart, with --full runs/quickstart_full.
        seed: of the drafter's training.
        full: train the target on this machine too, in place of the one that comes with specdec, and decode with
            compiled graphs.

    Raises:
        ValueError: the run directory belongs to something else, or a step cannot be done.
    """
    out = out or runs_folder() / ("quickstart_full" if full else "quickstart")
    console = Console()
    begin = time.monotonic()
    mark = out / "quickstart.json"
    if not console.is_terminal:
        console.width = 120  # of a log
    plan: dict[str, Any] = {
        "quickstart": 2,
        "seed": seed,
        "full": full,
        "shapes": [*SHAPES],
        "new_tokens": NEW_TOKENS,
    }
    if mark.exists():
        if read_json(mark) != plan:
            raise ValueError(
                f"{out} holds a quickstart with other settings: choose another --out or remove it"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is no quickstart run: choose another --out")
    else:
        write_json(mark, plan)
    stages = iter(range(1, 5))

    def stage(what: str, seconds: int, done: bool = False) -> None:
        """Say what begins, and how long it takes on two cores; ``done``: by an earlier run."""
        left = "done before" if done else f"about {duration(seconds)} on two cores"
        console.print(
            f"\n[bold]{next(stages)}/4[/bold] {what}: {left}", highlight=False, soft_wrap=True
        )

    target = TargetSource(str(out / "target")) if full else TargetSource()
    if full:
        stage(
            "the target, a small Llama of the standard library",
            PRETRAINS,
            (out / "target").exists(),
        )
        if status := pretrain(PretrainConfig(out=out / "target")):
            return status
    else:
        stage("the target, a small Llama that comes with specdec", 0, True)
    fit_args, evaluate_args = _commands(target.source, out, seed, full)
    commands = [["specdec", "fit", *fit_args], ["specdec", "evaluate", *evaluate_args]]
    write_text(out / "commands.sh", "".join(f"{shlex.join(command)}\n" for command in commands))

    trained = (out / "DONE.json").exists()
    stage("training the drafter, EAGLE-3.1", TRAINS, trained)
    if not trained:
        (out / CLAIM).touch()  # by which fit knows the directory for a run's
        if status := fit("fit", [*fit_args, "--ckpt_path", "auto"]):
            return status
    prompts = out / "prompts.jsonl"
    whole = (out / EVALUATION).exists()
    if not prompts.exists():
        rows = held_out_prompts(PROMPTS, PROMPT_TOKENS, SEED, target.load_tokenizer())
        write_text(prompts, "".join(json.dumps({**row, "category": None}) + "\n" for row in rows))
        write_run_sums(out)
    stage(
        f"decoding {PROMPTS} held-out prompts plainly and with drafts",
        DECODES + (COMPILES if full else 0),
        whole,
    )
    if whole:
        check_sums(out / EVALUATION, "remove the folder: the same command evaluates again")
        metrics = read_json(out / EVALUATION / METRICS)
    else:
        metrics = evaluate(EvaluationConfig(
            target=target, drafter=out / "drafter", prompts=[str(prompts)], shape=list(SHAPES),
            max_new_tokens=NEW_TOKENS, compile=full, out=out / EVALUATION,
        ))  # fmt: skip
    print_results(metrics, console)
    stage("an answer as it is decoded", 2)
    show_answer(target, out, console)
    console.rule("specdec quickstart")
    about = read_json(Path(target.directory()) / RECORD)
    text = _closing(target.source, out, about, metrics["results"], time.monotonic() - begin)
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    return 0


def _commands(source: str, out: Path, seed: int, compile: bool) -> tuple[list[str], list[str]]:
    """The arguments of ``specdec fit`` and of ``specdec evaluate`` that a quick start stands for."""
    precision, dtype = (
        ("bf16-mixed", "bfloat16") if multiplies_bfloat16() else ("32-true", "float32")
    )
    fit_args = [
        "--config",
        CONFIG,
        "--seed_everything",
        str(seed),
        "--out",
        str(out),
        "--model.target.source",
        source,
    ]
    # the evaluation is in float32
    fit_args += ["--trainer.precision", precision, "--model.target.dtype", dtype]
    evaluate_args = [
        "--target",
        source,
        "--drafter",
        str(out / "drafter"),
        "--prompts",
        str(out / "prompts.jsonl"),
    ]
    evaluate_args += [
        "--shape",
        *SHAPES,
        "--max_new_tokens",
        str(NEW_TOKENS),
        "--out",
        str(out / EVALUATION),
    ]
    return fit_args, evaluate_args + ([] if compile else ["--compile", "false"])


def show_answer(source: TargetSource, out: Path, console: Console) -> None:
    """Decode a prompt with a chain, the one with the longest answer that does not loop, and print it as it comes:
    accepted drafts in green, the target's own tokens plain; drafts in brackets where there are no colours."""
    target, drafter, *_ = load_pair(source, out / "drafter")
    chain, *_ = read_answers(out / EVALUATION / ANSWERS, len(SHAPES))
    chosen = max(chain, key=lambda one: (not one.loops, one.tokens)).prompt_id
    (prompt,) = (
        str(one.text) for one in load_prompts([out / "prompts.jsonl"]) if one.prompt_id == chosen
    )
    console.print(
        "Accepted drafts are green.\n"
        if console.color_system
        else "Accepted drafts are in brackets.\n"
    )
    console.print(Text(printable(prompt), style="dim"), end="", soft_wrap=True)
    for chunk in SpeculativeDecoder(target, drafter, parse_shape(SHAPES[0])).stream(
        prompt, NEW_TOKENS
    ):
        drafts, own = (
            printable("".join(part))
            for part in (chunk.texts[: chunk.accepted], chunk.texts[chunk.accepted :])
        )
        drafts = drafts if console.color_system or not drafts else f"[{drafts}]"
        console.print(
            Text(drafts, style="green"), Text(own, style="bold"), sep="", end="", soft_wrap=True
        )
    console.print("\n")


def _closing(
    source: str, out: Path, target: dict[str, Any], results: list[dict[str, Any]], seconds: float
) -> str:
    same, compared = (
        sum(result[f"{kind}_outputs"] for result in results) for kind in ("identical", "compared")
    )
    accepted = "".join(
        f"  {result['shape']}: {result['acceptance_length']['mean']:.2f} tokens per target pass, "
        f"{result['speedup']:.2f}x the speed of plain decoding\n"
        for result in results
    )
    looping, answers = (results[0][key] for key in ("looping_answers", "answers"))
    return (
        f"An EAGLE-3.1 drafter for a {target['parameters'] / 1e6:.1f}M-parameter Llama of Python's standard library "
        f"(held-out loss {target['held_out_loss']:.2f} nats):\n{accepted}"
        f"  {same} of {compared} outputs are the target's own, token for token\n"
        f"  {looping} of {answers} answers repeat themselves, which flatters acceptance\n"
        f"Kept in {out} ({seconds:.0f} s): drafter/, evaluation/, config.yaml, commands.sh\n\n"
        "Next:\n"
        f"  what it stands for          cat {out / 'commands.sh'}\n"
        f"  the picture                 {out / EVALUATION / PLOT}\n"
        f"  change one design choice    specdec fit --config {CONFIG} --model.drafter conf/drafter/eagle3.yaml\n"
        f"  another proposal            specdec evaluate --target {source} --drafter {out / 'drafter'} "
        f"--prompts {out / 'prompts.jsonl'} --shape chain:depth=3\n"
        "  your own model and data     specdec fit --model.target.source DIR_OR_HUB_ID --data ChatData "
        "--data.train chats.jsonl"
    )
