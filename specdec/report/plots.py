"""The look of all figures, and the files that each becomes.

A figure is 3.3 in wide (one column of a paper) or 6.9 in (two), so that its text has 7 to 8 pt in print. Every point is
drawn with its 95 % interval, and the axis holds both ends. What is drawn is also what the CSV file lists.
"""

import contextlib
import csv
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from PIL import Image

from specdec.utils.files import staged

SINGLE = 3.3
"""Width of a paper's column in inches."""
DOUBLE = 6.9
"""Width of a page of two columns in inches."""
TITLE_SIZE = 8  # points
TEXT_SIZE = 7
CHARACTERS = 21  # of an inch of text, about
NARROWEST = 8  # characters of a line
BESIDE_CURVES = 0.4  # inches that numbers and a label take
BESIDE_ROWS = 0.4  # and beside names of rows
LINE_HEIGHT = 0.125  # inches
LINE_SPACING = 1.0  # of the font's own, which is wide
# Okabe and Ito's palette without its yellow, distinct for color-blind readers; markers repeat out of step with it
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
LINES = ("-", "--", "-.", ":")
GREY = "#808080"
INK = "#404040"
STYLE = {
    "font.family": ["serif", "DejaVu Sans"],  # the second has the signs that the first lacks
    "font.serif": ["STIXGeneral", "Times New Roman", "Times"],
    "font.size": TEXT_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.titlepad": 4,
    "axes.labelsize": TEXT_SIZE,
    "axes.labelpad": 2,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.35,
    "xtick.labelsize": TEXT_SIZE,
    "ytick.labelsize": TEXT_SIZE,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": TEXT_SIZE,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.2,
    "lines.markeredgewidth": 0.7,
    "figure.dpi": 300,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text that journals accept and editors can change
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
}
PALETTE = 64  # colors of a PNG
# Without dates and versions the same numbers give the same bytes.
TIMELESS = dict.fromkeys(("CreationDate", "Creator", "Producer"))
SUFFIXES = (".png", ".pdf", ".svg", ".csv")


class Point(NamedTuple):
    """A number with its 95 % interval, if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, figure: Mapping[str, Any]) -> Self:
        """Read ``mean`` or ``value``, ``low`` and ``high``."""
        value = figure["mean"] if "mean" in figure else figure["value"]
        return cls(value, figure["low"], figure["high"])

    @property
    def reach(self) -> tuple[float, float]:
        """How far the interval reaches below and above the value; nowhere without one."""
        if self.low is None or self.high is None:
            return 0.0, 0.0
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)


class PlottedRow(NamedTuple):
    """A row of the CSV file. Numbers are in ``unit``; ``x`` is a number or a name of what ``x_unit`` says."""

    panel: str
    series: str
    x: float | str
    x_unit: str
    value: float
    low: float | None
    high: float | None
    unit: str


@contextlib.contextmanager
def paper_style() -> Iterator[None]:
    """Inside, matplotlib draws in the style of all figures."""
    with matplotlib.rc_context(STYLE):
        yield


@dataclass
class Panel:
    """One set of axes; what it draws is added to the rows of its figure.

    Args:
        unit: of the values.
        across: what the places are, as ``draft step``.
    """

    axes: Axes
    title: str
    unit: str
    across: str
    rows: list[PlottedRow]

    def record(self, series: str, place: float | str, point: Point) -> None:
        """Add a row to the CSV file."""
        self.rows.append(PlottedRow(self.title, series, place, self.across, *point, unit=self.unit))

    def curve(
        self, series: str, points: Mapping[Any, Point], look: Mapping[str, Any], shift: float = 0.0,
        hollow_beyond: float = math.inf,
    ) -> None:  # fmt: skip
        """Draw points over their places, with intervals, joined by a line.

        Args:
            points: by place, a number.
            look: matplotlib's color, marker and line style.
            shift: how far right of their places they are drawn, so that intervals do not cover each other.
            hollow_beyond: markers of later places are hollow.
        """
        xs = [place + shift for place in points]
        values = [point.value for point in points.values()]
        ends = [*zip(*(point.reach for point in points.values()), strict=True)]
        faces = ["white" if place > hollow_beyond else look["color"] for place in points]
        unmarked = {"linestyle": "-", **look, "marker": ""}
        self.axes.errorbar(
            xs, values, yerr=ends, elinewidth=0.5, capsize=1, capthick=0.5, **unmarked
        )
        for face in dict.fromkeys(faces):
            of_face = [n for n, other in enumerate(faces) if other == face]
            self.axes.plot(
                [xs[n] for n in of_face], [values[n] for n in of_face], zorder=3,
                **{**look, "linestyle": "", "markerfacecolor": face},
            )  # fmt: skip
        for place, point in points.items():
            self.record(series, place, point)

    def line(self, series: str, values: Mapping[int, float], look: Mapping[str, Any]) -> None:
        """Draw numbers that were not measured, as those of a model, as a line without markers and intervals."""
        self.axes.plot([*values], [*values.values()], **look)
        for place, value in values.items():
            self.record(series, place, Point(value))

    def dot(
        self, series: str, name: str, height: float, point: Point, look: Mapping[str, Any]
    ) -> None:
        """Draw a point with its interval in the row at ``height``; ``name`` is the row's in the CSV file."""
        self.axes.errorbar(
            [point.value], [height], xerr=[[end] for end in point.reach], elinewidth=0.9, capsize=2,
            capthick=0.9, zorder=3, **{**look, "linestyle": ""},
        )  # fmt: skip
        self.record(series, name, point)

    def scale_by_factors(self) -> None:
        """Make the horizontal axis logarithmic, with ticks at 1, 2 and 5 of each decade."""
        self.axes.set_xscale("log")
        self.axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        self.axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        self.axes.xaxis.set_minor_locator(NullLocator())


