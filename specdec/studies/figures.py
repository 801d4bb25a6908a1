"""The card's figures: numbers of ``card.json`` as PNG, PDF, SVG and CSV files.

A color is a level of one axis, a line or marker one of another, the same in all figures; a legend says which. Arms
go by their levels. Pale is a primary contrast that is not significant, and nothing else.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from specdec.report.plots import (
    COLORS,
    DOUBLE,
    INK,
    LINE_SPACING,
    LINES,
    MARKERS,
    SINGLE,
    PaperFigure,
    Point,
    label,
    paper_style,
    save_figure,
    shifts,
)
from specdec.report.statistics import ALPHA
from specdec.studies.outcomes import FAMILIES
from specdec.studies.recorded_run import Json
from specdec.studies.study import Contrast

MOST_PANELS = 6  # of one figure
MOST_IN_A_THIRD = 4  # lines of a panel that is a third of the page wide
SEPARATOR = " · "
PALE = 0.35


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
            "color": (first, COLORS),
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
                    look |= {"marker": "", "linestyle": "-", "linewidth": 4}
                yield Line2D([], [], label=label(f"{axis}={level}", 40, 1), **look)


@paper_style()
def draw_figures(card: Json, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Draw all that the card has numbers for; return PNG files and captions by the card's section."""
    style = _Style(card)
    out = defaultdict[str, list[tuple[str, str]]](list)
    contrasts = [row for row in card["primary"] if row.get("low") is not None]
    if contrasts:
        _forest(contrasts, card, folder / "primary.png")
        caption = (
            "Primary contrasts with 95 % intervals; pale: not significant after Holm's correction. "
            "Dashed: no difference."
        )
        out["Primary contrasts"].append(("primary.png", caption))
    for family in FAMILIES:
        panels = _family_panels(card, family, style)
        for part, file in _pages(panels, f"{family.partition(' ')[0]}.png"):
            _dots(part, style, folder / file)
            caption = f"{family.capitalize()} with 95 % intervals over seeds and prompts; strokes: each seed alone."
            dashed = "" if all(panel["null"] is None for panel in part) else " Dashed: no change."
            out[family.capitalize()].append((file, caption + dashed))
    for section, panels, file, caption in _curve_sections(card):
        for part, page in _pages(panels, file):
            _curves(part, style, card["arms"], folder / page)
            out[section].append((page, caption))
    return out


def _curve_sections(card: Json) -> Iterator[tuple[str, list[Json], str, str]]:
    """Yield, for each axis of curves, the section that they go to, the curves, the file and the caption."""
    # what is compared at a step or over steps has the curve's title and says at which
    declared = {re.split(", step | at position ", row["quantity"])[0] for row in card["primary"]}
    for axis, file in (("draft position", "positions.png"), ("draft step", "steps.png")):
        curves = [
            curve
            for curve in card["curves"]
            if curve["axis"] == axis and any(curve["arms"].values())
        ]
        primary = [
            curve for curve in curves if curve["title"].removeprefix("Conditional ") in declared
        ]
        with_intervals = f"{axis}, of all prompts and seeds, with 95 % intervals."
        yield "By draft position and draft step", curves, file, f"By {with_intervals}"
        caption = f"Quantities that the primary contrasts compare, by {with_intervals}"
        yield "Primary contrasts", primary, f"primary_{file}", caption


