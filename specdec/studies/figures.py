"""The card's figures: numbers of ``card.json`` as PNG files.

A color is a level of one axis, a line or marker one of another, the same in all figures; a legend says which. Arms
go by their levels. An interval that says nothing is pale: a contrast's that holds no difference, an arm's that is
wider than all arms lie apart.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.report.tables import COLOURS, GREY, LINES, MARKERS, label, save_figure
from specdec.studies.outcomes import ACCEPTANCE, FAMILIES, Json
from specdec.studies.study import Contrast

MOST_TOGETHER = 6  # lines of one panel that have error bars
SEPARATOR = " · "
INK = "#404040"
PALE = 0.3


def short_names(arms: Sequence[Json]) -> dict[str, str]:
    """Return the levels of every arm, by its name."""
    return {arm["name"]: SEPARATOR.join(arm["levels"].values()) for arm in arms}


def label_of(row: Json, card: Json) -> str:
    """Return what is compared with what: ``off · 4 - on · 4``, ``norm: on - off (K=4)``, or an interaction."""
    if "outcome" in row:
        fields = ("outcome", "effect", "against", "at", "expect")
        return str(Contrast(*(row[name] for name in fields)))
    if "arm" in row:
        names = short_names(card["arms"])
        return f"{names[row['arm']]} - {names[row['baseline']]}"
    if " x " in row["effect"]:
        return f"{row['effect']}, interaction"
    axis, _, level = row["effect"].partition("=")
    base = next(arm["levels"] for arm in card["arms"] if arm["is_baseline"])
    return f"{axis}: {level} - {base[axis]}"


class _Style:
    """Which axis of the study is the color, which the line and which the marker; and the legend that says so."""

    def __init__(self, card: Json) -> None:
        self.axes: dict[str, Sequence[str]] = card["study"]["axes"]
        first = next(
            (axis for row in card["primary"] for axis in row["effect"]), next(iter(self.axes))
        )
        others = [axis for axis in self.axes if axis != first] or [first]
        line = next((axis for axis in others if len(self.axes[axis]) <= len(LINES)), others[-1])
        marker = next((axis for axis in others if axis != line), line)
        self.of = {
            "color": (first, COLOURS),
            "linestyle": (line, LINES),
            "marker": (marker, MARKERS),
        }
        self.names = short_names(card["arms"])
        self.looks: dict[str, Json] = {
            arm["name"]: {
                key: self._look(key, arm["levels"][axis]) for key, (axis, _) in self.of.items()
            }
            for arm in card["arms"]
        }

    def _look(self, key: str, level: str) -> str:
        axis, known = self.of[key]
        return known[list(self.axes[axis]).index(level) % len(known)]

    def legend(self, lines: bool) -> Iterator[Line2D]:
        """An entry for every level that a look tells; without lines the figure has none."""
        plain = {"color": INK, "linestyle": "-" if lines else "", "marker": "" if lines else "o"}
        for axis, levels in self.axes.items():
            keys = [
                key
                for key, (name, _) in self.of.items()
                if name == axis and (lines or key != "linestyle")
            ]
            for level in levels if keys else ():
                look: Json = plain | {key: self._look(key, level) for key in keys}
                if keys == ["color"] and not lines:
                    look |= {"marker": "", "linestyle": "-", "linewidth": 6}
                yield Line2D([], [], label=label(f"{axis}={level}", 40, 1), markersize=6, **look)


def draw_figures(card: Json, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Draw all that the card has numbers for; return files and captions by the card's section."""
    style = _Style(card)
    out = defaultdict[str, list[tuple[str, str]]](list)
    contrasts = [row for row in card["primary"] if row.get("low") is not None]
    if contrasts:
        _forest(contrasts, card, folder / "primary.png")
        caption = (
            "Primary contrasts with 95 % intervals; pale: not significant after Holm's correction."
        )
        out["Primary contrasts"].append(("primary.png", caption))
    for family in FAMILIES:
        if panels := _family_panels(card, family, style):
            file = f"{family.partition(' ')[0]}.png"
            _dots(panels, style, folder / file)
            caption = (
                f"{family.capitalize()} with 95 % intervals over seeds and prompts, pale where they hold every arm's "
                "value and so tell none apart; the small strokes are the seeds' own."
            )
            dashed = "" if family == ACCEPTANCE else " Dashed: none."
            out[family.capitalize()].append((file, caption + dashed))
    # what is compared at a step or over steps has the curve's title and says at which
    declared = {re.split(", step | at position ", row["quantity"])[0] for row in card["primary"]}
    depths = {arm["name"]: arm["trained_depth"] for arm in card["arms"]}
    for axis, file in (("draft position", "positions.png"), ("draft step", "steps.png")):
        curves = [
            curve
            for curve in card["curves"]
            if curve["axis"] == axis and any(curve["arms"].values())
        ]
        primary = [
            curve for curve in curves if curve["title"].removeprefix("Conditional ") in declared
        ]
        for section, name, caption, panels in (
            ("By draft position and draft step", file, "By", curves),
            ("Primary contrasts", f"primary_{file}", "What primary contrasts are of, by", primary),
        ):
            if panels:
                _curves(panels, style, depths, folder / name)
                out[section].append((name, f"{caption} {axis}, of all prompts and seeds."))
    return out


