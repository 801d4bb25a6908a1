"""The card's figures: numbers of ``card.json`` as PNG files.

Arms are told apart by marker and line as well as by colour, so that a print in grey is read as well; an arm looks alike
in all figures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.evaluation.style import GREY, LINES, label, short, style
from specdec.studies.results import ACCEPTANCE, FAMILIES, Json
from specdec.utils.files import staged

MOST_TOGETHER = 6  # lines of one panel that have error bars

Looks = Mapping[str, Json]  # by arm: marker, line and colour


def draw(card: Json, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Draw all that the card has numbers for; returns files and captions by the card's section."""
    looks = {arm["name"]: style(number) | {"linestyle": LINES[number % len(LINES)]}
             for number, arm in enumerate(card["arms"])}  # fmt: skip
    out: dict[str, list[tuple[str, str]]] = {}
    for family in FAMILIES:
        # quantities that differ in their draft steps alone share a panel: here every arm stands for itself
        panels: dict[str, Json] = {}
        for one in (each for each in card["quantities"] if each["family"] == family):
            panel = {"title": one["panel"], "unit": one["unit"], "at": one["null"], "rows": dict.fromkeys(looks)}
            panels.setdefault(one["panel"], panel)["rows"] |= one["arms"]
        if panels:
            file, more = f"{family.partition(' ')[0]}.png", "" if family == ACCEPTANCE else " Dashed: none."
            _dots([*panels.values()], looks, folder / file)
            caption = "with 95 % intervals over seeds and prompts; the small strokes are the seeds' own."
            out[family] = [(file, f"{family.capitalize()} {caption}{more}")]
    for axis, file in (("draft position", "positions.png"), ("draft step", "steps.png")):
        curves = [curve for curve in card["curves"] if curve["axis"] == axis and any(curve["arms"].values())]
        if curves:
            _curves(curves, looks, {arm["name"]: arm["trained_depth"] for arm in card["arms"]}, folder / file)
            out.setdefault("curves", []).append((file, f"By {axis}, of all prompts and seeds."))
    return out


def _dots(panels: Sequence[Json], looks: Looks, path: Path) -> None:
    """Rows with intervals, panel beside panel; all panels have the same rows."""
    names = [label(name, 34, 4) for name in looks]
    tall = 1.15 + 0.34 * sum(1.15 + 0.55 * name.count("\n") for name in names)
    figure, grid = _grid(len(panels), 3.4, tall, 3.2)
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        for place, (name, row) in enumerate(panel["rows"].items()):
            if row is None:
                where: Json = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center"}
                axes.annotate("not measured", (0.5, place), **where)
                continue
            axes.errorbar(row["value"], place, xerr=_ends(row), capsize=4, markersize=7, elinewidth=1.8,
                          **looks[name] | {"linestyle": ""})  # fmt: skip
            seeds = [*row["by_seed"].values()]
            axes.plot(seeds, [place + 0.28] * len(seeds), linestyle="", marker="|", markersize=6, color="#404040")
        if panel["at"] is not None:
            axes.axvline(panel["at"], color=GREY, linestyle="--", linewidth=1, zorder=0)
        axes.set_title(label(panel["title"], 44, 2), fontsize=10)
        axes.set_xlabel(label(panel["unit"], 40, 2))
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=6)
        axes.set_yticks(range(len(names)), names if number % 3 == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.4, -0.6)
    _save(figure, path)


def _ends(row: Json) -> list[list[float]] | None:
    """An interval as error bars."""
    return None if row["low"] is None else [[row["value"] - row["low"]], [row["high"] - row["value"]]]


def _curves(panels: Sequence[Json], looks: Looks, depths: Mapping[str, int], path: Path) -> None:
    """Lines with intervals, hollow beyond the trained depth; a legend below all panels."""
    arms = list(dict.fromkeys(name for panel in panels for name in panel["arms"]))
    figure, grid = _grid(len(panels), 3.9 if len(panels) > 1 else 7.0, 2.9, 0.4, 0.22 * (len(arms) + 1))
    for axes, panel in zip(grid, panels, strict=True):
        bars = len(panel["arms"]) <= MOST_TOGETHER
        for number, (name, points) in enumerate(panel["arms"].items()):
            shift = 0.05 * (number - (len(panel["arms"]) - 1) / 2) if bars else 0.0
            known = [(at, each) for at, each in enumerate(points, start=1) if each is not None]
            axes.plot([at + shift for at, _ in known], [e["value"] for _, e in known], **looks[name] | {"marker": ""})
            for at, each in known:
                colour = "white" if at > depths[name] else looks[name]["color"]
                axes.errorbar(at + shift, each["value"], yerr=_ends(each) if bars else None, capsize=2, markersize=5,
                              **looks[name] | {"linestyle": "", "markerfacecolor": colour})  # fmt: skip
        axes.set_title(label(panel["title"], 44, 2), fontsize=9)
        axes.set_ylabel(label(panel["unit"], 32, 2), fontsize=9)
        axes.set_xlabel(panel["axis"], fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    hollow: Json = {"color": "#404040", "marker": "o", "markerfacecolor": "white", "linestyle": ""}
    handles = [Line2D([], [], label=short(name, 70), markersize=5, **looks[name]) for name in arms]
    handles.append(Line2D([], [], label="beyond the trained depth", **hollow))
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=9, handlelength=3)
    _save(figure, path)


def _grid(count: int, wide: float, tall: float, left: float, below: float = 0.2) -> tuple[Figure, list[Axes]]:
    """Panels in rows of three at most; sizes in inches."""
    columns = min(3, count)
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


def _save(figure: Figure, path: Path) -> None:
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")
