"""``specdec evaluate``: what a saved drafter is worth, by decoding with it."""

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.decoding import DraftShape, Sampling, parse_shape
from specdec.drafter.io import located
from specdec.evaluation.benchmark import (
    Converse,
    benchmark,
    parse_baseline,
)
from specdec.evaluation.compare import different_settings
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts
from specdec.evaluation.lossless import certify, write_certificate
from specdec.evaluation.metrics import (
    METRICS,
    answer_warnings,
    write_answers,
)
from specdec.evaluation.partial import PartialResults
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped
from specdec.evaluation.results_page import evaluation_notes, evaluation_tables
from specdec.evaluation.suites import TEMPERATURES, FoundSuite, find_suites
from specdec.evaluation.summary import baseline_summary, shape_summary
from specdec.evaluation.table import write_table
from specdec.nn.backend import matmul_backend
from specdec.report.tables import print_report, write_report
from specdec.utils.config import new_run
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import NonNegative, Side, Whole
from specdec.utils.progress import progress
from specdec.utils.reading import check_sums, read_json

log = logging.getLogger(__name__)

REPORT = "report.md"
PLOT = "report.png"
ANSWERS = "answers.jsonl"
CERTIFICATE = "certificate.json"
NEW_TOKENS = 128  # per answer, of prompts that are no suite


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(MeasurementConfig):
    """What is decoded, with what, and where the results go.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub.
        prompts: rows (.jsonl, .ndjson, .json, .parquet) of a known layout, text with one prompt a line, or
            hub:REPOSITORY:CONFIG:SPLIT.
        suite: benchmarks by name in place of prompts, as mt_bench, spec_bench or nine, or NAME=FILE; a folder for each
            and each temperature.
        suite_dir: where the files of the suites are, as gsm8k.jsonl; the Hub's rows if not given.
        temperatures: evaluate at each of these; 0 and 1 for suites, else the sampling's own.
        max_new_tokens: new tokens per answer; 0 for those of the papers where a suite is asked for, else 128.
        shape: draft shapes: chain, adaptive, tree, static, with parameters as chain:depth=3,
            tree:depth=6,top_k=10,nodes=59.
        system: system prompt of all conversations.
        thinking: whether the target thinks, by the switch of its chat template; by default the template's own choice.
        sampling: how tokens are drawn; greedy by default.
        plain: decode plainly too, for speed-up and identity.
        baselines: others to decode with: transformers, prompt_lookup, assisted:DIR (a smaller model).
        certify: verify that outputs are lossless, with this many samples per check, and write a certificate; 0
            writes none.
        batch_size: sequences decoded side by side; 1 measures latency.
        compile: run rounds as compiled graphs, which take a minute to build.
        out: directory for the results, a new one; by default under runs.
    """

    drafter: Path
    prompts: list[str] = field(default_factory=list)
    suite: list[str] = field(default_factory=list)
    suite_dir: Path | None = None
    temperatures: list[NonNegative] = field(default_factory=list)
    max_new_tokens: Whole = 0
    shape: list[str] = field(default_factory=lambda: ["chain", "tree"])
    system: str | None = None
    thinking: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    plain: bool = True
    baselines: list[str] = field(default_factory=list)
    certify: Whole = 0
    batch_size: Side = 1
    compile: bool = True

    def __post_init__(self) -> None:
        if bool(self.prompts) == bool(self.suite):
            raise ValueError("evaluate: give either prompts or suite")
        if self.suite_dir and not self.suite:
            raise ValueError(
                "suite_dir: it is where the files of suites are, and no suite is asked for"
            )
        if (self.temperatures or self.suite) and self.sampling.temperature:
            raise ValueError("sampling.temperature: give temperatures in its place")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures: one is given twice")
        if self.suite and self.layouts:
            raise ValueError("layouts: a suite has its own")


def evaluate_command(config: EvaluationConfig) -> int:
    """Decode prompts with a saved drafter: acceptance length, acceptance by position, speed-up over plain decoding.

    Writes metrics.json, report.md, its figure (report.png, .pdf, .svg, .csv) and every answer's counts and times,
    answers.jsonl. The exit status is 1 if a certificate was asked for and does not hold. The same command continues an
    evaluation that was interrupted.

    Example: specdec evaluate --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl
    """
    if config.suite or config.temperatures:
        evaluations = evaluate_suites(config)
    else:
        evaluations = [evaluate(config)]
        print_results(evaluations[0])
    return 0 if all(metrics.get("certified", True) for metrics in evaluations) else 1


