"""Parts of all reports: tables for Markdown and the terminal, figures with intervals, colors of figures."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.report.statistics import HOW
from specdec.utils.files import staged, write_text
from specdec.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOPING_SHARE = 0.05  # of the answers that repeat themselves; from here on a report warns
FEW_PROMPTS = 10  # below this the tail of acceptance over prompts shows in the intervals


# names of templates are paths in the package
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parents[1]),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class ReportTable(NamedTuple):
    """Rows of text under a title; the first ``left`` columns are aligned left."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def write_report(
    path: Path,
    title: str,
    lead: Iterable[str],
    figure: str,
    tables: Iterable[ReportTable],
    context: Mapping[str, Any],
) -> None:
    """Write a report in Markdown, whole or not at all: paragraphs, the figure, the tables that have rows.

    Args:
        figure: the picture's path relative to the report's folder; the empty string for none.
        context: how it all was made; values that are no text are written as JSON.
    """
    rows = [
        [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        for key, value in context.items()
    ]
    template = TEMPLATES.get_template("report/report.md.jinja")
    text = template.render(
        title=title,
        lead=lead,
        figure=figure,
        tables=tables,
        how=HOW,
        settings=ReportTable("", ["Setting", "Value"], rows, left=2),
        markdown_table=markdown_table,
    )
    write_text(path, text)


def print_report(
    tables: Iterable[ReportTable], notes: Iterable[str] = (), console: Console | None = None
) -> None:
    """Show the tables that have rows on the terminal, and notes below them."""
    console = console or Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    for section in tables:
        if not section.rows:
            continue
        printed = Table(title=section.title, title_justify="left")
        for column, heading in enumerate(section.headings):
            printed.add_column(heading, justify="left" if column < section.left else "right")
        for row in section.rows:
            printed.add_row(*(Text(printable(cell)) for cell in row))
        console.print(printed)
    for note in notes:
        console.print(Text(printable(note)))


def markdown_table(table: ReportTable) -> str:
    """A Markdown table with the first columns aligned left, numbers right."""
    rule = ["---" if index < table.left else "---:" for index in range(len(table.headings))]
    rows = (table.headings, rule, *table.rows)
    return "\n".join(f"| {' | '.join(cell(text) for text in row)} |" for row in rows)


def cell(text: str) -> str:
    """Return the text on one line, with nothing that would end the cell."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def with_interval(
    mean: Any, low: Any, high: Any, number: Callable[[Any], str], unit: str = ""
) -> str:
    """A figure with its interval in brackets, if it has one; the unit stands behind the figure alone."""
    if low is None:
        return f"{number(mean)}{unit}"
    return f"{number(mean)}{unit} [{number(low)}, {number(high)}]"


def format_interval(
    figure: Mapping[str, Any] | None, number: Callable[[float], str], unit: str = ""
) -> str:
    """``mean``, ``low`` and ``high`` as :func:`with_interval`; a dash where there is no mean."""
    if figure is None or figure["mean"] is None:
        return "-"
    return with_interval(figure["mean"], figure["low"], figure["high"], number, unit)


def few_prompts(prompts: int) -> list[str]:
    """Say what intervals over this many prompts are worth, where that needs saying."""
    if prompts == 1:
        return ["No interval: that over prompts takes at least 2, and there was 1."]
    if 1 < prompts < FEW_PROMPTS:
        return [
            f"Intervals from {prompts} prompts are wide, and hold a little less than 95 %: take at least {FEW_PROMPTS}."
        ]
    return []


# Okabe and Ito's palette without its yellow, distinct for color-blind readers; markers repeat out of step with it
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
LINES = ("-", "--", "-.", ":")
GREY = "#9A9A9A"


def style(row: int) -> dict[str, Any]:
    """Color and marker of a row."""
    return {"color": COLOURS[row % len(COLOURS)], "marker": MARKERS[row % len(MARKERS)]}


def whiskers(figure: Mapping[str, Any]) -> tuple[float, float]:
    """How far the interval reaches below and above the mean; nowhere without one."""
    if figure["mean"] is None or figure["low"] is None:
        return 0.0, 0.0
    return max(0.0, figure["mean"] - figure["low"]), max(0.0, figure["high"] - figure["mean"])


def label(name: str, width: int, lines: int = 3) -> str:
    """The name on lines short enough for the space next to the axis."""
    wrapped = textwrap.wrap(
        name, width, break_on_hyphens=False, max_lines=lines, placeholder=" ..."
    )
    return escape("\n".join(wrapped))


def short_label(name: str, longest: int) -> str:
    """The name on one line."""
    return escape(name if len(name) <= longest else f"{name[: longest - 4]} ...")


def escape(text: str) -> str:
    """A dollar sign would start mathematics, and a leading underscore hides a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")
