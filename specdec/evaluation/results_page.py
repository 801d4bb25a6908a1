"""Shows people what ``metrics.json`` of an evaluation holds: notes, tables and a picture."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec.evaluation.metrics import looping_warning
from specdec.evaluation.suites import suite_notes
from specdec.report.tables import (
    GREY,
    ReportTable,
    few_prompts,
    format_interval,
    label,
    save_figure,
    style,
)

Json = dict[str, Any]


def evaluation_notes(metrics: Json) -> list[str]:
    """Return what is to be said of the tables."""
    results = metrics["results"]
    notes = [
        "Acceptance length counts the bonus token; docs/metrics.md defines all figures. "
        "Loops: answers that repeat themselves, which flatters acceptance."
    ]
    for result in results:
        notes += looping_warning(f"Warning: {result['shape']}", result)
    notes += few_prompts(min(result["prompts"] for result in results))
    suite = metrics.get("settings", {}).get("suite")
    return [*notes, *(suite_notes(suite) if suite else [])]


def evaluation_tables(metrics: Json) -> list[ReportTable]:
    """Return the tables of results, of these by position and by category, and of prompts that were left out."""
    results = metrics["results"]
    speeds = ["Tokens/s", "Plain tokens/s", "Speed-up"]
    headings = [
        "Draft shape",
        "Prompts",
        "Acceptance length",
        *speeds,
        "Identical outputs",
        "Loops",
    ]
    rows = [_result_row(result) for result in results]
    rows += [_baseline_row(baseline) for baseline in metrics.get("baselines", [])]
    positions = [
        [result["shape"], str(k), *(format_number(share, 3) for share in shares)]
        for result in results
        for k, shares in enumerate(
            zip(*result["accepted_per_position"].values(), strict=True), start=1
        )
    ]
    categories = [
        [result["shape"], category, str(part["prompts"]), format_length(part), format_speedup(part)]
        for result in results
        for category, part in result["by_category"].items()
    ]
    of_position = ["Draft shape", "Position k", "Joint", "Conditional"]
    of_category = ["Draft shape", "Category", "Prompts", "Acceptance length", "Speed-up"]
    skipped = [[prompt["prompt_id"], prompt["reason"]] for prompt in metrics.get("skipped", [])]
    return [
        ReportTable("Results", headings, rows),
        ReportTable("Acceptance by position", of_position, positions),
        ReportTable("By category", of_category, categories, left=2),
        skipped_table(skipped),
    ]


def skipped_table(rows: list[list[str]]) -> ReportTable:
    """Return the table of prompts that were left out, each with the reason."""
    return ReportTable("Prompts left out", ["Prompt", "Reason"], rows, left=2)


def _result_row(result: Json) -> list[str]:
    rate = result["tokens_per_second"]
    return [
        result["shape"],
        str(result["prompts"]),
        format_length(result),
        format_number(rate["speculative"], 1),
        format_number(rate["plain"], 1),
        format_speedup(result),
        _identical(result),
        f"{result['looping_answers']} of {result['answers']}",
    ]


def _baseline_row(baseline: Json) -> list[str]:
    rate = format_number(baseline["tokens_per_second"], 1)
    speedup = format_speedup(baseline)
    return [baseline["baseline"], "", "-", rate, "", speedup, _identical(baseline), ""]


def _identical(result: Json) -> str:
    compared = result["compared_outputs"]
    return f"{result['identical_outputs']} of {compared}" if compared else "not compared"


def format_number(number: float | None, digits: int) -> str:
    """Return a number with this many digits, or a dash where there is none."""
    return "-" if number is None else f"{number:.{digits}f}"


def format_length(result: Json) -> str:
    """Return an acceptance length with its interval."""
    return format_interval(result["acceptance_length"], "{:.2f}".format)


def format_speedup(result: Json) -> str:
    """Return a speed-up over plain decoding with its interval, or a dash where plain decoding was not timed."""
    if result["speedup"] is None:
        return "-"
    return format_interval(
        {"mean": result["speedup"], **result["speedup_interval"]}, "{:.2f}".format, "x"
    )


def plot(metrics: Json, path: Path) -> None:
    """Draw acceptance by position and speed as a PNG at ``path``, whole or not at all."""
    results = metrics["results"]
    figure = Figure(figsize=(12, max(4.8, 1.8 + 0.9 * len(results))), dpi=120, layout="constrained")
    positions, speeds = figure.subplots(1, 2)
    _plot_positions(positions, results)
    _plot_speeds(speeds, results)
    for axes in (positions, speeds):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    save_figure(figure, path)


def _plot_positions(axes: Axes, results: list[Json]) -> None:
    for row, result in enumerate(results):
        joint = result["accepted_per_position"]["joint"]
        if joint:  # the layout engine goes astray over an empty line
            axes.plot(range(1, len(joint) + 1), joint, clip_on=False, zorder=3, **style(row))
    axes.set(title="Acceptance by draft position", xlabel="draft position k", ylim=(0, 1))
    axes.set_ylabel("share of passes with at least k accepted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_speeds(axes: Axes, results: list[Json]) -> None:
    """Draw a bar for each shape, above one for plain decoding where that was timed."""
    for row, result in enumerate(results):
        speculative, plain = result["tokens_per_second"].values()
        times = "" if plain is None else f" ({result['speedup']:.2f}x)"
        bars = [(row - 0.19, speculative, style(row)["color"], times)]
        bars += [] if plain is None else [(row + 0.19, plain, GREY, " plain")]
        for place, rate, colour, text in bars:
            bar = axes.barh(place, rate or 0, height=0.34, color=colour)
            axes.bar_label(bar, [f"{rate or 0:,.1f}{text}"], padding=4)
    names = [
        f"{label(result['shape'], 32)}\n{result['acceptance_length']['mean']:.2f} tokens per pass"
        for result in results
    ]
    axes.set(
        title="Speed",
        xlabel="tokens per second (x: times plain decoding)",
        ylim=(len(names) - 0.4, -0.6),
    )
    axes.margins(x=0.35)  # room for the numbers at the ends
    axes.set_yticks(range(len(names)), names)
