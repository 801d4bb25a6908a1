"""What all figures share: pages, rows with intervals, lines, legends.

Arms are told apart by marker and line as well as by colour, so that a print in grey is read as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.evaluation.style import GREY, LINES, escape, label, short, style
from specdec.files import staged

MOST_TOGETHER = 6  # lines of one panel; more get panels of their own
_NAME, _LONGEST, _LEGEND = 34, 60, 130  # letters


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


def page(width: float, height: float) -> Figure:
    """An empty page, in inches."""
    figure = Figure(figsize=(width, height), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the PNG, whole or not at all."""
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def dots(panels: Sequence[tuple[str, Sequence[Row]]], axis: str, path: Path, at: float | None = None) -> None:
    """Rows with intervals, panel beside panel; all panels have the same rows.

    Args:
        axis: the horizontal axis' label, with its unit.
        at: where a line for «no difference» stands.
    """
    columns = min(3, len(panels))
    deep = -(-len(panels) // columns)
    names = [label(row.name, _NAME, 2) for row in panels[0][1]]
    lines = sum(1.15 + 0.55 * name.count("\n") for name in names)
    figure = page(3.2 + 3.4 * columns, deep * (1.15 + 0.34 * lines))
    grid = figure.subplots(deep, columns, sharey=True, squeeze=False)
    for number, (title, rows) in enumerate(panels):
        axes = grid[number // columns][number % columns]
        for place, row in enumerate(rows):
            _dot(axes, place, row)
        if at is not None:
            axes.axvline(at, color=GREY, linestyle="--", linewidth=1, zorder=0)
        axes.set_title(short(title, 44), fontsize=10)
        axes.set_xlabel(axis)
        axes.margins(x=0.12)
        tidy(axes)
    for spare in range(len(panels), deep * columns):
        grid[spare // columns][spare % columns].set_visible(False)
    for row_of in grid:
        row_of[0].set_yticks(range(len(names)), names)
        row_of[0].set_ylim(len(names) - 0.4, -0.6)
    save(figure, path)


def _dot(axes: Axes, place: int, row: Row) -> None:
    look = style(place)
    if row.value is None:
        axes.annotate(row.note or "not measured", (0.5, place), xycoords=("axes fraction", "data"), ha="center", va="center")
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
    return style(row) | {"linestyle": LINES[(row // 2) % len(LINES)], "markersize": 5, "linewidth": 1.5}


def legend(figure: Figure, names: Sequence[str], looks: Sequence[dict[str, Any]], more: Sequence[Line2D] = ()) -> None:
    """Below the panels."""
    handles = [Line2D([], [], label=short(name, _LONGEST), **look) for name, look in zip(names, looks, strict=True)]
    handles += more
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), _LEGEND // (longest + 8)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=3)


def legend_height(names: Sequence[str], width: float) -> float:
    """Inches that the legend of these names takes, about."""
    columns = max(1, min(len(names), _LEGEND // (max(min(len(name), _LONGEST) for name in names) + 8)))
    return 0.2 * -(-len(names) // columns) + 0.25


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


__all__ = ["MOST_TOGETHER", "Row", "dots", "escape", "legend", "legend_height", "line_style", "page", "panels", "save", "tidy"]
