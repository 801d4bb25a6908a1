"""Results for machines and for people: ``metrics.json``, ``report.md`` and a table on the terminal."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.metrics import Group, decoding_metrics
from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED, Interval
from specdec.files import write_json, write_text

_FEW_PROMPTS = 10  # below this a bootstrap of prompts is noticeably too narrow
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


def summary(growth_name: str, growth_config: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """All statistics of one growth, JSON-ready; a number that was not measured is None.

    Raises:
        ValueError: the answers hold no target pass.
    """
    metrics = decoding_metrics(sorted({answer.category for answer in answers if answer.category is not None}))
    metrics.update(answers)
    found = metrics.compute()
    if found["acceptance_length"] is None:
        raise ValueError("no target pass to take statistics of: decode at least one prompt, with more new tokens")
    return {
        "growth": growth_name,
        "growth_config": growth_config,
        "prompts": len({answer.prompt_id for answer in answers}),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "passes": sum(len(answer.accepted) for answer in answers),
        **{name: _json(found[name]) for name in _AS_FOUND},
        **_speedup(found["speedup"]),
        "speedup_per_prompt": _json(found["speedup_per_prompt"]),
        "pass_time": _json(found["pass_time"]),
        "identical_outputs": sum(answer.identical is True for answer in answers),
        "compared_outputs": sum(answer.identical is not None for answer in answers),
        "by_category": {group.name: _group(group) | _speedup(group.speedup) for group in found["by_category"]},
        "by_context": {group.name: _group(group) for group in found["by_context"]},
    }


_AS_FOUND = (
    "acceptance_length", "accepted_drafts", "draft_acceptance_rate", "accepted_per_position", "histogram",
    "tokens_per_second",
)  # fmt: skip


def _json(value: Any) -> Any:
    """Named tuples as objects, and what is in them."""
    return {name: _json(item) for name, item in value._asdict().items()} if hasattr(value, "_asdict") else value


def _speedup(found: Interval | None) -> dict[str, Any]:
    low_high = {"low": found.low, "high": found.high} if found else None
    return {"speedup": found.mean if found else None, "speedup_interval": low_high}


def _group(group: Group) -> dict[str, Any]:
    return {"prompts": group.prompts, "passes": group.passes, "acceptance_length": _json(group.acceptance_length)}


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
    lines = ["# Evaluation", "", *_table(_HEADINGS, [_overview(result) for result in results]), ""]
    lines += [f"{note}\n" for note in _notes(results)]
    if figure is not None:
        lines += [f"![Acceptance and speed]({figure})", ""]
    lines += ["## Acceptance by position", ""]
    for result in results:
        drafts, rate = (_interval(result[name]) for name in ("accepted_drafts", "draft_acceptance_rate"))
        lines += [f"### {_cell(result['growth'])}", "", *_positions_table(result), ""]
        lines += [f"Accepted drafts per pass {drafts}, draft acceptance rate {rate}.", ""]
    if rows := [row for result in results for row in _category_rows(result)]:
        lines += ["## By category", ""]
        lines += [*_table(["Growth", "Category", "Prompts", "Acceptance length", "Speed-up"], rows, left=2), ""]
    if rows := [row for result in results for row in _context_rows(result)]:
        lines += ["## By context length", "", "Committed tokens before the pass, the prompt's included.", ""]
        headings = ["Growth", "Tokens", "Prompts", "Passes", "Acceptance length"]
        lines += [*_table(headings, rows, left=2), ""]
    if rows := [row for result in results if (row := _time_row(result))]:
        lines += ["## Time per pass", "", *_table(["Growth", "Drafting", "Verification"], rows), ""]
    if rows := [[one["prompt_id"], one["reason"]] for one in metrics.get("skipped", [])]:
        lines += ["## Prompts left out", "", *_table(["Prompt", "Reason"], rows, left=2), ""]
    lines += ["## What the numbers mean", "", _DEFINITIONS, "## How they were made", ""]
    context = {key: value for key, value in metrics.items() if key not in ("results", "skipped")}
    context |= context.pop("provenance", None) or {}
    settings = [[key, _plain(value)] for key, value in context.items()]
    settings += [[f"growth {result['growth']}", _plain(result["growth_config"])] for result in results]
    lines += _table(["Setting", "Value"], settings, left=2)
    path = Path(directory) / "report.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def print_results(metrics: dict[str, Any], console: Console) -> None:
    """Show the results as one table on the terminal."""
    table = Table(title="Evaluation", caption="acceptance length counts the bonus token; brackets: 95 %")
    for index, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if index else "left")
    for result in metrics["results"]:
        table.add_row(*[Text(cell) for cell in _overview(result)])
    console.print(table)
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


def _notes(results: list[dict[str, Any]]) -> list[str]:
    fewest = min((result["prompts"] for result in results), default=0)
    if fewest == 1:
        return ["No interval: resampling prompts takes at least 2, and there was 1."]
    if 1 < fewest < _FEW_PROMPTS:
        return [f"Intervals from {fewest} prompts are too narrow: take at least {_FEW_PROMPTS}."]
    return []


def _positions_table(result: dict[str, Any]) -> list[str]:
    joint, conditional = result["accepted_per_position"].values()
    passes = result["histogram"]
    rows = [["0", "", "", str(passes[0])]] + [
        [str(k), _number(together, 3), _number(given, 3), str(count)]
        for k, (together, given, count) in enumerate(zip(joint, conditional, passes[1:], strict=True), start=1)
    ]
    return _table(["Drafts k", "Joint", "Conditional", "Passes with exactly k"], rows)


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
    if value["low"] is None:
        return _number(value["mean"], 2, unit)
    return f"{value['mean']:.2f}{unit} [{value['low']:.2f}, {value['high']:.2f}]"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def _table(headings: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """A Markdown table with the first ``left`` columns aligned left, numbers right."""
    rule = ["---" if index < left else "---:" for index in range(len(headings))]
    return [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in (headings, rule, *rows)]
