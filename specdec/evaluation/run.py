"""``specdec evaluate``: what a saved drafter is worth, by decoding with it."""

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from specdec.decoding import Sampling, parse_shape
from specdec.drafter.io import located
from specdec.evaluation.benchmark import benchmark, cpu_matmul_backend, parse_baseline
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts, load_pair
from specdec.evaluation.lossless import certify, write_certificate
from specdec.evaluation.metrics import (
    METRICS,
    baseline_summary,
    looping_warning,
    summary,
    write_answers,
)
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped
from specdec.evaluation.suites import TEMPERATURES, FoundSuite, find_suites, suite_notes
from specdec.evaluation.table import write_table
from specdec.report.tables import (
    GREY,
    ReportTable,
    few_prompts,
    label,
    print_report,
    save_figure,
    shown,
    style,
    write_report,
)
from specdec.target import Target
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
        shape: draft shapes: chain, tree, static, with parameters as chain:depth=3,
            tree:depth=6,top_k=10,nodes=59.
        system: system prompt of all conversations.
        thinking: whether the target thinks, by the switch of its chat template; by default the template's own choice.
        sampling: how tokens are drawn; greedy by default.
        plain: decode plainly too, for speed-up and identity.
        baselines: others to decode with: transformers, prompt_lookup, assisted:DIR (a smaller model).
        certify: write a certificate of losslessness, with so many draws for each sampled check; 0 writes none.
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

    Writes metrics.json, report.md, report.png and every answer's counts and times, answers.jsonl. The exit status is 1
    if a certificate was asked for and does not hold.

    Example: specdec evaluate --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl
    """
    if config.suite or config.temperatures:
        found = evaluate_suites(config)
    else:
        found = [evaluate(config)]
        print_results(found[0])
    return 0 if all(metrics.get("certified", True) for metrics in found) else 1


def evaluate_suites(config: EvaluationConfig) -> list[dict[str, Any]]:
    """Evaluate on every suite at every temperature, each in a folder of its own in ``out``, and write and show their
    table; returns what each ``metrics.json`` holds. An evaluation that is there already is kept if it is the same.

    Raises:
        ValueError: something given is wrong, or what is there is another evaluation.
    """
    out = config.out or new_run("evaluate")
    suites: list[FoundSuite | None] = [*find_suites(config.suite, config.suite_dir)] or [None]
    asked = []
    for suite in suites:
        for line in suite.notes() if suite else []:
            log.warning("%s", line)
        of_suite: dict[str, Any] = {} if suite is None else {
            "prompts": [suite.source], "layouts": suite.layouts, "suite": [], "suite_dir": None,
            "max_new_tokens": config.max_new_tokens or suite.max_new_tokens,
        }  # fmt: skip
        for temperature in config.temperatures or TEMPERATURES:
            own = dataclasses.replace(
                config, **of_suite, temperatures=[], out=out / f"{suite.name if suite else 'prompts'}-t{temperature:g}",
                sampling=dataclasses.replace(config.sampling, temperature=temperature),
            )  # fmt: skip
            asked.append((suite, own))
    pair = load_pair(config.target, config.drafter, config.device, config.other_target)
    found = []
    for suite, own in asked:
        found.append(_kept(own, pair, suite) or evaluate(own, pair, suite))
        for one in found[-1]["results"]:
            for line in looping_warning(f"{own.out}, {one['shape']}", one):
                log.warning("%s", line)
    write_table(out, [own.out for _, own in asked if own.out])
    return found


def _kept(config: EvaluationConfig, pair: Pair, suite: FoundSuite | None) -> dict[str, Any] | None:
    """An evaluation that was made before; ValueError if it is of other settings."""
    assert config.out is not None
    if not (config.out / METRICS).exists():
        return None
    check_sums(config.out, "evaluate again", partial=True)
    metrics = read_json(config.out / METRICS)
    asked = {"target": dict(pair.target.identity), "drafter": drafter_facts(config.drafter, pair)}
    asked["settings"] = _context(_resolved(config), pair.target, config.load_prompts(), suite)[
        "settings"
    ]
    for part, values in json.loads(json.dumps(asked)).items():
        there = metrics.get(part, {})
        if other := [name for name in {**values, **there} if values.get(name) != there.get(name)]:
            raise ValueError(
                f"{config.out}: there is one already, of another {', '.join(other)}; give another --out"
            )
    log.warning("%s: is there, and kept", config.out)
    return metrics


def _resolved(config: EvaluationConfig) -> EvaluationConfig:
    return dataclasses.replace(config, max_new_tokens=config.max_new_tokens or NEW_TOKENS)


def _context(
    config: EvaluationConfig, target: Target, prompts: Sequence[Prompt], suite: FoundSuite | None
) -> dict[str, Any]:
    context = config.context(target, prompts)
    context["settings"]["suite"] = suite.facts() if suite else None
    return context


def evaluate(
    config: EvaluationConfig, pair: Pair | None = None, suite: FoundSuite | None = None
) -> dict[str, Any]:
    """Evaluate a saved drafter and write the files of an evaluation; returns what ``metrics.json`` holds.

    Args:
        pair: target and drafter, where they are loaded already.
        suite: which the prompts are.

    Raises:
        ValueError: something given is wrong; nothing is written then, but for an evaluation that cannot be certified.
    """
    if config.suite or config.temperatures:
        raise ValueError("evaluate: of suites and several temperatures, call evaluate_suites")
    config = _resolved(config)
    out = config.place("evaluate")
    shapes = [parse_shape(text) for text in config.shape]
    others = [parse_baseline(text) for text in config.baselines]
    converse = functools.partial(PromptConversation, system=config.system, thinking=config.thinking)
    skipped: list[Skipped] = []
    with staged_directory(out) as folder:
        prompts = config.load_prompts()
        pair = pair or load_pair(config.target, config.drafter, config.device, config.other_target)
        target, drafter = pair[:2]
        what = (
            f"{suite.title}, temperature {config.sampling.temperature:g}" if suite else "evaluating"
        )
        with progress(what, "prompt", len(prompts)) as advance:
            answers = benchmark(
                target, drafter, shapes, prompts, config.max_new_tokens,
                sampling=config.sampling, converse=converse, plain=config.plain, baselines=others,
                batch=config.batch_size, compiled=config.compile,
                on_prompt=lambda: advance(1), on_decoder=lambda name: advance(0, name), on_skip=skipped.append,
            )  # fmt: skip
        answers, theirs = answers[: len(shapes)], answers[len(shapes) :]
        metrics: dict[str, Any] = {
            "results": [
                summary(one.name, one.describe(), own)
                for one, own in zip(shapes, answers, strict=True)
            ],
            "drafter": drafter_facts(config.drafter, pair),
            "baselines": [
                baseline_summary(one.name, own) for one, own in zip(others, theirs, strict=True)
            ],
            "skipped": [one._asdict() for one in skipped],
            **_context(config, target, prompts, suite),
        }
        write_answers(folder / ANSWERS, [shape.name for shape in shapes], answers)
        context = {name: metrics[name] for name in ("target", "drafter", "settings")} | metrics[
            "provenance"
        ]
        plot(metrics, folder / PLOT)
        write_report(
            folder / REPORT, "Evaluation", notes(metrics), PLOT, report_tables(metrics), context
        )
        write_json(folder / METRICS, metrics)
    if config.certify:  # decodes everything again; whatever becomes of it, the evaluation stays
        left_out = {one.prompt_id for one in skipped}
        asked = [
            converse(prompt, target.tokenizer)
            for prompt in prompts
            if prompt.prompt_id not in left_out
        ]
        with cpu_matmul_backend(target):
            statement = certify(
                target, drafter, shapes, [conversation.next_ids() or [] for conversation in asked],
                max_new_tokens=config.max_new_tokens, runs=config.certify, sampling=config.sampling,
                batch=config.batch_size, compiled=config.compile,
            )  # fmt: skip
        with staged_directory(out, replace=True) as folder:
            shutil.copytree(out, folder, dirs_exist_ok=True)
            write_certificate(folder / CERTIFICATE, statement, located(config.drafter), metrics)
            metrics["certified"] = statement["holds"]
            write_json(folder / METRICS, metrics)
    return metrics


def print_results(metrics: dict[str, Any], console: Console | None = None) -> None:
    """Show the results, and those of baselines, as one table on the terminal."""
    print_report(report_tables(metrics)[:1], notes(metrics), console)


def notes(metrics: dict[str, Any]) -> list[str]:
    """What is to be said of the table."""
    few = few_prompts(min(result["prompts"] for result in metrics["results"]))
    loops = "Loops: answers that repeat themselves, which flatters acceptance."
    looping = [
        line
        for one in metrics["results"]
        for line in looping_warning(f"Warning: {one['shape']}", one)
    ]
    lead = (
        f"Acceptance length counts the bonus token; docs/evaluate.md defines all figures. {loops}"
    )
    suite = metrics.get("settings", {}).get("suite")
    return [lead, *looping, *few, *(suite_notes(suite) if suite else [])]


def report_tables(metrics: dict[str, Any]) -> list[ReportTable]:
    """What ``metrics.json`` holds, for people: the results, then they by position and by category."""
    results = metrics["results"]
    baselines = metrics.get("baselines", [])
    rows = []
    positions = []
    categories = []
    for one in [*results, *baselines]:
        rate = one["tokens_per_second"]
        compared = one["compared_outputs"]
        if "shape" in one:
            first = [
                one["shape"],
                str(one["prompts"]),
                shown(one["acceptance_length"], "{:.2f}".format),
            ]
            rates = [_number(rate["speculative"], 1), _number(rate["plain"], 1)]
        else:
            first = [one["baseline"], "", "-"]
            rates = [_number(rate, 1), ""]
        same = f"{one['identical_outputs']} of {compared}" if compared else "not compared"
        looping = f"{one['looping_answers']} of {one['answers']}" if "shape" in one else ""
        rows.append([*first, *rates, _speedup(one), same, looping])
    for one in results:
        joint, conditional = one["accepted_per_position"].values()
        for k, shares in enumerate(zip(joint, conditional, strict=True), start=1):
            positions.append([one["shape"], str(k), *(_number(share, 3) for share in shares)])
        for category, part in one["by_category"].items():
            length = shown(part["acceptance_length"], "{:.2f}".format)
            categories.append(
                [one["shape"], category, str(part["prompts"]), length, _speedup(part)]
            )
    left_out = [[one["prompt_id"], one["reason"]] for one in metrics.get("skipped", [])]
    speeds = ["Tokens/s", "Plain tokens/s", "Speed-up"]
    headings = [
        "Draft shape",
        "Prompts",
        "Acceptance length",
        *speeds,
        "Identical outputs",
        "Loops",
    ]
    by_category = ["Draft shape", "Category", "Prompts", "Acceptance length", "Speed-up"]
    return [
        ReportTable("Results", headings, rows),
        ReportTable(
            "Acceptance by position",
            ["Draft shape", "Position k", "Joint", "Conditional"],
            positions,
        ),
        ReportTable("By category", by_category, categories, left=2),
        ReportTable("Prompts left out", ["Prompt", "Reason"], left_out, left=2),
    ]


def plot(metrics: dict[str, Any], path: Path) -> None:
    """Draw acceptance by position and speed as a PNG at ``path``, whole or not at all."""
    results = metrics["results"]
    figure = Figure(figsize=(12, max(4.8, 1.8 + 0.9 * len(results))), dpi=120, layout="constrained")
    positions, speeds = figure.subplots(1, 2)
    for row, result in enumerate(results):
        look = style(row)
        joint = result["accepted_per_position"]["joint"]
        if joint:  # the layout engine goes astray over an empty line
            positions.plot(range(1, len(joint) + 1), joint, clip_on=False, zorder=3, **look)
        speculative, plain = result["tokens_per_second"].values()
        bars = [
            (
                -0.19,
                speculative,
                look["color"],
                "" if plain is None else f" ({result['speedup']:.2f}x)",
            )
        ]
        bars += [] if plain is None else [(0.19, plain, GREY, " plain")]
        for beside, rate, colour, text in bars:
            bar = speeds.barh(row + beside, rate or 0, height=0.34, color=colour)
            speeds.bar_label(bar, [f"{rate or 0:,.1f}{text}"], padding=4)
    names = [
        f"{label(one['shape'], 32)}\n{one['acceptance_length']['mean']:.2f} tokens per pass"
        for one in results
    ]
    positions.set(title="Acceptance by draft position", xlabel="draft position k", ylim=(0, 1))
    positions.set_ylabel("share of passes with at least k accepted")
    positions.xaxis.set_major_locator(MaxNLocator(integer=True))
    speeds.set(
        title="Speed",
        xlabel="tokens per second (x: times plain decoding)",
        ylim=(len(names) - 0.4, -0.6),
    )
    speeds.margins(x=0.35)  # room for the numbers at the ends
    speeds.set_yticks(range(len(names)), names)
    for axes in (positions, speeds):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    save_figure(figure, path)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speedup(part: dict[str, Any]) -> str:
    if part["speedup"] is None:
        return "-"
    return shown({"mean": part["speedup"], **part["speedup_interval"]}, "{:.2f}".format, "x")
