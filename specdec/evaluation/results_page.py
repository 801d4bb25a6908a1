"""Shows people what ``metrics.json`` of an evaluation holds: notes and tables."""

from typing import Any

from specdec.evaluation.metrics import answer_warnings
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.suites import suite_notes
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
