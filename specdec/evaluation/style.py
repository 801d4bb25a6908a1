"""What reports have in common: tables of Markdown, figures with intervals, and how rows of a figure are told apart."""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

FEW_PROMPTS = 10  # below this a bootstrap of prompts is noticeably too narrow


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table with the first ``left`` columns aligned left, numbers right."""
    rule = ["---" if index < left else "---:" for index in range(len(headings))]
    return [f"| {' | '.join(cell(text) for text in row)} |" for row in (headings, rule, *rows)]


def settings_table(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """The lines of a table of names and values, those that are no text as JSON."""
    rows = [
        [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)] for key, value in settings
    ]
    return table(["Setting", "Value"], rows, left=2)


def cell(text: str) -> str:
    """On one line, with nothing that would end the cell."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def bracketed(mean: Any, low: Any, high: Any, number: Callable[[Any], str], unit: str = "") -> str:
    """A figure with its interval in brackets, if it has one; the unit stands behind the figure alone."""
    if low is None:
        return f"{number(mean)}{unit}"
    return f"{number(mean)}{unit} [{number(low)}, {number(high)}]"


def few_prompts(prompts: int) -> list[str]:
    """What intervals over so many prompts are worth, where that needs saying."""
    if prompts == 1:
        return ["No interval: resampling prompts takes at least 2, and there was 1."]
    if 1 < prompts < FEW_PROMPTS:
        return [f"Intervals from {prompts} prompts are too narrow: take at least {FEW_PROMPTS}."]
    return []


# Okabe and Ito's palette without its yellow, told apart by the colour-blind; markers repeat out of step with it
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
LINES = ("-", "--", "-.", ":")
GREY = "#9A9A9A"


def style(row: int) -> dict[str, Any]:
    """Colour and marker of a row."""
    return {"color": COLOURS[row % len(COLOURS)], "marker": MARKERS[row % len(MARKERS)]}


def label(name: str, width: int, lines: int = 3) -> str:
    """The name on lines short enough to stand beside the axis."""
    wrapped = textwrap.wrap(name, width, break_on_hyphens=False)
    return escape("\n".join(wrapped[:lines] if len(wrapped) <= lines else [*wrapped[: lines - 1], "..."]))


def short(name: str, longest: int) -> str:
    """The name on one line."""
    return escape(name if len(name) <= longest else f"{name[: longest - 4]} ...")


def escape(text: str) -> str:
    """A dollar sign would start mathematics, and a leading underscore hides a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
