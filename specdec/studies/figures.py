"""The card's figures: numbers of ``card.json`` as PNG files.

A colour is a level of one axis, a line or marker one of another, the same in all figures; a legend says which. Arms
go by their levels. An interval that says nothing is pale: a contrast's that holds no difference, an arm's that is
wider than all arms lie apart.
"""

import re
from collections.abc import Mapping, Sequence
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

Looks = Mapping[str, Json]  # by arm: marker, line and colour


def short_names(arms: Sequence[Json]) -> dict[str, str]:
    """Return the levels of every arm, by its name."""
    return {arm["name"]: SEPARATOR.join(arm["levels"].values()) for arm in arms}


def label_of(row: Json, card: Json) -> str:
    """Return what is compared with what: ``off · 4 - on · 4``, ``norm: on - off (K=4)``, or an interaction."""
    if "outcome" in row:
        return str(
            Contrast(*(row[name] for name in ("outcome", "effect", "against", "at", "expect")))
        )
    if "arm" in row:
        names = short_names(card["arms"])
        return f"{names[row['arm']]} - {names[row['baseline']]}"
    if " x " in row["effect"]:
        return f"{row['effect']}, interaction"
    axis, _, level = row["effect"].partition("=")
    base = next(arm["levels"] for arm in card["arms"] if arm["is_baseline"])
    return f"{axis}: {level} - {base[axis]}"


class _Style:
    """Which axis of the study is the colour, which the line and which the marker; and the legend that says so."""

    def __init__(self, card: Json) -> None:
        axes: dict[str, Sequence[str]] = card["study"]["axes"]
        first = next((axis for row in card["primary"] for axis in row["effect"]), next(iter(axes)))
        ordered = [first, *(axis for axis in axes if axis != first)]
        line = next((axis for axis in ordered[1:] if len(axes[axis]) <= len(LINES)), ordered[-1])
        marker = next((axis for axis in ordered[1:] if axis != line), line)
        self.of = {
            "color": (first, COLOURS),
            "linestyle": (line, LINES),
            "marker": (marker, MARKERS),
        }
        self.axes = axes
        self.names = short_names(card["arms"])
        self.looks: Looks = {
            arm["name"]: {
                key: self._look(key, arm["levels"][axis]) for key, (axis, _) in self.of.items()
            }
            for arm in card["arms"]
        }

    def _look(self, key: str, level: str) -> str:
        axis, known = self.of[key]
        return known[list(self.axes[axis]).index(level) % len(known)]

    def legend(self, lines: bool) -> list[Line2D]:
        """An entry for every level that a look tells; without lines the figure has none."""
        out = []
        for axis, levels in self.axes.items():
            keys = [
                key
                for key, (name, _) in self.of.items()
                if name == axis and (lines or key != "linestyle")
            ]
            for level in levels if keys else ():
                plain: Json = {
                    "color": INK,
                    "linestyle": "-" if lines else "",
                    "marker": "" if lines else "o",
                }
                look = plain | {key: self._look(key, level) for key in keys}
                if "color" in keys and len(keys) == 1 and not lines:
                    look |= {"marker": "", "linestyle": "-", "linewidth": 6}
                out.append(
                    Line2D([], [], label=label(f"{axis}={level}", 40, 1), markersize=6, **look)
                )
        return out


