"""What ``metrics.json`` holds, for people: a table on the terminal, ``report.md`` and one picture."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.statistics import HOW
from specdec.evaluation.style import GREY, bracketed, few_prompts, label, settings_table, style, table
from specdec.utils.files import staged, write_text

_DEFINITIONS = f"""\
- **Acceptance length**: tokens committed per target pass, the target's own (bonus) token included, pooled over all
  passes; 1 means that no draft was ever accepted.
- **Joint acceptance at position k**: share of target passes that accepted at least k drafts; **conditional**: the same
  among the passes that accepted k - 1. The **draft acceptance rate** is accepted drafts over those of the longest path.
- **Tokens/s**: all new tokens over all seconds of whole calls, the prompt's pass included, without compilation.
  **Speed-up** is the ratio of the two rates.
- **Identical outputs**: answers that equal plain decoding token by token, of those compared. Where two tokens are
  almost equally likely, rounding can flip the choice, and with it the rest of that answer.
- **Brackets**: {HOW}, all turns of a prompt together.
"""
_HEADINGS = (
    "Draft shape", "Prompts", "Acceptance length", "Tokens/s", "Plain tokens/s", "Speed-up", "Identical outputs",
)  # fmt: skip


def print_results(metrics: dict[str, Any], console: Console) -> None:
    """Show the results, and those of baselines, as one table on the terminal."""
    shown = Table(title="Evaluation", caption="acceptance length counts the bonus token; brackets: 95 %")
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="right" if index else "left")
    for row in _rows(metrics):
        shown.add_row(*map(Text, row))
    console.print(shown)
    for note in _notes(metrics):
        console.print(Text(note), style="yellow")


def write_report(path: Path | str, metrics: dict[str, Any], figure: str) -> None:
    """Write the report in Markdown; ``figure`` is the plot's path relative to its folder."""
    results = metrics["results"]
    lines = ["# Evaluation", "", *table(_HEADINGS, _rows(metrics)), "", *(f"{note}\n" for note in _notes(metrics))]
    lines += [f"![Acceptance and speed]({figure})", ""]

    def section(title: str, headings: tuple[str, ...], rows: list[list[str]], left: int = 2) -> None:
        if rows:
            lines.extend([f"## {title}", "", *table(headings, rows, left=left), ""])

    positions = []
    for result in results:
        joint, conditional = result["accepted_per_position"].values()
        rates = zip([None, *joint], [None, *conditional], result["histogram"], strict=True)
        for k, (*shares, count) in enumerate(rates):
            positions.append([result["shape"], str(k), *(_number(share, 3) for share in shares), str(count)])
    headings = ("Draft shape", "Drafts k", "Joint", "Conditional", "Passes with exactly k")
    section("Acceptance by position", headings, positions, left=1)
    by_category = [
        [result["shape"], category, str(part["prompts"]), _interval(part["acceptance_length"]), _speed(part)]
        for result in results
        for category, part in result["by_category"].items()
    ]
    section("By category", ("Draft shape", "Category", "Prompts", "Acceptance length", "Speed-up"), by_category)
    by_pass = [
        [result["shape"], *(_interval(time, " ms") for time in result["pass_time"].values()),
         _interval(result["draft_acceptance_rate"])]
        for result in results
    ]  # fmt: skip
    section("Per pass", ("Draft shape", "Drafting", "Verification", "Draft acceptance rate"), by_pass, left=1)
    left_out = [[one["prompt_id"], one["reason"]] for one in metrics.get("skipped", [])]
    section("Prompts left out", ("Prompt", "Reason"), left_out)
    lines += ["## What the numbers mean", "", _DEFINITIONS, "## How they were made", ""]
    context = {key: value for key, value in metrics.items() if key not in ("results", "baselines", "skipped")}
    context |= context.pop("provenance", {})
    shapes = [(f"shape {result['shape']}", result["shape_config"]) for result in results]
    lines += settings_table([*context.items(), *shapes])
    write_text(path, "\n".join(lines) + "\n")


def _rows(metrics: dict[str, Any]) -> list[list[str]]:
    """Of the draft shapes, then of the baselines."""
    rows = []
    for one in [*metrics["results"], *metrics.get("baselines", [])]:
        if "shape" in one:
            rates = [_number(one["tokens_per_second"][kind], 1) for kind in ("speculative", "plain")]
            row = [one["shape"], str(one["prompts"]), _interval(one["acceptance_length"]), *rates]
        else:
            row = [one["baseline"], "", "-", _number(one["tokens_per_second"], 1), ""]
        compared = one["compared_outputs"]
        same = f"{one['identical_outputs']} of {compared}" if compared else "not compared"
        rows.append([*row, _speed(one), same])
    return rows


def _notes(metrics: dict[str, Any]) -> list[str]:
    return few_prompts(min(result["prompts"] for result in metrics["results"]))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(part: dict[str, Any]) -> str:
    return _interval({"mean": part["speedup"], **part["speedup_interval"]} if part["speedup_interval"] else None, "x")


def _interval(value: dict[str, Any] | None, unit: str = "") -> str:
    return "-" if value is None else bracketed(value["mean"], value["low"], value["high"], "{:.2f}".format, unit)


def plot(metrics: dict[str, Any], path: Path | str) -> None:
    """Draw acceptance length, acceptance by position and speed as a PNG at ``path``, whole or not at all."""
    results = metrics["results"]
    names = [label(result["shape"], 20) for result in results]
    figure = Figure(figsize=(15, max(4.8, 1.8 + 0.9 * len(names))), dpi=120, layout="constrained")
    lengths, positions, speeds = figure.subplots(1, 3)
    for row, result in enumerate(results):
        look = style(row)
        mean, low, high = result["acceptance_length"].values()
        bar = None if low is None else [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        lengths.errorbar([mean], [row], xerr=bar, capsize=4, markersize=7, **look)
        lengths.annotate(f"{mean:.2f}", (mean, row), (0, 8), textcoords="offset points", ha="center")
        joint = result["accepted_per_position"]["joint"]
        if joint:  # the layout engine goes astray over an empty line
            positions.plot(range(1, len(joint) + 1), joint, clip_on=False, zorder=3, **look)
        own, plain = result["tokens_per_second"].values()
        speedup = "" if result["speedup"] is None else f"  ({result['speedup']:.2f}x)"
        _bar(speeds, row - 0.19, own, f"{own:,.1f}{speedup}", look["color"])
        _bar(speeds, row + 0.19, plain, "plain not measured" if plain is None else f"{plain:,.1f} plain", GREY)
    lengths.axvline(1, color=GREY, linestyle=":")
    lengths.set(title="Acceptance length", xlabel="tokens per target pass, bonus token included (bars: 95 %)")
    lengths.margins(x=0.12)
    positions.set(
        title="Acceptance by draft position", xlabel="draft position k", ylabel="share of passes with k accepted"
    )
    positions.set_ylim(0, 1)
    positions.xaxis.set_major_locator(MaxNLocator(integer=True))
    speeds.set(title="Speed", xlabel="tokens per second (x: times plain decoding)")
    speeds.set_xlim(0, max(1e-9, speeds.get_xlim()[1]) * 1.35)  # room for the numbers at the ends
    for axes in (lengths, speeds):
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    for axes in (lengths, positions, speeds):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def _bar(axes: Axes, row: float, rate: float | None, text: str, colour: str) -> None:
    axes.barh(row, rate or 0, height=0.34, color=colour)
    axes.annotate(text, (rate or 0, row), (4, 0), textcoords="offset points", va="center")
