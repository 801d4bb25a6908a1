"""Results for machines and for people: ``metrics.json``, ``report.md`` and a table on the terminal."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.markdown import bracketed, cell, few_prompts, settings_table, table
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.files import write_json, write_text

_DEFINITIONS = f"""\
- **Acceptance length**: tokens committed per target pass, the target's own (bonus) token included, pooled over all
  passes; 1 means that no draft was ever accepted. **Accepted drafts** leave that token out. The **draft acceptance
  rate** divides them by the drafts of the longest path.
- **Joint acceptance at position k**: share of target passes that accepted at least k drafts. Acceptance length is
  1 plus the sum of these.
- **Conditional acceptance at position k**: the same among the passes that accepted k - 1. Passes whose draft was
  shallower than k count as not accepting, in both.
- **Tokens/s**: all new tokens over all seconds. **Speed-up** is the ratio of the two rates; **speed-up per prompt**
  is the mean of each prompt's own ratio.
- **Brackets**: {METHOD}, all turns of a prompt together, {RESAMPLES:,} resamples, seed {SEED}.
- **Identical outputs**: answers that equal plain decoding token by token, of those compared. Greedily, and with the
  rule one_hot, speculative decoding gives the tokens of plain decoding from the same seed in exact arithmetic. In
  floating point a pass over several tokens rounds differently from a pass over one, so where two tokens are almost
  equally likely the choice can flip, and the rest of that answer with it; the lower the precision, the more often.
  Outputs of the other rules are not compared: they agree in distribution only.
"""


def write_metrics(directory: Path | str, results: list[dict[str, Any]], **context: Any) -> Path:
    """Write ``metrics.json`` atomically: the results, and the context beside them.

    Raises:
        ValueError: a number is not finite (the message says which), or the file cannot be written.
    """
    metrics = {"results": results, **context}
    _check_finite(metrics, "metrics")
    path = Path(directory) / "metrics.json"
    write_json(path, metrics)
    return path


def write_report(directory: Path | str, metrics: dict[str, Any], figure: str | None = None) -> Path:
    """Write ``report.md``; ``figure`` is the plot's path relative to ``directory``."""
    results = metrics["results"]
    lines = ["# Evaluation", "", *table(_HEADINGS, [_overview(result) for result in results]), ""]
    lines += [f"{note}\n" for note in _notes(results)]
    if figure is not None:
        lines += [f"![Acceptance and speed]({figure})", ""]
    if rows := [_baseline_row(one) for one in metrics.get("baselines", [])]:
        lines += ["## Baselines", "", *table(_BASELINE_HEADINGS, rows), ""]
    lines += ["## Acceptance by position", ""]
    for result in results:
        drafts, rate = (_interval(result[name]) for name in ("accepted_drafts", "draft_acceptance_rate"))
        lines += [f"### {cell(result['growth'])}", "", *_positions_table(result), ""]
        lines += [f"Accepted drafts per pass {drafts}, draft acceptance rate {rate}.", ""]
    if rows := [row for result in results for row in _category_rows(result)]:
        lines += ["## By category", ""]
        lines += [*table(["Growth", "Category", "Prompts", "Acceptance length", "Speed-up"], rows, left=2), ""]
    if rows := [row for result in results for row in _context_rows(result)]:
        lines += ["## By context length", "", "Committed tokens before the pass, the prompt's included.", ""]
        headings = ["Growth", "Tokens", "Prompts", "Passes", "Acceptance length"]
        lines += [*table(headings, rows, left=2), ""]
    if rows := [row for result in results if (row := _time_row(result))]:
        lines += ["## Time per pass", "", *table(["Growth", "Drafting", "Verification"], rows), ""]
    if rows := [[one["prompt_id"], one["reason"]] for one in metrics.get("skipped", [])]:
        lines += ["## Prompts left out", "", *table(["Prompt", "Reason"], rows, left=2), ""]
    lines += ["## What the numbers mean", "", _DEFINITIONS, "## How they were made", ""]
    context = {key: value for key, value in metrics.items() if key not in ("results", "baselines", "skipped")}
    context |= context.pop("provenance", None) or {}
    growths = [(f"growth {result['growth']}", result["growth_config"]) for result in results]
    lines += settings_table([*context.items(), *growths])
    path = Path(directory) / "report.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def print_results(metrics: dict[str, Any], console: Console) -> None:
    """Show the results as one table on the terminal."""
    shown = Table(title="Evaluation", caption="acceptance length counts the bonus token; brackets: 95 %")
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="right" if index else "left")
    for result in metrics["results"]:
        shown.add_row(*[Text(text) for text in _overview(result)])
    for baseline in metrics.get("baselines", []):
        name, rate, speed, per_prompt, same = _baseline_row(baseline)
        shown.add_row(name, "", "-", rate, "", speed, per_prompt, same)
    console.print(shown)
    for note in _notes(metrics["results"]):
        console.print(Text(note), style="yellow")


