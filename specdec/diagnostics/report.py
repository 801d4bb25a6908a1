"""What the diagnostics' reports have in common: figures with intervals, and tables for Markdown and the terminal.

Legend: P prompts, C sums and weights in turn.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED, Array, Statistic, interval, ratio
from specdec.evaluation.style import bracketed, settings_table, table
from specdec.utils.files import staged, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = dict[str, float | None]
"""``mean``, ``low`` and ``high``; None where they are not defined."""


def measured(sums_PC: Array, of: Statistic = ratio) -> Measured:
    """A statistic over prompts with its interval; prompts whose weights are all zero say nothing.

    There is no interval where the statistic is not defined without one of the prompts, or for some resample.
    """
    sums_PC = sums_PC[(sums_PC[:, 1::2] > 0).any(1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        if not len(sums_PC) or not np.isfinite(mean := float(of(sums_PC.sum(0)))):
            return {"mean": None, "low": None, "high": None}
        found = interval(sums_PC, of) if np.isfinite(of(sums_PC.sum(0) - sums_PC)).all() else None
    if found is None or found.low is None or found.high is None or not np.isfinite(found.low + found.high):
        return {"mean": mean, "low": None, "high": None}
    return found._asdict()


def shown(one: Mapping[str, Any] | None, number: Callable[[float], str], unit: str = "") -> str:
    """What :func:`measured` gives as text: the mean, and the interval in brackets."""
    if one is None or one["mean"] is None:
        return "-"
    return bracketed(one["mean"], one["low"], one["high"], number, unit)


def whiskers(one: Mapping[str, Any]) -> tuple[float, float]:
    """How far the interval reaches below and above the mean; nowhere without one."""
    if one["mean"] is None or one["low"] is None:
        return 0.0, 0.0
    return max(0.0, one["mean"] - one["low"]), max(0.0, one["high"] - one["mean"])


class ReportTable(NamedTuple):
    """Rows of text under a title; the first ``left`` columns are aligned left."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def write_report(
    path: Path, title: str, lead: Sequence[str], figure: str, tables: Sequence[ReportTable], context: Mapping[str, Any]
) -> None:
    """Write ``report.md``: paragraphs, the figure, the tables that have rows, and how it all was made."""
    lines = [f"# {title}", "", *(f"{line}\n" for line in lead), f"![{title}]({figure})", ""]
    for one in (one for one in tables if one.rows):
        lines += [f"## {one.title}", "", *table(one.headings, one.rows, one.left), ""]
    lines += [f"Brackets: {METHOD}, {RESAMPLES:,} resamples, seed {SEED}.", "", "## How it was made", ""]
    write_text(path, "\n".join([*lines, *settings_table(context.items())]) + "\n")


def print_report(tables: Sequence[ReportTable], notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Show the same tables on the terminal, and notes below them."""
    console = console or Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    for one in (one for one in tables if one.rows):
        printed = Table(title=one.title, title_justify="left")
        for column, heading in enumerate(one.headings):
            printed.add_column(heading, justify="left" if column < one.left else "right")
        for row in one.rows:
            printed.add_row(*map(Text, row))
        console.print(printed)
    for note in notes:
        console.print(Text(note))


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")