def evaluate_suites(config: EvaluationConfig) -> list[dict[str, Any]]:
    """Evaluate on every suite at every temperature, each in a separate folder in ``out``, and write and show their
    table; returns what each ``metrics.json`` holds. An evaluation that is there already is kept if it is the same.

    Raises:
        ValueError: something given is wrong, or what is there is another evaluation.
    """
    out = config.out or new_run("evaluate")
    suites: list[FoundSuite | None] = [*find_suites(config.suite, config.suite_dir)] or [None]
    parts: list[tuple[FoundSuite | None, EvaluationConfig]] = []
    for suite in suites:
        for line in suite.notes() if suite else []:
            log.warning("%s", line)
        for temperature in config.temperatures or TEMPERATURES:
            parts.append((suite, _part_config(config, suite, temperature, out)))
    pair = config.load_pair(config.drafter)
    evaluations = []
    for suite, part in parts:
        metrics = _saved_metrics(part, pair, suite) or evaluate(part, pair, suite)
        evaluations.append(metrics)
        for result in metrics["results"]:
            for line in answer_warnings(f"{part.out}, {result['shape']}", result):
                log.warning("%s", line)
    write_table(out, [part.out for _, part in parts if part.out])
    return evaluations


def _part_config(
    config: EvaluationConfig, suite: FoundSuite | None, temperature: float, out: Path
) -> EvaluationConfig:
    """Return the config of one suite, or of the prompts, at one temperature, with a folder in ``out``."""
    name = suite.name if suite else "prompts"
    return dataclasses.replace(
        config,
        prompts=[suite.source] if suite else config.prompts,
        layouts=suite.layouts if suite else config.layouts,
        max_new_tokens=config.max_new_tokens or (suite.max_new_tokens if suite else NEW_TOKENS),
        out=out / f"{name}-t{temperature:g}",
        suite=[],
        suite_dir=None,
        temperatures=[],
        sampling=dataclasses.replace(config.sampling, temperature=temperature),
    )


def _saved_metrics(
    config: EvaluationConfig, pair: Pair, suite: FoundSuite | None
) -> dict[str, Any] | None:
    """Return the metrics of an evaluation that was made before; ValueError if it is of other settings."""
    assert config.out is not None
    if not (config.out / METRICS).exists():
        return None
    check_sums(config.out, "evaluate again", partial=True)
    metrics = read_json(config.out / METRICS)
    prompts = config.load_prompts()
    asked = _context(config, pair, prompts, suite)
    for part in ("target", "drafter", "settings"):
        values = json.loads(json.dumps(asked[part]))
        if other := different_settings(values, metrics.get(part, {})):
            raise ValueError(
                f"{config.out}: there is one already, of another {', '.join(other)}; give another --out"
            )
    log.warning("%s: is there, and kept", config.out)
    with _partial_results(config, asked) as partial:
        partial.discard()
    if config.certify and "certified" not in metrics:
        left_out = {prompt["prompt_id"] for prompt in metrics["skipped"]}
        decoded = [prompt for prompt in prompts if prompt.prompt_id not in left_out]
        shapes = [parse_shape(text) for text in config.shape]
        _certify(config, pair, shapes, decoded, config.out, metrics)
    return metrics


def _context(
    config: EvaluationConfig, pair: Pair, prompts: Sequence[Prompt], suite: FoundSuite | None
) -> dict[str, Any]:
    """Return what results say of how they came about, JSON-ready."""
    context = config.context(pair.target, prompts)
    context["settings"]["suite"] = suite.facts() if suite else None
    return {"drafter": drafter_facts(config.drafter, pair), **context}