_HEADINGS = [
    "Growth", "Prompts", "Acceptance length", "Tokens/s", "Plain tokens/s", "Speed-up", "Speed-up per prompt",
    "Identical outputs",
]  # fmt: skip


def _overview(result: dict[str, Any]) -> list[str]:
    compared = result["compared_outputs"]
    rates = result["tokens_per_second"]
    return [
        result["growth"],
        str(result["prompts"]),
        _interval(result["acceptance_length"]),
        _number(rates["speculative"], 1),
        _number(rates["plain"], 1),
        _speed(result),
        _interval(result["speedup_per_prompt"], "x"),
        f"{result['identical_outputs']} of {compared}" if compared else "not compared",
    ]


_BASELINE_HEADINGS = ["Baseline", "Tokens/s", "Speed-up", "Speed-up per prompt", "Identical outputs"]


def _baseline_row(baseline: dict[str, Any]) -> list[str]:
    compared = baseline["compared_outputs"]
    return [
        baseline["baseline"],
        _number(baseline["tokens_per_second"], 1),
        _speed(baseline),
        _interval(baseline["speedup_per_prompt"], "x"),
        f"{baseline['identical_outputs']} of {compared}" if compared else "not compared",
    ]


def _notes(results: list[dict[str, Any]]) -> list[str]:
    return few_prompts(min((result["prompts"] for result in results), default=0))


def _positions_table(result: dict[str, Any]) -> list[str]:
    joint, conditional = result["accepted_per_position"].values()
    passes = result["histogram"]
    rows = [["0", "", "", str(passes[0])]] + [
        [str(k), _number(together, 3), _number(given, 3), str(count)]
        for k, (together, given, count) in enumerate(zip(joint, conditional, passes[1:], strict=True), start=1)
    ]
    return table(["Drafts k", "Joint", "Conditional", "Passes with exactly k"], rows)


def _context_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [result["growth"], tokens, str(part["prompts"]), str(part["passes"]), _interval(part["acceptance_length"])]
        for tokens, part in result["by_context"].items()
    ]


def _time_row(result: dict[str, Any]) -> list[str] | None:
    times = list(result["pass_time"].values())
    return [result["growth"], *(_interval(time, " ms") for time in times)] if any(times) else None


def _category_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            result["growth"],
            category,
            str(part["prompts"]),
            _interval(part["acceptance_length"]),
            _speed(part),
        ]
        for category, part in result["by_category"].items()
    ]


def _check_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is no measurement; None stands for what was not measured")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_finite(item, f"{where}[{index}]")


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _speed(part: dict[str, Any]) -> str:
    return _interval({"mean": part["speedup"], **part["speedup_interval"]} if part["speedup_interval"] else None, "x")


def _interval(value: dict[str, Any] | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return bracketed(value["mean"], value["low"], value["high"], "{:.2f}".format, unit)
