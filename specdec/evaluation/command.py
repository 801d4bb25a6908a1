"""``specdec evaluate``: what a saved drafter is worth, by decoding with it."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.arguments import parse, target_shorthand
from specdec.compose import new_run
from specdec.decoding import Growth, Sampling, parse_growth
from specdec.drafter import Drafter
from specdec.embedded.source import TargetSource
from specdec.evaluation.arguments import measuring_parser
from specdec.evaluation.baselines import parse_baseline
from specdec.evaluation.benchmark import Turn, benchmark
from specdec.evaluation.certificate import certify, write_certificate
from specdec.evaluation.conversation import Conversation, template_sha256
from specdec.evaluation.pair import load_pair
from specdec.evaluation.plot import plot
from specdec.evaluation.prompts import Prompt, fingerprint, load_prompts
from specdec.evaluation.record import Answer, write_answers
from specdec.evaluation.report import print_results, write_metrics, write_report
from specdec.evaluation.skipping import Skipped
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.evaluation.summary import baseline_summary, summary
from specdec.files import read_json, staged
from specdec.imports import flags
from specdec.nn.products import fast_products
from specdec.provenance import provenance
from specdec.target import Target

log = logging.getLogger(__name__)

PLOT = "report.png"
ANSWERS = "answers.jsonl"
CERTIFICATE = "certificate.json"
FILES = ("metrics.json", "report.md", PLOT, ANSWERS, CERTIFICATE)
TIMED = "the whole call of each decoder: prompt, drafting, verification and host loop, without compilation"


def parser() -> ArgumentParser:
    """The command's arguments."""
    out = measuring_parser("evaluate", __doc__)
    out.add_argument("--growth", type=str, nargs="+", default=["chain", "tree"], help="chain, confident, tree, static, chain:depth=3, confident:threshold=0.3, tree:depth=6,top_k=10,nodes=59, static:file=PATH")  # fmt: skip # noqa: E501
    out.add_argument("--sampling", type=Sampling, default=Sampling())
    out.add_argument("--system", type=str | None, default=None, help="system prompt of all conversations")
    out.add_argument("--thinking", type=bool | None, default=None, help="the chat template's enable_thinking; the template's own choice if not given")  # fmt: skip # noqa: E501
    out.add_argument("--plain", type=bool, default=True, help="decode plainly too, for speed-up and identity")
    out.add_argument("--batch_size", type=int, default=1, help="sequences decoded side by side; 1 measures latency")
    out.add_argument("--compile", type=Literal["on", "off"], default="on", help="run rounds as compiled graphs, which take a minute to build")  # fmt: skip # noqa: E501
    out.add_argument("--baselines", type=str, nargs="*", default=[], help="plain_eager, transformers, prompt_lookup, prompt_lookup:tokens=5, assisted:DIR")  # fmt: skip # noqa: E501
    out.add_argument("--certify", type=int, default=0, help="write a certificate of losslessness, with so many draws for each sampled check; 0 writes none")  # fmt: skip # noqa: E501
    out.add_argument("--out", type=str | None, default=None, help="directory for the results; no older ones in it")
    return out


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong.
    """
    args = parse(parser(), target_shorthand(argv))
    out = Path(args.out) if args.out else new_run("evaluate")
    found = evaluate(
        args.target,
        Path(args.drafter),
        args.prompts,
        args.growth,
        out,
        max_new_tokens=args.max_new_tokens,
        limit=args.limit,
        layouts=args.layouts,
        sampling=args.sampling,
        system=args.system,
        thinking=args.thinking,
        plain=args.plain,
        batch=args.batch_size,
        compiled=args.compile == "on",
        baselines=args.baselines,
        certify_runs=args.certify,
        device=args.device,
        other_target=args.other_target,
        command=["specdec", "evaluate", *flags(), *argv],
    )
    return 0 if found.get("certified", True) else 1


def evaluate(
    source: TargetSource,
    drafter_directory: Path,
    prompt_files: Sequence[str | Path],
    growths: Sequence[str],
    out: Path,
    *,
    max_new_tokens: int = 128,
    limit: int | None = None,
    layouts: Sequence[str] = (),
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    system: str | None = None,
    thinking: bool | None = None,
    plain: bool = True,
    batch: int = 1,
    compiled: bool = True,
    baselines: Sequence[str] = (),
    certify_runs: int = 0,
    device: str = "cpu",
    other_target: bool = False,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Evaluate a saved drafter and write metrics, report, picture and every answer's counts and times into ``out``.

    Args:
        certify_runs: draws of every sampled check of ``certificate.json``; 0 for no certificate.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        ValueError: something given is wrong; nothing is written then, but for an evaluation that cannot be certified.
    """
    for name in FILES:
        if (out / name).exists():
            raise ValueError(f"{out / name} exists already and is never overwritten: choose another --out")
    if certify_runs < 0:
        raise ValueError(f"certify must be a number of draws, 0 for no certificate, not {certify_runs}")
    chosen, others = [parse_growth(text) for text in growths], [parse_baseline(text) for text in baselines]
    prompts = load_prompts(prompt_files, limit, layouts)
    pair = load_pair(source, drafter_directory, device, other_target)
    target, drafter = pair.target, pair.drafter
    skipped: list[Skipped] = []
    converse = functools.partial(Conversation, system=system, thinking=thinking)
    with _whole(out):
        answers = _decode(
            target, drafter, chosen, prompts, max_new_tokens,
            sampling=sampling, converse=converse, plain=plain, batch=batch, compiled=compiled,
            baselines=others, on_skip=skipped.append,
        )  # fmt: skip
        answers, theirs = answers[: len(chosen)], answers[len(chosen) :]
        results = [summary(g.name, g.describe(), a) for g, a in zip(chosen, answers, strict=True)]
        context: dict[str, Any] = {
            "target": dict(target.identity),
            "drafter": {
                "directory": str(drafter_directory),
                "weights_sha256": read_json(drafter_directory / "config.json")["weights_sha256"],
                **drafter.config.to_json(),
            },
            "settings": {
                **asdict(source),
                "prompts": [str(path) for path in prompt_files],
                "prompts_sha256": fingerprint(prompts),
                "max_new_tokens": max_new_tokens,
                "system": system,
                "thinking": thinking,
                "chat_template_sha256": template_sha256(target.tokenizer, prompts),
                "device": device,
                "batch_size": batch,
                "compiled": compiled,
                "sampling": {**asdict(sampling), "rule": type(sampling.acceptance).__name__},
                "drafter_made_for_this_target": pair.made_for_each_other,
                "seconds_cover": TIMED,
                "intervals": f"{METHOD}, {RESAMPLES} resamples, seed {SEED}",
                "torch_threads": torch.get_num_threads(),
            },
            "baselines": [baseline_summary(one.name, a) for one, a in zip(others, theirs, strict=True)],
            "skipped": [one._asdict() for one in skipped],
            "provenance": provenance(command),
        }
        metrics = {"results": results, **context}
        write_answers(out / ANSWERS, [growth.name for growth in chosen], answers)
        plot(metrics, out / PLOT)
        write_report(out, metrics, PLOT)
        write_metrics(out, results, **context)  # last: where it stands, the evaluation is whole
    if certify_runs:  # decodes everything again; whatever becomes of it, the evaluation stays
        left_out = {one.prompt_id for one in skipped}
        asked = [converse(prompt, target.tokenizer) for prompt in prompts if prompt.prompt_id not in left_out]
        with fast_products():
            statement = certify(
                target, drafter, chosen, [conversation.next_ids() or [] for conversation in asked],
                max_new_tokens=max_new_tokens, runs=certify_runs, sampling=sampling, batch=batch, compiled=compiled,
                on_check=lambda check: log.info("certifying: %s", check),
            )  # fmt: skip
        write_certificate(out / CERTIFICATE, statement, drafter_directory, context)
        metrics["certified"] = statement["holds"]
        write_metrics(out, **metrics)
    print_results(metrics, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    return metrics


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[None]:
    """Refuse a place that cannot be written before anything is decoded, and leave nothing half-done in it."""
    try:
        with staged(out / FILES[0]) as probe:
            probe.write_text("{}")
        (out / FILES[0]).unlink()
        yield
    except BaseException:
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            out.rmdir()  # if it is empty
        raise


def _decode(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    **how: Any,
) -> list[list[Answer]]:
    """The benchmark under a progress bar."""
    console = Console(stderr=True)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts, {task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(prompts), rate="")
        made = 0

        def on_turn(turn: Turn) -> None:
            nonlocal made
            made += turn.tokens
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = f"{made / elapsed:,.0f} tokens/s" if elapsed else ""
            progress.update(task, advance=int(turn.last), rate=rate)

        return benchmark(target, drafter, growths, prompts, max_new_tokens, on_turn=on_turn, **how)