def evaluate(
    config: EvaluationConfig, pair: Pair | None = None, suite: FoundSuite | None = None
) -> dict[str, Any]:
    """Evaluate a saved drafter and write the files of an evaluation; returns what ``metrics.json`` holds.

    Args:
        pair: target and drafter, where they are loaded already.
        suite: which the prompts are.

    Raises:
        ValueError: something given is wrong; nothing is written then, except an evaluation that cannot be certified.
    """
    if config.suite or config.temperatures:
        raise ValueError("evaluate: of suites and several temperatures, call evaluate_suites")
    config = dataclasses.replace(config, max_new_tokens=config.max_new_tokens or NEW_TOKENS)
    out = config.place("evaluate")
    shapes = [parse_shape(text) for text in config.shape]
    baselines = [parse_baseline(text) for text in config.baselines]
    skipped: list[Skipped] = []
    title = "evaluating"
    if suite is not None:
        title = f"{suite.title}, temperature {config.sampling.temperature:g}"
    with contextlib.ExitStack() as stack:
        # closed after the results are written
        with staged_directory(out) as folder:
            prompts = config.load_prompts()
            pair = pair or config.load_pair(config.drafter)
            context = _context(config, pair, prompts, suite)
            partial = stack.enter_context(_partial_results(config, context))
            with progress(title, "prompt", len(prompts)) as advance:
                answers = benchmark(
                    pair.target, pair.drafter, shapes, prompts, config.max_new_tokens, sampling=config.sampling,
                    converse=_converse(config), plain=config.plain, baselines=baselines, batch=config.batch_size,
                    compiled=config.compile, advance=advance, on_skip=skipped.append, partial=partial,
                )  # fmt: skip
            if partial.continued_after:
                context["provenance"]["continued_after_prompts"] = partial.continued_after
            drafted = answers[: len(shapes)]
            compared = zip(baselines, answers[len(shapes) :], strict=True)
            metrics = {
                "results": [
                    shape_summary(shape.name, shape.describe(), of_shape)
                    for shape, of_shape in zip(shapes, drafted, strict=True)
                ],
                "drafter": context["drafter"],
                "baselines": [
                    baseline_summary(baseline.name, decoded) for baseline, decoded in compared
                ],
                "skipped": [prompt._asdict() for prompt in skipped],
                **context,
            }
            write_answers(folder / ANSWERS, [shape.name for shape in shapes], drafted)
            _write_report(folder, metrics)
            write_json(folder / METRICS, metrics)
        partial.discard()
    if config.certify:  # decodes everything again; whatever becomes of it, the evaluation stays
        left_out = {prompt.prompt_id for prompt in skipped}
        decoded = [prompt for prompt in prompts if prompt.prompt_id not in left_out]
        _certify(config, pair, shapes, decoded, out, metrics)
    return metrics


def _partial_results(config: EvaluationConfig, context: dict[str, Any]) -> PartialResults:
    """What was decoded of this evaluation; nothing with an assistant, whose weights are in no setting."""
    has_assistant = any(parse_baseline(text).assistant for text in config.baselines)
    return PartialResults(context, is_kept=not has_assistant)


def _converse(config: EvaluationConfig) -> Converse:
    return functools.partial(PromptConversation, system=config.system, thinking=config.thinking)


def _write_report(folder: Path, metrics: dict[str, Any]) -> None:
    """Write the picture and the page that shows it."""
    from specdec.evaluation.results_figure import CAPTION, plot  # imports matplotlib

    context = {name: metrics[name] for name in ("target", "drafter", "settings")}
    plot(metrics, folder / PLOT)
    write_report(
        folder / REPORT,
        "Evaluation",
        evaluation_notes(metrics),
        [(PLOT, CAPTION)],
        evaluation_tables(metrics),
        context | metrics["provenance"],
    )


def _certify(
    config: EvaluationConfig,
    pair: Pair,
    shapes: Sequence[DraftShape],
    prompts: Sequence[Prompt],
    out: Path,
    metrics: dict[str, Any],
) -> None:
    """Certify losslessness, and add the certificate to the evaluation that lies in ``out``."""
    converse = _converse(config)
    conversations = [converse(prompt, pair.target.tokenizer) for prompt in prompts]
    with matmul_backend(pair.target.device):
        statement = certify(
            pair.target,
            pair.drafter,
            shapes,
            [conversation.next_ids() or [] for conversation in conversations],
            max_new_tokens=config.max_new_tokens,
            runs=config.certify,
            sampling=config.sampling,
            batch=config.batch_size,
            compiled=config.compile,
        )
    check_sums(out, "evaluate again")  # certifying has taken long
    with staged_directory(out, replace=True) as folder:
        shutil.copytree(out, folder, dirs_exist_ok=True)
        write_certificate(folder / CERTIFICATE, statement, located(config.drafter), metrics)
        metrics["certified"] = statement["holds"]
        write_json(folder / METRICS, metrics)


def print_results(metrics: dict[str, Any], console: Console | None = None) -> None:
    """Show the results, and those of baselines, as one table on the terminal."""
    print_report(evaluation_tables(metrics)[:1], evaluation_notes(metrics), console)