def draw_figures(card: Json, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Draw all that the card has numbers for; return files and captions by the card's section."""
    style = _Style(card)
    out: dict[str, list[tuple[str, str]]] = {}
    contrasts = [
        row for row in card["primary"] if row["value"] is not None and row["low"] is not None
    ]
    if contrasts:
        _forest(contrasts, card, folder / "primary.png")
        caption = (
            "Primary contrasts with 95 % intervals; pale: not told apart after Holm's correction."
        )
        out["Primary contrasts"] = [("primary.png", caption)]
    for family in FAMILIES:
        if panels := _family_panels(card, family, style):
            file = f"{family.partition(' ')[0]}.png"
            dashed = "" if family == ACCEPTANCE else " Dashed: none."
            _dots(panels, style, folder / file)
            caption = (
                "with 95 % intervals over seeds and prompts, pale where they hold every arm's value and so tell "
                "none apart; the small strokes are the seeds' own."
            )
            out[family.capitalize()] = [(file, f"{family.capitalize()} {caption}{dashed}")]
    depths = {arm["name"]: arm["trained_depth"] for arm in card["arms"]}
    # what is compared at a step or over steps has the curve's title and says at which
    declared = {re.split(", step | at position ", row["quantity"])[0] for row in card["primary"]}
    for axis, file in (("draft position", "positions.png"), ("draft step", "steps.png")):
        curves = [
            curve
            for curve in card["curves"]
            if curve["axis"] == axis and any(curve["arms"].values())
        ]
        if curves:
            _curves(curves, style, depths, folder / file)
            section = out.setdefault("By draft position and draft step", [])
            section.append((file, f"By {axis}, of all prompts and seeds."))
        if primary := [c for c in curves if c["title"].removeprefix("Conditional ") in declared]:
            _curves(primary, style, depths, folder / f"primary_{file}")
            caption = f"What primary contrasts are of, by {axis}, of all prompts and seeds."
            out.setdefault("Primary contrasts", []).append((f"primary_{file}", caption))
    return out


def _family_panels(card: Json, family: str, style: _Style) -> list[Json]:
    """Return a panel for each figure of a family, with a row for each arm.

    Metrics that differ in their draft steps alone share a panel: here every arm stands for itself.
    """
    panels: dict[str, Json] = {}
    for metric in card["quantities"]:
        if metric["family"] == family:
            title = metric["panel"]
            panel = {"title": title, "unit": metric["unit"], "at": metric["null"]}
            rows: Json = dict.fromkeys(style.looks)
            panels.setdefault(title, {**panel, "rows": rows})["rows"] |= metric["arms"]
    return list(panels.values())


def _forest(rows: Sequence[Json], card: Json, path: Path) -> None:
    """A panel for every outcome, a line for every contrast."""
    panels = {
        name: [row for row in rows if row["quantity"] == name]
        for name in dict.fromkeys(r["quantity"] for r in rows)
    }
    most = max(map(len, panels.values()))
    labels = {name: [label_of(row, card) for row in panel] for name, panel in panels.items()}
    shared = len({tuple(of_panel) for of_panel in labels.values()}) == 1
    figure, grid = _grid(
        len(panels), 3.4 if shared else 5.2, 1.15 + 0.5 * most, 2.4 if shared else 0.2
    )
    for number, (axes, (name, panel)) in enumerate(zip(grid, panels.items(), strict=True)):
        for place, row in enumerate(panel):
            apart = row["verdict"] in ("higher", "lower")
            axes.errorbar(row["value"], place, xerr=_ends(row), capsize=4, markersize=7, elinewidth=1.8, marker="o",
                          color=INK, alpha=1.0 if apart else PALE)  # fmt: skip
        axes.axvline(0.0, color=GREY, linestyle="--", linewidth=1, zorder=0)
        axes.set_title(label(name, 48, 2), fontsize=10)
        axes.set_xlabel("difference")
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=6)
        names = [label(text, 32, 3) for text in labels[name]]
        has_names = not shared or number % _columns(len(panels)) == 0
        axes.set_yticks(range(len(names)), names if has_names else [""] * len(names))
        axes.set_ylim(most - 0.5, -0.5)
    save_figure(figure, path)