def _family_panels(card: Json, family: str, style: _Style) -> list[Json]:
    """Return a panel for each figure of a family, with a row for each arm.

    Metrics that differ in their draft steps alone share a panel: here every arm stands for itself.
    """
    panels: dict[str, Json] = {}
    for metric in card["quantities"]:
        if metric["family"] == family:
            panel = metric | {"rows": dict.fromkeys(style.looks)}
            panels.setdefault(metric["panel"], panel)["rows"] |= metric["arms"]
    return list(panels.values())


def _forest(rows: Sequence[Json], card: Json, path: Path) -> None:
    """A panel for every outcome, a line for every contrast."""
    panels: dict[str, list[Json]] = {}
    for row in rows:
        panels.setdefault(row["quantity"], []).append(row)
    most = max(map(len, panels.values()))
    figure, grid = _grid(len(panels), 5.2, 1.15 + 0.5 * most, 0.2)
    for axes, (name, panel) in zip(grid, panels.items(), strict=True):
        for place, row in enumerate(panel):
            axes.errorbar(row["value"], place, xerr=_ends(row), capsize=4, markersize=7, elinewidth=1.8, marker="o",
                          color=INK, alpha=PALE if row["verdict"] == "not significant" else 1.0)  # fmt: skip
        axes.margins(x=0.12)
        _rows(axes, [label(label_of(row, card), 32) for row in panel], 0.0)
        axes.set_ylim(most - 0.5, -0.5)
        _describe(axes, name, "difference")
    save_figure(figure, path)


