"""``report.md``: one table of all conditions and drafters, and what its numbers mean."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.markdown import bracketed, few_prompts, settings_table, table
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED
from specdec.files import write_text

_DEFINITIONS = f"""\
- **AL**: acceptance length, tokens committed per target pass, the bonus token included, pooled over passes.
- **AL kept**: it over the clean run's, on the same prompts. It cannot fall below the clean length's inverse, since
  every pass commits a token.
- **Drafts kept**: accepted drafts per pass (AL - 1) over the clean run's. 0 % means that no draft is accepted any more.
- **Difference**: what one drafter keeps less what the first one keeps, in points of a percent, each of its own clean
  run. Below zero the condition hurts it more than the first.
- **Brackets**: {METHOD}, the same prompts for all that is compared, {RESAMPLES:,} resamples, seed {SEED}. Of twenty
  intervals one misses the truth by chance.
- **Means** weigh their conditions alike, on the prompts that all of them have.
- Prompts that a condition leaves as they are, or that cannot be decoded under it, are not counted; `left_out` in
  `robustness.json` names them.
"""


def write_report(
    path: Path | str, records: Sequence[dict[str, Any]], compared: dict[str, Any] | None, figure: str
) -> None:
    """Write the report.

    Args:
        records: of every drafter.
        compared: what :func:`specdec.robustness.record.comparison` made of several.
        figure: its path relative to the report.
    """
    headings, rows = overview(records, compared)
    lines = ["# Robustness", "", *table(headings, rows), ""]
    lines += [f"{note}\n" for note in few_prompts(len(records[0]["prompts"]))]
    lines += [f"![What is kept under every condition]({figure})", ""]
    if skipped := _skipped(records[0]):
        lines += ["## Not measured", "", *table(["Condition", "Reason"], skipped, left=2), ""]
    if left_out := list(records[0]["conditions"][0]["left_out"].items()):
        lines += ["## Prompts left out of all", "", *table(["Prompt", "Reason"], left_out, left=2), ""]
    lines += ["## What the numbers mean", "", _DEFINITIONS, "## How they were made", ""]
    own = {f"drafter {one['drafter']['label']}": one["drafter"] for one in records}
    context = own | {name: records[0][name] for name in ("target", "settings")} | records[0]["provenance"]
    write_text(path, "\n".join([*lines, *settings_table(context.items())]) + "\n")


def print_report(records: Sequence[dict[str, Any]], compared: dict[str, Any] | None, console: Console) -> None:
    """Show the table on the terminal."""
    headings, rows = overview(records, compared)
    shown = Table(title="Robustness", caption="AL counts the bonus token; brackets: 95 %")
    for index, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if 0 < index < len(headings) - 1 else "left")
    for row in rows:
        shown.add_row(*[Text(text) for text in row])
    console.print(shown)
    for name, reason in _skipped(records[0]):
        console.print(Text(f"not measured: {name}: {reason}"))
    for note in few_prompts(len(records[0]["prompts"])):
        console.print(Text(note), style="yellow")


def overview(records: Sequence[dict[str, Any]], compared: dict[str, Any] | None) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table: clean, every measured condition, and the means."""
    headings = ["Condition"]
    for one in records:
        of = f"{one['drafter']['label']}: " if len(records) > 1 else ""
        headings += [f"{of}AL", f"{of}AL kept", f"{of}drafts kept"]
    differences = compared["differences"] if compared else []
    for one in differences:
        headings += [f"{one['drafter']} - {one['less']}: {what} kept" for what in ("AL", "drafts")]
    rows = [
        _row(
            own[0]["title"],
            own,
            [_named(one["conditions"], own[0]["name"]) for one in differences],
            [str(own[0]["measured_prompts"]), _note(own[0])],
        )
        for own in zip(*(one["conditions"] for one in records), strict=True)
        if own[0]["skipped"] is None
    ]
    for own in zip(*(one["means"] for one in records), strict=True):
        means = [_named(one["means"], own[0]["name"]) for one in differences]
        rows.append(_row(f"mean: {own[0]['name']}", own, means, ["", f"of {own[0]['conditions']} conditions"]))
    return [*headings, "Prompts", "Note"], rows


def _row(
    title: str, own: Iterable[dict[str, Any]], differences: Iterable[dict[str, Any] | None], last: list[str]
) -> list[str]:
    cells = [title]
    for one in own:
        length = one.get("acceptance_length")
        cells += [_interval(length, "{:.2f}", 1) if length else ""]
        cells += [_interval(one[share], "{:.0f}", 100, " %") for share in ("length_kept", "drafts_kept")]
    for other in differences:
        cells += [_interval(other[share], "{:+.0f}", 100) if other else "" for share in ("length_kept", "drafts_kept")]
    return cells + last


def _named(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((one for one in rows if one["name"] == name), None)


def _note(condition: dict[str, Any]) -> str:
    parts = [condition["note"]] if condition["note"] else []
    if condition["left_out"] and condition["name"] != "clean":
        parts.append(f"{len(condition['left_out'])} prompts left out")
    if compared := condition["compared_outputs"]:
        parts.append(f"{condition['identical_outputs']} of {compared} outputs identical to plain decoding")
    return "; ".join(parts)


def _skipped(record: dict[str, Any]) -> list[list[str]]:
    return [[one["title"], one["skipped"]] for one in record["conditions"] if one["skipped"] is not None]


def _interval(value: dict[str, Any] | None, form: str, scale: float, unit: str = "") -> str:
    if value is None:
        return "-"
    return bracketed(value["mean"], value["low"], value["high"], lambda each: form.format(scale * each), unit)
