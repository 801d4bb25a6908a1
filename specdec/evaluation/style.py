"""How figures tell their rows apart, in grey too, and how names stand in them."""

import textwrap
from typing import Any

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