def _pages(panels: Sequence[Json], file: str) -> Iterator[tuple[Sequence[Json], str]]:
    """Yield panels that fit one figure, and its file; files are numbered where there are several."""
    stem, _, suffix = file.rpartition(".")
    for number, start in enumerate(range(0, len(panels), MOST_PANELS), start=1):
        several = len(panels) > MOST_PANELS
        name = f"{stem}_{number}.{suffix}" if several else file
        yield panels[start : start + MOST_PANELS], name


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
    outcomes: dict[str, list[Json]] = {}
    for row in rows:
        outcomes.setdefault(row["quantity"], []).append(row)
    units = {metric["name"]: metric["unit"] for metric in card["quantities"]}
    labels = {
        name: [label(label_of(row, card), 26, 4) for row in contrasts]
        for name, contrasts in outcomes.items()
    }
    most = max(map(len, outcomes.values()))
    lines = max(name.count("\n") + 1 for names in labels.values() for name in names)
    columns = min(2, len(outcomes))
    width = DOUBLE if columns > 1 else SINGLE
    paper = PaperFigure(len(outcomes), columns, 0.7 + (0.1 + 0.1 * lines) * most, width)
    for name, contrasts in outcomes.items():
        unit = f"difference in {units[name]}" if name in units else "difference"
        panel = paper.dots(name, unit, "contrast", labels[name], 0.0)
        for height, row in enumerate(contrasts):
            not_significant = row["p_holm"] is not None and row["p_holm"] >= ALPHA
            look = {"color": INK, "marker": "o", "alpha": PALE if not_significant else 1.0}
            panel.dot(row["verdict"], label_of(row, card), height, Point.of(row), look)
        panel.axes.set_ylim(most - 0.4, -0.6)
    save_figure(paper, path)


def _dots(quantities: Sequence[Json], style: _Style, path: Path) -> None:
    """Rows with intervals, panel next to panel; all panels have the same rows."""
    names = [label(style.names[name], 24) for name in style.looks]
    lines = sum(1 + name.count("\n") for name in names)
    count = len(quantities)
    columns = 2 if count == 4 else min(3, count)
    width = SINGLE if count == 1 else DOUBLE
    paper = PaperFigure(count, columns, 0.7 + 0.17 * lines, width, together=True)
    for number, quantity in enumerate(quantities):
        panel = paper.dots(quantity["panel"], quantity["unit"], "arm", names, quantity["null"])
        for height, (name, row) in enumerate(quantity["rows"].items()):
            if row is None or row["value"] is None:
                text = "not measured" if row is None else "no data"
                panel.axes.text(
                    0.5, height, text, ha="center", va="center", transform=panel.axes.get_yaxis_transform()
                )  # fmt: skip
                if row is not None:
                    panel.record("all seeds", name, Point.of(row))
                continue
            panel.dot("all seeds", name, height, Point.of(row), style.looks[name])
            seeds = list(row["by_seed"].values())
            at = [height + 0.3] * len(seeds)
            panel.axes.plot(seeds, at, linestyle="", marker="|", markersize=3, color=INK)
            for seed, value in row["by_seed"].items():
                panel.record(f"seed {seed}", name, Point(value))
        if number % columns == 0:
            axes = label(SEPARATOR.join(style.axes), 3 * lines)
            panel.axes.set_ylabel(axes, linespacing=LINE_SPACING)
    if len(style.axes) > 1:  # else the rows' names say it
        paper.legend([*style.legend(lines=False)])
    save_figure(paper, path)


def _curves(quantities: Sequence[Json], style: _Style, arms: Sequence[Json], path: Path) -> None:
    """Lines with intervals, hollow beyond the trained depth; a legend below all panels."""
    depths = {arm["name"]: arm["trained_depth"] for arm in arms}
    count = len(quantities)
    most = max(len(quantity["arms"]) for quantity in quantities)
    columns = min(count, 3 if most <= MOST_IN_A_THIRD and count != 4 else 2)
    width = SINGLE if count == 1 and most <= MOST_IN_A_THIRD else DOUBLE
    paper = PaperFigure(count, columns, 2.3 if count == 1 else 1.7, width)
    for quantity in quantities:
        panel = paper.curves(quantity["title"], quantity["unit"], quantity["axis"])
        places = shifts(len(quantity["arms"]))
        for shift, (name, row) in zip(places, quantity["arms"].items(), strict=True):
            points = {
                step: Point.of(point)
                for step, point in enumerate(row, start=1)
                if point is not None
            }
            panel.curve(name, points, style.looks[name], shift, depths[name])
    handles = [*style.legend(lines=True)]
    if any(
        len(row) > depths[name] for quantity in quantities for name, row in quantity["arms"].items()
    ):
        hollow: Json = {"color": INK, "marker": "o", "markerfacecolor": "white", "linestyle": ""}
        handles.append(Line2D([], [], label="beyond the trained depth", **hollow))
    paper.legend(handles)
    save_figure(paper, path)
