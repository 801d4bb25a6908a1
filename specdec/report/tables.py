"""Parts of all reports: tables for Markdown and the terminal, numbers with intervals."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.report.statistics import HOW
from specdec.utils.files import write_text
from specdec.utils.text import printable

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
    figures: Iterable[tuple[str, str]],
    tables: Iterable[ReportTable],
    context: Mapping[str, Any],
) -> None:
    """Write a report in Markdown, whole or not at all: paragraphs, the figures, the tables that have rows.

    Args:
        figures: file in the report's folder, and caption, of each.
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
        figures=figures,
        tables=tables,
        how=HOW,
        settings=ReportTable("", ["Setting", "Value"], rows, left=2),
        markdown_table=markdown_table,
        markdown_text=markdown_text,
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
        printed = Table(title=Text(printable(section.title)), title_justify="left")
        for column, heading in enumerate(section.headings):
            side: Literal["left", "right"] = "left" if column < section.left else "right"
            printed.add_column(Text(printable(heading)), justify=side)
        for row in section.rows:
            printed.add_row(*(Text(printable(cell)) for cell in row))
        console.print(printed)
    for note in notes:
        console.print(Text(printable(note)))


def markdown_table(table: ReportTable) -> str:
    """A Markdown table with the first columns aligned left, numbers right."""
    rule = ["---" if index < table.left else "---:" for index in range(len(table.headings))]
    rows = (table.headings, rule, *table.rows)
    return "\n".join(f"| {' | '.join(_inline(text) for text in row)} |" for row in rows)


def markdown_text(text: str) -> str:
    """Return foreign text on one line of Markdown that shows it as it is: no tag, link, picture, style, block or end of
    a cell, and nothing that a terminal obeys."""
    return _BLOCK.sub(r"\1\\", _inline(text))


def _inline(text: str) -> str:
    """The same for a place that begins no line."""
    plain = _SYNTAX.sub(
        lambda match: _NAMED.get(match[0]) or f"&#{ord(match[0])};", printable(text)
    )
    return " ".join(plain.replace("\\", "\\\\").replace("|", "\\|").split())


# an underscore within a word is text
_SYNTAX = re.compile(r"(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|\*(?=\S)|[&<`~]")
_NAMED = {"&": "&amp;", "<": "&lt;"}
# behind what a backslash goes: a number of a list; nothing where another list, a heading, a quote or a rule begins
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?: |$))|(?=#{1,6}(?: |$)|[-+*](?: |$)|-[- ]*$|>))")


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
