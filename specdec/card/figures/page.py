"""What all figures share: pages, rows with intervals, lines, legends.

Arms are told apart by marker and line as well as by colour, so that a print in grey is read as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.evaluation.style import GREY, LINES, label, short, style
from specdec.files import staged

MOST_TOGETHER = 6  # lines of one panel; more get panels of their own
_NAME, _LONGEST = 34, 70  # letters
_LETTERS = 12.5  # of a legend, an inch


class Row(NamedTuple):
    """A figure with its interval, on a line of its own."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    filled: bool = True
    single: tuple[float, ...] = ()
    """Each seed's own, drawn small."""
    note: str = ""
    look: int | None = None
    """Number of its colour and marker, if not that of its line: an arm looks alike in all figures."""


class Panel(NamedTuple):
    """Rows with a horizontal axis."""

    title: str
    rows: Sequence[Row]
    axis: str
    """Its label, with the unit."""
    at: float | None = None
    """Where a line for «no difference» stands."""


def page(width: float, height: float) -> Figure:
    """An empty page, in inches."""
    figure = Figure(figsize=(width, height), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the PNG, whole or not at all."""
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def dots(panels: Sequence[Panel], path: Path, same: bool = False) -> None:
    """Rows with intervals, panel beside panel; all panels have the same rows.

    Args:
        same: the panels have one horizontal axis.
    """
    columns = min(3, len(panels))
    deep = -(-len(panels) // columns)
    names = [label(row.name, _NAME, 4) for row in panels[0].rows]
    lines = sum(1.15 + 0.55 * name.count("\n") for name in names)
    figure = page(3.2 + 3.4 * columns, deep * (1.15 + 0.34 * lines))
    grid = figure.subplots(deep, columns, sharey=True, sharex=same, squeeze=False)
    for number, (title, rows, axis, at) in enumerate(panels):
        axes = grid[number // columns][number % columns]
        for place, row in enumerate(rows):
            _dot(axes, place, row)
        if at is not None:
            axes.axvline(at, color=GREY, linestyle="--", linewidth=1, zorder=0)
        axes.set_title(label(title, 44, 2), fontsize=10)
        axes.set_xlabel(axis)
        axes.tick_params(labelbottom=True)
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=6)
        tidy(axes)
    for spare in range(len(panels), deep * columns):
        grid[spare // columns][spare % columns].set_visible(False)
    for row_of in grid:
        row_of[0].set_yticks(range(len(names)), names)
        row_of[0].set_ylim(len(names) - 0.4, -0.6)
    save(figure, path)


def _dot(axes: Axes, place: int, row: Row) -> None:
    look = style(place if row.look is None else row.look)
    if row.value is None:
        axes.annotate(
            row.note or "not measured", (0.5, place), xycoords=("axes fraction", "data"), ha="center", va="center"
        )
        return
    bar = None if row.low is None or row.high is None else [[row.value - row.low], [row.high - row.value]]
    face = look["color"] if row.filled else "white"
    axes.errorbar([row.value], [place], xerr=bar, capsize=4, markersize=7, elinewidth=1.8, markerfacecolor=face, **look)
    axes.plot(row.single, [place + 0.28] * len(row.single), linestyle="", marker="|", markersize=6, color="#404040")


def tidy(axes: Axes) -> None:
    """No box around the panel; a faint grid."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def line_style(row: int) -> dict[str, Any]:
    """Colour, marker and dashes of a row."""
    return style(row) | {"linestyle": LINES[row % len(LINES)], "markersize": 5, "linewidth": 1.5}


def legend(figure: Figure, names: Sequence[str], looks: Sequence[dict[str, Any]], more: Sequence[Line2D] = ()) -> None:
    """Below the panels, the page's width at most; a name has a line of its own where it needs one."""
    handles = [Line2D([], [], label=short(name, _LONGEST), **look) for name, look in zip(names, looks, strict=True)]
    handles += more
    if handles:
        columns = _columns([str(handle.get_label()) for handle in handles], figure.get_figwidth())
        figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=3
        )


def note(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Above the panels: what stands for the same in all of them."""
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)


def legend_height(names: Sequence[str], width: float) -> float:
    """Inches that the legend of these names takes on a page so wide, about."""
    return 0.2 * -(-(len(names) + 1) // _columns(names, width)) + 0.25


def _columns(names: Sequence[str], width: float) -> int:
    longest = max(min(len(name), _LONGEST) for name in names)
    return max(1, min(len(names), int(width * _LETTERS / (longest + 8))))


def hollow() -> Line2D:
    """For a legend: what a marker without filling means."""
    look: dict[str, Any] = {"color": "#404040", "marker": "o", "markerfacecolor": "white", "linestyle": ""}
    return Line2D([], [], label="beyond the trained depth", **look)


def panels(count: int, height: float = 2.4, most: int = 4, extra: float = 0.5) -> tuple[Figure, list[Axes]]:
    """Panels with the same axes, in rows."""
    columns = min(most, count)
    deep = -(-count // columns)
    figure = page(max(6.4, 3.1 * columns), deep * height + extra)
    grid = figure.subplots(deep, columns, sharex=True, sharey=True, squeeze=False)
    flat = [axes for row in grid for axes in row]
    for spare in flat[count:]:
        spare.set_visible(False)
    for axes in flat[:count]:
        tidy(axes)
    return figure, flat[:count]


def greys(axes: Axes, values: Sequence[Sequence[float | None]], rows: Sequence[str], heads: Sequence[str]) -> None:
    """A table of numbers on greys, the darker the less; a dash for what was not measured."""
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    low = high - 1.6 * (high - low or 1.0)  # no black: the numbers stay black too; white, if all are the same
    shades = [[float("nan") if value is None else value for value in row] for row in values]
    axes.imshow(shades, cmap="Greys_r", vmin=low, vmax=high, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, "-" if value is None else f"{value:#.3g}".rstrip("."), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(heads)), heads, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0)
