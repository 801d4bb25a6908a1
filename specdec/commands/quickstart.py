"""``specdec quickstart``: the main job on the embedded target, from nothing to a measured EAGLE-3.1 drafter."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.decoding import SpeculativeDecoder, parse_shape
from specdec.embedded import RECORD
from specdec.evaluation.config import load_pair
from specdec.evaluation.metrics import METRICS, read_answers
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.run import ANSWERS, PLOT, EvaluationConfig, evaluate, print_results
from specdec.report.tables import format_interval
from specdec.target import TargetSource
from specdec.utils.config import runs_folder
from specdec.utils.files import write_json, write_text
from specdec.utils.links import open_in_place, refuse_links
from specdec.utils.machine import multiplies_bfloat16
from specdec.utils.reading import check_sums, read_json
from specdec.utils.text import how_many, printable

CONFIG = "conf/quickstart.yaml"
EVALUATION = "evaluation"  # the folder of its results in the run directory
SHAPE = "chain:depth=4"
PROMPTS = 20
PROMPT_TOKENS = 32
NEW_TOKENS = 96
# how long each stage takes on two cores, by the processor (benchmarks/results), for what is said beforehand
PRETRAINS = "about an hour"
TRAINS = "2 to 10 minutes"
DECODES = "20 s to a minute"
COMPILES = "2 to 3 minutes"
SHOWS = "a few seconds"


def quickstart(*, out: Path | None = None, seed: int = 0, full: bool = False) -> int:
    """Train an EAGLE-3.1 drafter for a small target, decode held-out prompts with it, and print the results. An
    interrupted run resumes where it was; what is there already of an earlier one is used again.

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
    if not console.is_terminal:
        console.width = 120  # of a log
    _claim_directory(out, seed, full)
    stages = Stages(console)
    if full:
        from specdec.commands.pretraining import PretrainConfig, pretrain  # imports lightning

        target = TargetSource(str(out / "target"))
        is_trained = (out / "target").exists()
        stages.announce("the target, a small Llama of the standard library", PRETRAINS, is_trained)
        if status := pretrain(PretrainConfig(out=out / "target")):
            return status
    else:
        target = TargetSource()
        stages.announce("the target, a small Llama that comes with specdec", "", True)
    fit_args, evaluate_args = _commands(target.source, out, seed, full)
    commands = [["specdec", "fit", *fit_args], ["specdec", "evaluate", *evaluate_args]]
    write_text(out / "commands.sh", "".join(f"{shlex.join(command)}\n" for command in commands))

    is_trained = (out / "DONE.json").exists()
    stages.announce("training the drafter, EAGLE-3.1", TRAINS, is_trained)
    if not is_trained:
        again = ["specdec", "quickstart", "--out", str(out), "--seed", str(seed)]
        again += ["--full", "true"] * full
        if status := _train_drafter(out, fit_args, again):
            return status
    metrics = _measure_drafter(target, out, full, stages)
    print_results(metrics, console)
    stages.announce("an answer as it is decoded", SHOWS)
    show_answer(target, out, console)
    console.rule("specdec quickstart")
    about = read_json(Path(target.directory()) / RECORD)
    text = _closing(target.source, out, about, metrics["results"][0], time.monotonic() - begin)
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    return 0