class PaperFigure:
    """A figure of panels in rows, and the rows of its CSV file.

    Args:
        count: how many panels.
        columns: how many side by side.
        height: of a row of panels, in inches.
        width: of the figure, in inches: :data:`SINGLE` or :data:`DOUBLE`.
        together: whether all panels of a row have the same vertical axis.
    """

    def __init__(
        self, count: int, columns: int, height: float, width: float = DOUBLE, together: bool = False
    ) -> None:
        deep = -(-count // columns)
        self.figure = Figure(figsize=(width, deep * height), layout="constrained")
        grid = self.figure.subplots(deep, columns, squeeze=False, sharey=together)
        self.axes: list[Axes] = [*grid.flat][:count]
        for unused in [*grid.flat][count:]:
            unused.set_visible(False)
        self.columns = columns
        self.together = together
        self.rows: list[PlottedRow] = []
        self._free = iter(self.axes)

    def curves(self, title: str, unit: str, across: str) -> Panel:
        """Return the next panel with both axes labeled: ``across`` below, ``unit`` on the left."""
        panel = self._panel(title, unit, across, BESIDE_CURVES)
        height = panel.axes.get_position().height * self.figure.get_figheight()
        panel.axes.set_xlabel(across)
        panel.axes.set_ylabel(label(unit, int(height * CHARACTERS)), linespacing=LINE_SPACING)
        whole = MaxNLocator(12, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        panel.axes.xaxis.set_major_locator(whole)
        return panel

    def dots(
        self, title: str, unit: str, across: str, names: Sequence[str], null: float | None = None
    ) -> Panel:
        """Return the next panel of rows, with ``unit`` below.

        Args:
            names: of the rows, the first on top, as :func:`label` gives them.
            null: the value of no effect, where a dashed line is drawn.
        """
        longest = max(len(line) for name in ["", *names] for line in name.split("\n"))
        beside = BESIDE_ROWS + longest / CHARACTERS
        beside /= self.columns if self.together else 1
        panel = self._panel(title, unit, across, beside)
        text = label(unit, self._characters(beside))
        panel.axes.set_xlabel(text, linespacing=LINE_SPACING)
        panel.axes.set_yticks(range(len(names)), names, linespacing=LINE_SPACING)
        panel.axes.set_ylim(len(names) - 0.4, -0.6)
        panel.axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        if null is not None:
            panel.axes.axvline(null, color=GREY, linestyle="--", linewidth=0.7, zorder=1)
        return panel

    def _panel(self, title: str, unit: str, across: str, beside: float) -> Panel:
        """Return the next panel with its title; ``beside`` are the inches that its labels take on the left."""
        axes = next(self._free)
        width = self._characters(beside) * TEXT_SIZE / TITLE_SIZE
        text = label(title[:1].upper() + title[1:], int(width))
        axes.set_title(text, linespacing=LINE_SPACING)
        return Panel(axes, title, unit, across, self.rows)

    def _characters(self, beside: float) -> int:
        """Return how many characters fit below a panel."""
        return int((self.figure.get_figwidth() / self.columns - beside) * CHARACTERS)

    def legend(self, handles: Sequence[Line2D]) -> None:
        """Add a legend below all panels, and make the figure higher by what it takes."""
        widest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, int(self.figure.get_figwidth() / (0.5 + widest / CHARACTERS)))
        lines = -(-len(handles) // columns)
        height = self.figure.get_figheight() + 0.08 + (LINE_HEIGHT + 0.03) * lines
        self.figure.set_figheight(height)
        self.figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def save_figure(figure: PaperFigure, path: Path) -> None:
    """Write a figure as PNG, PDF and SVG, and its numbers as CSV, each whole or not at all.

    Args:
        path: of the PNG; the other files have the same name and their own suffix.
    """
    with paper_style():
        layout = figure.figure.get_layout_engine()
        assert layout is not None, "a figure of panels is laid out"
        layout.execute(figure.figure)
        figure.figure.set_layout_engine("none")  # the same in all formats
        with staged(path) as temporary:
            _write_png(figure.figure, temporary)
        with staged(path.with_suffix(".pdf")) as temporary:
            FigureCanvasPdf(figure.figure).print_pdf(temporary, metadata=TIMELESS)
        with staged(path.with_suffix(".svg")) as temporary:
            FigureCanvasSVG(figure.figure).print_svg(temporary, metadata={"Date": None})
    with (
        staged(path.with_suffix(".csv")) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(PlottedRow._fields)
        writer.writerows(figure.rows)


def _write_png(figure: Figure, path: Path) -> None:
    """Write a PNG with a palette of its colors, which makes a drawing of lines a third as large."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    reduced = drawn.quantize(PALETTE, dither=Image.Dither.NONE)
    reduced.save(path, format="PNG", dpi=(figure.dpi, figure.dpi), optimize=True)


def figure_files(name: str) -> list[str]:
    """Return the names of the files that a figure becomes, of the name of its PNG."""
    return [str(Path(name).with_suffix(suffix)) for suffix in SUFFIXES]


def style(row: int) -> dict[str, Any]:
    """Color and marker of a series."""
    return {"color": COLORS[row % len(COLORS)], "marker": MARKERS[row % len(MARKERS)]}


def shifts(count: int, most: float = 0.15, width: float = 0.6) -> list[float]:
    """Where each of several series is drawn around its place, so that intervals do not cover each other.

    Args:
        most: between two series.
        width: of all, where places are 1 apart.
    """
    step = min(most, width / count)
    return [step * (number - (count - 1) / 2) for number in range(count)]


def label(name: str, width: int, lines: int = 3) -> str:
    """The name on lines of about equal length, of at most ``width`` characters each."""

    def wrapped(most: int) -> list[str]:
        return textwrap.wrap(
            name, most, break_on_hyphens=False, max_lines=lines, placeholder=" ..."
        )

    width = max(width, NARROWEST)
    needed = wrapped(width)
    narrowest = max([NARROWEST, *map(len, name.split())])
    while width > narrowest and len(wrapped(width - 1)) == len(needed) < lines:
        width -= 1
    return escape("\n".join(wrapped(width)))


def short_label(name: str, longest: int) -> str:
    """The name on one line."""
    return escape(name if len(name) <= longest else f"{name[: longest - 4]} ...")


def escape(text: str) -> str:
    """A dollar sign would start mathematics, and a leading underscore hides a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
