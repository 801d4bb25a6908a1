"""Shows people what ``metrics.json`` of an evaluation holds: notes, tables and a picture."""

from pathlib import Path
from typing import Any

from specdec.evaluation.metrics import answer_warnings
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.suites import suite_notes
from specdec.report.plots import (
    GREY,
    Panel,
    PaperFigure,
    Point,
    label,
    paper_style,
    save_figure,
    shifts,
    style,
)
from specdec.report.tables import ReportTable, few_prompts, format_interval

Json = dict[str, Any]


def evaluation_notes(metrics: Json) -> list[str]:
    """Return what is to be said of the tables."""
    results = metrics["results"]
    notes = [
        "Acceptance length counts the bonus token; docs/metrics.md defines all figures. "
        "Loops: answers that repeat themselves, which flatters acceptance."
    ]
    for result in results:
        notes += answer_warnings(f"Warning: {result['shape']}", result)
    notes += few_prompts(min(result["prompts"] for result in results))
    notes += override_notes([metrics.get("drafter", {})])
    if points := metrics.get("provenance", {}).get("continued_after_prompts"):
        after = " and ".join(f"{point:,}" for point in points)
        notes.append(
            f"Interrupted after {after} prompts and continued: times come from several processes."
        )
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
    regions = [
        [
            result["shape"],
            region,
            str(part["prompts"]),
            f"{part['tokens_share']:.0%}",
            format_length(part),
        ]
        for result in results
        for region, part in result.get("by_region", {}).items()
    ]
    of_region = ["Draft shape", "Where a pass begins", "Prompts", "Tokens", "Acceptance length"]
    of_position = ["Draft shape", "Position k", "Joint", "Conditional"]
    of_category = ["Draft shape", "Category", "Prompts", "Acceptance length", "Speed-up"]
    skipped = [[prompt["prompt_id"], prompt["reason"]] for prompt in metrics.get("skipped", [])]
    return [
        ReportTable("Results", headings, rows),
        ReportTable("Acceptance by position", of_position, positions),
        ReportTable("By category", of_category, categories, left=2),
        ReportTable("By region of the answer", of_region, regions, left=2),
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


CAPTION = (
    "Acceptance by draft position, acceptance length and speed of each draft shape, with 95 % intervals over prompts. "
    "Each shape has one color and marker in all panels. Dashed: a target pass without drafts, and plain decoding."
)
PLAIN = "plain decoding"


@paper_style()
def plot(metrics: Json, path: Path) -> None:
    """Draw acceptance by position, acceptance length and speed: see :func:`save_figure`."""
    results = metrics["results"]
    baselines = metrics.get("baselines", [])
    plain = _plain_rate(results)
    names = [result["shape"] for result in results]
    names += [baseline["baseline"] for baseline in baselines] + [PLAIN] * (plain is not None)
    labels = [label(name, 20) for name in names]
    lines = sum(1 + name.count("\n") for name in labels)
    paper = PaperFigure(3, 3, max(2.2, 0.7 + 0.15 * lines))
    _plot_positions(paper.curves("Acceptance by position", PASSES, "draft position k"), results)
    lengths = paper.dots("Acceptance length", "tokens per target pass", "draft shape", labels, 1.0)
    for row, result in enumerate(results):
        length = Point.of(result["acceptance_length"])
        lengths.dot("drafting", result["shape"], row, length, style(row))
    speeds = paper.dots(
        "Speed",
        "tokens per second",
        "draft shape",
        [""] * len(names),
        plain.value if plain else None,
    )
    for row, result in enumerate(results):
        speeds.dot("drafting", result["shape"], row, _rate(result, "speculative"), style(row))
    look = {"color": GREY, "marker": "o"}
    for row, baseline in enumerate(baselines, start=len(results)):
        rate = Point(baseline["tokens_per_second"], **baseline["tokens_per_second_interval"])
        speeds.dot("baseline", baseline["baseline"], row, rate, look)
    if plain is not None:
        speeds.dot(PLAIN, PLAIN, len(names) - 1, plain, look)
    save_figure(paper, path)


PASSES = "share of passes with at least k accepted"


def _plot_positions(panel: Panel, results: list[Json]) -> None:
    places = shifts(len(results))
    for row, (result, shift) in enumerate(zip(results, places, strict=True)):
        shares = result["accepted_per_position"]["joint"]
        ends = result["accepted_per_position_interval"]["joint"]
        points = {
            k: Point(share, **interval)
            for k, (share, interval) in enumerate(zip(shares, ends, strict=True), start=1)
        }
        if points:  # the layout engine goes astray over an empty line
            panel.curve(result["shape"], points, style(row), shift)
    panel.axes.set_ylim(-0.03, 1.03)


def _rate(result: Json, kind: str) -> Point:
    rate = result["tokens_per_second"][kind]
    return Point(rate or 0.0, **result["tokens_per_second_interval"][kind])


def _plain_rate(results: list[Json]) -> Point | None:
    """Return the speed of plain decoding, which all shapes are compared with; None where it was not timed."""
    timed = [result for result in results if result["tokens_per_second"]["plain"] is not None]
    return _rate(timed[0], "plain") if timed else None