def _dots(panels: Sequence[Json], style: _Style, path: Path) -> None:
    """Rows with intervals, panel next to panel; all panels have the same rows."""
    names = [label(style.names[name], 34) for name in style.looks]
    tall = 1.15 + 0.34 * sum(1.15 + 0.55 * name.count("\n") for name in names)
    left = 0.5 + 0.08 * max(len(line) for name in names for line in name.split("\n"))
    figure, grid = _grid(len(panels), 3.4, tall, left, sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        values = [row["value"] for row in panel["rows"].values() if row]
        shown = values if panel["null"] is None else [*values, panel["null"]]
        for place, (name, row) in enumerate(panel["rows"].items()):
            if row is None:
                axes.annotate(
                    "not measured",
                    (0.5, place),
                    xycoords=("axes fraction", "data"),
                    ha="center",
                    va="center",
                )
                continue
            look = style.looks[name] | {"linestyle": ""}
            seeds = [*row["by_seed"].values()]
            pale = (
                len(values) > 1
                and row["low"] is not None
                and row["low"] < min(values) <= max(values) < row["high"]
            )
            axes.plot(row["value"], place, markersize=7, **look)
            axes.errorbar(row["value"], place, xerr=_ends(row), capsize=4, elinewidth=1.8, zorder=1,
                          alpha=PALE if pale else 1.0, **look | {"marker": ""})  # fmt: skip
            axes.plot(
                seeds,
                [place + 0.28] * len(seeds),
                linestyle="",
                marker="|",
                markersize=6,
                color=INK,
            )
            ends = [] if pale or row["low"] is None else [row["low"], row["high"]]
            shown = [*shown, *seeds, *ends]
        if room := 0.12 * (max(shown) - min(shown)):  # a pale interval may run off the panel
            axes.set_xlim(min(shown) - room, max(shown) + room)
        _rows(axes, names, panel["null"])
        axes.set_ylim(len(names) - 0.4, -0.6)
        _describe(axes, panel["panel"], panel["unit"])
    _legend(figure, [*style.legend(lines=False)])
    save_figure(figure, path)


def _rows(axes: Axes, names: Sequence[str], null: float | None) -> None:
    """Name the rows of a panel, and draw a line at the value of no effect."""
    axes.set_yticks(range(len(names)), names)
    axes.locator_params(axis="x", nbins=6)
    if null is not None:
        axes.axvline(null, color=GREY, linestyle="--", linewidth=1, zorder=0)


def _curves(panels: Sequence[Json], style: _Style, depths: Mapping[str, int], path: Path) -> None:
    """Lines with intervals, hollow beyond the trained depth; a legend below all panels."""
    figure, grid = _grid(len(panels), 3.9 if len(panels) > 1 else 7.0, 2.9, 0.4)
    for axes, panel in zip(grid, panels, strict=True):
        bars = len(panel["arms"]) <= MOST_TOGETHER
        for number, (name, points) in enumerate(panel["arms"].items()):
            shift = 0.05 * (number - (len(panel["arms"]) - 1) / 2) if bars else 0.0
            look = style.looks[name]
            known = [(at, point) for at, point in enumerate(points, start=1) if point is not None]
            axes.plot(
                [at + shift for at, _ in known],
                [point["value"] for _, point in known],
                **look | {"marker": ""},
            )
            for at, point in known:
                colour = "white" if at > depths[name] else look["color"]
                axes.errorbar(at + shift, point["value"], yerr=_ends(point) if bars else None, capsize=2, markersize=5,
                              **look | {"linestyle": "", "markerfacecolor": colour})  # fmt: skip
        _describe(axes, panel["title"], panel["axis"], panel["unit"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    hollow: Json = {"color": INK, "marker": "o", "markerfacecolor": "white", "linestyle": ""}
    _legend(
        figure,
        [*style.legend(lines=True), Line2D([], [], label="beyond the trained depth", **hollow)],
    )
    save_figure(figure, path)


def _ends(row: Json) -> list[list[float]] | None:
    """An interval as error bars."""
    return (
        None if row["low"] is None else [[row["value"] - row["low"]], [row["high"] - row["value"]]]
    )


def _describe(axes: Axes, title: str, across: str, up: str = "") -> None:
    """Write the title of a panel and what its axes are."""
    axes.set_title(label(title, 44, 2), fontsize=9)
    axes.set_xlabel(label(across, 40, 2), fontsize=9)
    axes.set_ylabel(label(up, 32, 2), fontsize=9)


def _legend(figure: Figure, handles: list[Line2D]) -> None:
    """Add a legend below all panels, and make the figure higher by what it takes."""
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / (0.75 + 0.08 * widest)))
    lines = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.22 * lines)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )


def _grid(
    count: int, wide: float, tall: float, left: float, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Panels in rows of three, or of two where three would leave one alone; sizes in inches."""
    columns = 2 if count == 4 else min(3, count)
    deep = -(-count // columns)
    figure = Figure(figsize=(left + wide * columns, deep * tall + 0.2), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    panels = [*figure.subplots(deep, columns, squeeze=False, sharey=sharey).flat]
    for number, axes in enumerate(panels):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_visible(number < count)
    return figure, panels[:count]
