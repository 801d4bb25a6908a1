"""``specdec evaluate``: what a saved drafter is worth, by decoding with it."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.decoding import Sampling, parse_shape
from specdec.evaluation.answers import write_answers
from specdec.evaluation.baselines import parse_baseline
from specdec.evaluation.benchmark import benchmark, cpu_matmul_backend
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.lossless import certify, write_certificate
from specdec.evaluation.metrics import baseline_summary, summary
from specdec.evaluation.prompts import PromptConversation, Skipped
from specdec.evaluation.report import plot, print_results, write_report
from specdec.utils.config import new_run
from specdec.utils.files import staged, write_json
from specdec.utils.progress import progress

log = logging.getLogger(__name__)

METRICS, REPORT, PLOT = "metrics.json", "report.md", "report.png"
ANSWERS, CERTIFICATE = "answers.jsonl", "certificate.json"
FILES = (METRICS, REPORT, PLOT, ANSWERS, CERTIFICATE)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(MeasurementConfig):
    """What is decoded, with what, and where the results go.

    Args:
        drafter: the drafter's directory.
        shape: draft shapes: chain, tree, static, with parameters as chain:depth=3,
            tree:depth=6,top_k=10,nodes=59, static:file=PATH.
        system: system prompt of all conversations.
        thinking: the chat template's enable_thinking; the template's own choice if not given.
        sampling: how tokens are drawn; greedy by default.
        plain: decode plainly too, for speed-up and identity.
        baselines: others to decode with: plain_eager, transformers, prompt_lookup, prompt_lookup:tokens=5,
            assisted:DIR.
        certify: write a certificate of losslessness, with so many draws for each sampled check; 0 writes none.
        batch_size: sequences decoded side by side; 1 measures latency.
        compile: run rounds as compiled graphs, which take a minute to build.
        out: directory for the results, with no older ones in it; by default a new one under runs.
    """

    drafter: Path
    shape: list[str] = field(default_factory=lambda: ["chain", "tree"])
    system: str | None = None
    thinking: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    plain: bool = True
    baselines: list[str] = field(default_factory=list)
    certify: int = 0
    batch_size: int = 1
    compile: bool = True


def evaluate_command(config: EvaluationConfig) -> int:
    """Decode prompts with a saved drafter: acceptance length, acceptance by position, speed-up over plain decoding.

    Writes metrics.json, report.md, report.png and every answer's counts and times, answers.jsonl. The exit status is 1
    if a certificate was asked for and does not hold.

    Example: specdec evaluate --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl
    """
    metrics = evaluate(config)
    print_results(metrics, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150))
    return 0 if metrics.get("certified", True) else 1


def evaluate(config: EvaluationConfig) -> dict[str, Any]:
    """Evaluate a saved drafter and write the files of an evaluation; returns what ``metrics.json`` holds.

    Raises:
        ValueError: something given is wrong; nothing is written then, but for an evaluation that cannot be certified.
    """
    out = config.out or new_run("evaluate")
    for name in FILES:
        if (out / name).exists():
            raise ValueError(f"{out / name} exists already and is never overwritten: choose another --out")
    if config.certify < 0:
        raise ValueError(f"certify must be a number of draws, 0 for no certificate, not {config.certify}")
    shapes, others = [parse_shape(text) for text in config.shape], [parse_baseline(text) for text in config.baselines]
    prompts = config.load_prompts()
    pair = load_pair(config.target, config.drafter, config.device, config.other_target)
    target, drafter, _ = pair
    converse = functools.partial(PromptConversation, system=config.system, thinking=config.thinking)
    skipped: list[Skipped] = []
    with _whole(out):
        with progress("evaluating", "prompts", len(prompts)) as advance:
            answers = benchmark(
                target, drafter, shapes, prompts, config.max_new_tokens,
                sampling=config.sampling, converse=converse, plain=config.plain, baselines=others,
                batch=config.batch_size, compiled=config.compile,
                on_prompt=functools.partial(advance, 1), on_skip=skipped.append,
            )  # fmt: skip
        answers, theirs = answers[: len(shapes)], answers[len(shapes) :]
        metrics: dict[str, Any] = {
            "results": [summary(one.name, one.describe(), own) for one, own in zip(shapes, answers, strict=True)],
            "drafter": drafter_facts(config.drafter, pair),
            "baselines": [baseline_summary(one.name, own) for one, own in zip(others, theirs, strict=True)],
            "skipped": [one._asdict() for one in skipped],
            **config.context(target, prompts),
        }
        write_answers(out / ANSWERS, [shape.name for shape in shapes], answers)
        plot(metrics, out / PLOT)
        write_report(out / REPORT, metrics, PLOT)
        write_json(out / METRICS, metrics)  # last: where it stands, the evaluation is whole
    if config.certify:  # decodes everything again; whatever becomes of it, the evaluation stays
        left_out = {one.prompt_id for one in skipped}
        asked = [converse(prompt, target.tokenizer) for prompt in prompts if prompt.prompt_id not in left_out]
        with cpu_matmul_backend(target):
            statement = certify(
                target, drafter, shapes, [conversation.next_ids() or [] for conversation in asked],
                max_new_tokens=config.max_new_tokens, runs=config.certify, sampling=config.sampling,
                batch=config.batch_size, compiled=config.compile,
            )  # fmt: skip
        write_certificate(out / CERTIFICATE, statement, config.drafter, metrics)
        metrics["certified"] = statement["holds"]
        write_json(out / METRICS, metrics)
    return metrics


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[None]:
    """Refuse a place that cannot be written before anything is decoded, and leave nothing half-done in it."""
    try:
        with staged(out / METRICS) as probe:
            probe.write_text("{}")
        (out / METRICS).unlink()
        yield
    except BaseException:
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            out.rmdir()  # if it is empty
        raise