class Stages:
    """The four stages of a quick start, said one after the other."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.number = 0

    def announce(self, what: str, duration: str, done: bool = False) -> None:
        """Say what begins, and how long it takes on two cores; ``done``: by an earlier run."""
        self.number += 1
        left = "already done" if done else f"{duration} on two cores"
        line = f"\n[bold]{self.number}/4[/bold] {what}: {left}"
        self.console.print(line, highlight=False, soft_wrap=True)


def _claim_directory(out: Path, seed: int, full: bool) -> None:
    """Mark a new directory with the settings; raise ValueError if it holds anything else."""
    mark = out / "quickstart.json"
    settings: dict[str, Any] = {
        "quickstart": 3,
        "seed": seed,
        "full": full,
        "shape": SHAPE,
        "new_tokens": NEW_TOKENS,
    }
    if mark.exists():
        refuse_links(out)
        if read_json(mark) != settings:
            raise ValueError(
                f"{out} holds a quickstart with other settings: choose another --out or remove it"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is no quickstart run: choose another --out")
    else:
        write_json(mark, settings)


def _train_drafter(out: Path, fit_args: list[str], again: list[str]) -> int:
    """Run ``specdec fit``, or resume it; ``again`` is the command that resumes it once more. Return its exit status."""
    from specdec.commands.fit import run_fit  # imports lightning, which takes seconds
    from specdec.training.run_directory import CLAIM

    open_in_place(out / CLAIM, "a").close()  # by which fit knows the directory for a run's
    return run_fit("fit", [*fit_args, "--ckpt_path", "auto"], again)


def _measure_drafter(target: TargetSource, out: Path, full: bool, stages: Stages) -> dict[str, Any]:
    """Decode the held-out prompts plainly and with drafts; return the metrics, or those of an earlier run."""
    prompts = out / "prompts.jsonl"
    is_measured = (out / EVALUATION).exists()
    if not prompts.exists():
        from specdec.embedded import SEED, held_out_prompts  # imports lightning
        from specdec.training.run_directory import write_run_sums

        rows = held_out_prompts(PROMPTS, PROMPT_TOKENS, SEED, target.load_tokenizer())
        write_text(prompts, "".join(json.dumps({**row, "category": None}) + "\n" for row in rows))
        write_run_sums(out)
    what = f"decoding {PROMPTS} held-out prompts plainly and with drafts"
    stages.announce(what, COMPILES if full else DECODES, is_measured)
    if is_measured:
        check_sums(out / EVALUATION, "remove the folder: the same command evaluates again")
        return read_json(out / EVALUATION / METRICS)
    return evaluate(EvaluationConfig(
        target=target, drafter=out / "drafter", prompts=[str(prompts)], shape=[SHAPE],
        max_new_tokens=NEW_TOKENS, compile=full, out=out / EVALUATION,
    ))  # fmt: skip


def _commands(source: str, out: Path, seed: int, compile: bool) -> tuple[list[str], list[str]]:
    """Return the arguments of ``specdec fit`` and of ``specdec evaluate`` that a quick start stands for."""
    precision, dtype = "32-true", "float32"
    if multiplies_bfloat16():
        precision, dtype = "bf16-mixed", "bfloat16"
    fit_args = [
        "--config", CONFIG, "--seed_everything", str(seed), "--out", str(out), "--model.target.source", source,
        # the evaluation is in float32
        "--trainer.precision", precision, "--model.target.dtype", dtype,
    ]  # fmt: skip
    evaluate_args = [
        "--target", source, "--drafter", str(out / "drafter"), "--prompts", str(out / "prompts.jsonl"),
        "--shape", SHAPE, "--max_new_tokens", str(NEW_TOKENS), "--out", str(out / EVALUATION),
    ]  # fmt: skip
    return fit_args, evaluate_args + ([] if compile else ["--compile", "false"])


def show_answer(source: TargetSource, out: Path, console: Console) -> None:
    """Decode a prompt with a chain, and print the answer as it comes: accepted drafts in green, the target's own tokens
    plain; drafts in brackets without colors. Of the answers that end and do not loop it is the longest."""
    target, drafter, *_ = load_pair(source, out / "drafter")
    chain, *_ = read_answers(out / EVALUATION / ANSWERS, 1)
    longest = max(
        chain,
        key=lambda answer: (not answer.loops, answer.tokens < NEW_TOKENS, answer.tokens),
    )
    prompts = load_prompts([out / "prompts.jsonl"])
    texts = {prompt.prompt_id: str(prompt.text) for prompt in prompts}
    prompt = texts[longest.prompt_id]
    has_colors = bool(console.color_system)
    console.print(f"Accepted drafts are {'green' if has_colors else 'in brackets'}.\n")
    console.print(Text(printable(prompt), style="dim"), end="", soft_wrap=True)
    decoder = SpeculativeDecoder(target, drafter, parse_shape(SHAPE))
    for chunk in decoder.stream(prompt, NEW_TOKENS):
        drafts = printable("".join(chunk.texts[: chunk.accepted]))
        bonus = printable("".join(chunk.texts[chunk.accepted :]))
        if drafts and not has_colors:
            drafts = f"[{drafts}]"
        parts = Text(drafts, style="green"), Text(bonus, style="bold")
        console.print(*parts, sep="", end="", soft_wrap=True)
    console.print("\n")


def _closing(
    source: str, out: Path, target: dict[str, Any], result: dict[str, Any], seconds: float
) -> str:
    """Return what the run has left, the commands that come next, and at the end what was measured."""
    prompts = out / "prompts.jsonl"
    evaluate = f"specdec evaluate --target {source} --drafter {out / 'drafter'} --prompts {prompts}"
    return (
        f"Kept in {out} ({seconds:.0f} s): drafter/, evaluation/, config.yaml, commands.sh\n\n"
        "Next:\n"
        f"  what it stands for          cat {out / 'commands.sh'}\n"
        f"  the picture                 {out / EVALUATION / PLOT}\n"
        f"  change one design choice    specdec fit --config {CONFIG} --model.drafter conf/drafter/eagle3.yaml\n"
        f"  draft a tree                {evaluate} --shape tree:depth=6,top_k=2,nodes=12\n"
        "  your own model and data     specdec fit --model.target.source DIR_OR_HUB_ID --data ChatData "
        "--data.train chats.jsonl\n\n"
        f"An EAGLE-3.1 drafter for a {target['parameters'] / 1e6:.1f}M-parameter Llama of Python's standard library "
        f"(held-out loss {target['held_out_loss']:.2f} nats), on {how_many(result['answers'], 'held-out prompt')}:\n"
        f"  {result['identical_outputs']} of {result['compared_outputs']} outputs are the target's own, "
        "token for token\n"
        f"  {result['looping_answers']} of {result['answers']} answers repeat themselves, which raises acceptance\n"
        f"  {speed_reading(result)}\n"
        f"  {acceptance_reading(result)}"
    )


def speed_reading(result: dict[str, Any]) -> str:
    """Say how fast decoding was, and whether the prompts are enough to tell."""
    interval = result["speedup_interval"] or {"low": None, "high": None}
    speedup = format_interval({"mean": result["speedup"], **interval}, "{:.2f}".format)
    low, high = interval["low"], interval["high"]
    if low is None or low <= 1 <= high:
        verdict = "these prompts are too few to tell it from plain decoding"
    else:
        verdict = "faster than plain decoding" if low > 1 else "slower than plain decoding"
    return (
        f"speed-up {speedup}: {verdict}; a pass of a target this small takes little longer than its drafts, "
        "so speed says little here"
    )


def acceptance_reading(result: dict[str, Any]) -> str:
    """Say what an acceptance length means, with its interval."""
    length = result["acceptance_length"]
    return (
        f"acceptance length {format_interval(length, '{:.2f}'.format)}: a pass of the target commits "
        f"{length['mean']:.1f} tokens on average, where plain decoding commits one (95% interval over prompts)"
    )