def _dots(panels: Sequence[Json], style: _Style, path: Path) -> None:
    """Rows with intervals, panel beside panel; all panels have the same rows."""
    names = [label(style.names[name], 34, 3) for name in style.looks]
    tall = 1.15 + 0.34 * sum(1.15 + 0.55 * name.count("\n") for name in names)
    handles = style.legend(lines=False)
    left = 0.5 + 0.08 * max(len(line) for name in names for line in name.split("\n"))
    columns, below = _below(handles, left + 3.4 * _columns(len(panels)))
    figure, grid = _grid(len(panels), 3.4, tall, left, below)
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        values = [row["value"] for row in panel["rows"].values() if row]
        reach = [min(values), max(values)]
        for place, (name, row) in enumerate(panel["rows"].items()):
            if row is None:
                where: Json = {
                    "xycoords": ("axes fraction", "data"),
                    "ha": "center",
                    "va": "center",
                }
                axes.annotate("not measured", (0.5, place), **where)
                continue
            look = style.looks[name] | {"linestyle": ""}
            nothing = (
                len(values) > 1
                and row["low"] is not None
                and row["low"] < min(values)
                and row["high"] > max(values)
            )
            axes.plot(row["value"], place, markersize=7, **look)
            axes.errorbar(row["value"], place, xerr=_ends(row), capsize=4, elinewidth=1.8, zorder=1,
                          alpha=PALE if nothing else 1.0, **look | {"marker": ""})  # fmt: skip
            seeds = [*row["by_seed"].values()]
            axes.plot(
                seeds,
                [place + 0.28] * len(seeds),
                linestyle="",
                marker="|",
                markersize=6,
                color=INK,
            )
            ends = [] if nothing or row["low"] is None else [row["low"], row["high"]]
            reach = [min(*reach, *seeds, *ends), max(*reach, *seeds, *ends)]
        if panel["at"] is not None:
            axes.axvline(panel["at"], color=GREY, linestyle="--", linewidth=1, zorder=0)
            reach = [min(reach[0], panel["at"]), max(reach[1], panel["at"])]
        if reach[0] < reach[1]:  # a pale interval may run off the panel
            axes.set_xlim(
                *(
                    end + sign * 0.12 * (reach[1] - reach[0])
                    for end, sign in zip(reach, (-1, 1), strict=True)
                )
            )
        axes.set_title(label(panel["title"], 42, 2), fontsize=10)
        axes.set_xlabel(label(panel["unit"], 40, 2))
        axes.locator_params(axis="x", nbins=6)
        axes.set_yticks(
            range(len(names)), names if number % _columns(len(panels)) == 0 else [""] * len(names)
        )
        axes.set_ylim(len(names) - 0.4, -0.6)
    _legend(figure, handles, columns)
    save_figure(figure, path)


def _below(handles: Sequence[Line2D], wide: float) -> tuple[int, float]:
    """Columns of a legend in so many inches, and the inches that it takes below."""
    columns = max(
        1, int(wide / (0.75 + 0.08 * max(len(str(handle.get_label())) for handle in handles)))
    )
    return columns, 0.35 + 0.22 * -(-len(handles) // columns)


def _legend(figure: Figure, handles: list[Line2D], columns: int) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )


def _ends(row: Json) -> list[list[float]] | None:
    """An interval as error bars."""
    return (
        None if row["low"] is None else [[row["value"] - row["low"]], [row["high"] - row["value"]]]
    )


def _curves(panels: Sequence[Json], style: _Style, depths: Mapping[str, int], path: Path) -> None:
    """Lines with intervals, hollow beyond the trained depth; a legend below all panels."""
    hollow: Json = {"color": INK, "marker": "o", "markerfacecolor": "white", "linestyle": ""}
    handles = [
        *style.legend(lines=True),
        Line2D([], [], label="beyond the trained depth", **hollow),
    ]
    wide = 3.9 if len(panels) > 1 else 7.0
    columns, below = _below(handles, 0.4 + wide * _columns(len(panels)))
    figure, grid = _grid(len(panels), wide, 2.9, 0.4, below)
    for axes, panel in zip(grid, panels, strict=True):
        bars = len(panel["arms"]) <= MOST_TOGETHER
        for number, (name, points) in enumerate(panel["arms"].items()):
            shift = 0.05 * (number - (len(panel["arms"]) - 1) / 2) if bars else 0.0
            look = style.looks[name]
            known = [(at, point) for at, point in enumerate(points, start=1) if point is not None]
            axes.plot(
                [at + shift for at, _ in known],
                [e["value"] for _, e in known],
                **look | {"marker": ""},
            )
            for at, point in known:
                colour = "white" if at > depths[name] else look["color"]
                axes.errorbar(at + shift, point["value"], yerr=_ends(point) if bars else None, capsize=2, markersize=5,
                              **look | {"linestyle": "", "markerfacecolor": colour})  # fmt: skip
        axes.set_title(label(panel["title"], 48, 2), fontsize=9)
        axes.set_ylabel(label(panel["unit"], 32, 2), fontsize=9)
        axes.set_xlabel(panel["axis"], fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, handles, columns)
    save_figure(figure, path)


def _columns(count: int) -> int:
    """Panels of a row: three, or two where three would leave one alone."""
    return 2 if count == 4 else min(3, count)


def _grid(
    count: int, wide: float, tall: float, left: float, below: float = 0.2
) -> tuple[Figure, list[Axes]]:
    """Panels in rows; sizes in inches."""
    columns = _columns(count)
    deep = -(-count // columns)
    figure = Figure(figsize=(left + wide * columns, deep * tall + below), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    flat = [axes for row in figure.subplots(deep, columns, squeeze=False) for axes in row]
    for number, axes in enumerate(flat):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_visible(number < count)
    return figure, flat[:count]
