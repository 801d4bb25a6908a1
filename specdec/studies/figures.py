"""The card's figures: numbers of ``card.json`` as PNG files.

Arms are told apart by marker and line as well as by colour, so that a print in grey is read as well; an arm looks alike
in all figures.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.evaluation.style import GREY, LINES, label, short, style
from specdec.studies.results import ACCEPTANCE, DRIFT, ROBUSTNESS
from specdec.utils.files import staged

Json = dict[str, Any]
MOST_TOGETHER = 6  # lines of one panel that have error bars


class Drawn(NamedTuple):
    """A figure that lies in the card's folder."""

    file: str
    about: str
    """Which section it belongs to."""
    caption: str


def draw(card: Json, folder: Path) -> list[Drawn]:
    """Draw all that the card has numbers for."""
    names, out = [arm["name"] for arm in card["arms"]], list[Drawn]()
    looks = {name: style(number) | {"linestyle": LINES[number % len(LINES)]} for number, name in enumerate(names)}
    depths = {arm["name"]: arm["trained_depth"] for arm in card["arms"]}

    def add(panels: Sequence[Json], how: Callable[..., None], file: str, about: str, caption: str) -> None:
        if panels:
            how(panels, looks, depths, folder / file)
            out.append(Drawn(file, about, caption))

    values = {family: _values(card, names, family) for family in (ACCEPTANCE, DRIFT, ROBUSTNESS)}
    add(values[ACCEPTANCE], _dots, "acceptance_length.png", ACCEPTANCE, "Acceptance length with 95 % intervals over "
        "seeds and prompts; the small strokes are the seeds' own.")  # fmt: skip
    add(_differences(card, names), _dots, "differences.png", ACCEPTANCE, "Acceptance length less the baseline's, of "
        "the same seeds and prompts. Filled: told apart from no difference after Holm's correction.")  # fmt: skip
    for family, file in ((DRIFT, "drift_outcomes.png"), (ROBUSTNESS, "robustness.png")):
        add(values[family], _dots, file, family, f"{family.capitalize()} of each arm; dashed: none.")
    for axis, file in (("draft position", "positions.png"), ("draft step", "drift.png")):
        curves = [curve for curve in card["curves"] if curve["axis"] == axis and any(curve["arms"].values())]
        add(curves, _curves, file, "curves", f"By {axis}, of all prompts and seeds.")
    losses = {name: [*runs.values()] for name, runs in card["loss_curves"].items() if any(runs.values())}
    curve = {"title": "", "unit": "training loss (nats)", "axis": "optimizer step", "arms": losses}
    add([curve] if losses else [], _losses, "losses.png", "training", "Training loss; a line a seed. Arms with another "
        "loss or depth are not comparable by it.")  # fmt: skip
    return out


def _values(card: Json, names: Sequence[str], family: str) -> list[Json]:
    """One panel for quantities that differ in their draft steps alone: here every arm stands for itself."""
    panels: dict[str, Json] = {}
    for one in (each for each in card["quantities"] if each["family"] == family):
        panel = panels.setdefault(one["panel"], {"unit": one["unit"], "at": one["null"], "rows": dict.fromkeys(names)})
        panel["rows"] |= one["arms"]
    return [{"title": title, **panel} for title, panel in panels.items()]


def _differences(card: Json, names: Sequence[str]) -> list[Json]:
    rows: dict[str, Json] = {}
    for row in (each for each in card["comparisons"] if each["family"] == ACCEPTANCE):
        others = [name for name in names if name != row["baseline"]]
        rows.setdefault(row["quantity"], dict.fromkeys(others))[row["arm"]] = row
    return [
        {"title": title.removeprefix(f"{ACCEPTANCE}, "), "unit": "difference (tokens per target pass)", "at": 0.0,
         "rows": own} for title, own in rows.items()
    ]  # fmt: skip


def _dots(panels: Sequence[Json], looks: Mapping[str, Json], depths: object, path: Path) -> None:
    """Rows with intervals, panel beside panel; all panels have the same rows."""
    names = [label(name, 34, 4) for name in panels[0]["rows"]]
    tall = 1.15 + 0.34 * sum(1.15 + 0.55 * name.count("\n") for name in names)
    figure, grid = _grid(len(panels), 3.4, tall, 3.2)
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        for place, (name, row) in enumerate(panel["rows"].items()):
            _dot(axes, place, row, looks[name])
        if panel["at"] is not None:
            axes.axvline(panel["at"], color=GREY, linestyle="--", linewidth=1, zorder=0)
        axes.set_title(label(panel["title"], 44, 2), fontsize=10)
        axes.set_xlabel(label(panel["unit"], 40, 2))
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=6)
        axes.set_yticks(range(len(names)), names if number % 3 == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.4, -0.6)
    _save(figure, path)


def _dot(axes: Axes, place: int, row: Json | None, look: Json) -> None:
    if row is None:
        where: Json = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center"}
        axes.annotate("not measured", (0.5, place), **where)
        return
    value, seeds = row["value"], [*row.get("by_seed", {}).values()]
    bar = None if row["low"] is None else [[value - row["low"]], [row["high"] - value]]
    filled = row.get("verdict") in (None, "higher", "lower")
    plain = look | {"linestyle": "", "markerfacecolor": look["color"] if filled else "white"}
    axes.errorbar([value], [place], xerr=bar, capsize=4, markersize=7, elinewidth=1.8, **plain)
    axes.plot(seeds, [place + 0.28] * len(seeds), linestyle="", marker="|", markersize=6, color="#404040")


def _curves(panels: Sequence[Json], looks: Mapping[str, Json], depths: Mapping[str, int | None], path: Path) -> None:
    """Lines with intervals, hollow beyond the trained depth; a legend below all panels."""
    arms = list(dict.fromkeys(name for panel in panels for name in panel["arms"]))
    figure, grid = _grid(len(panels), 3.9 if len(panels) > 1 else 7.0, 2.9, 0.4, 0.22 * (len(arms) + 1))
    hollow = False
    for axes, panel in zip(grid, panels, strict=True):
        bars = len(panel["arms"]) <= MOST_TOGETHER
        for number, (name, points) in enumerate(panel["arms"].items()):
            shift = 0.05 * (number - (len(panel["arms"]) - 1) / 2) if bars else 0.0
            known = [(at, each) for at, each in enumerate(points, start=1) if each is not None]
            axes.plot([at + shift for at, _ in known], [e["value"] for _, e in known], **looks[name] | {"marker": ""})
            for at, each in known:
                beyond = (depth := depths[name]) is not None and at > depth
                ends = (
                    [[each["value"] - each["low"]], [each["high"] - each["value"]]] if each["low"] is not None else None
                )
                plain = looks[name] | {"linestyle": "", "markerfacecolor": "white" if beyond else looks[name]["color"]}
                axes.errorbar(at + shift, each["value"], yerr=ends if bars else None, capsize=2, markersize=5, **plain)
                hollow |= beyond
        _titled(axes, panel)
    more = [Line2D([], [], label="beyond the trained depth", color="#404040", marker="o", markerfacecolor="white",
                   linestyle="")]  # fmt: skip
    _legend(figure, looks, arms, more if hollow else [])
    _save(figure, path)


def _losses(panels: Sequence[Json], looks: Mapping[str, Json], depths: object, path: Path) -> None:
    """Every seed a line."""
    (panel,) = panels
    figure, (axes,) = _grid(1, 7.0, 3.2, 0.4, 0.22 * (len(panel["arms"]) + 1))
    for name, seeds in panel["arms"].items():
        for points in (each for each in seeds if each):
            axes.plot(*zip(*points, strict=True), linewidth=1.1, **looks[name] | {"marker": ""})
    _titled(axes, panel)
    _legend(figure, looks, list(panel["arms"]), [])
    _save(figure, path)


def _titled(axes: Axes, panel: Json) -> None:
    axes.set_title(label(panel["title"], 44, 2), fontsize=9)
    axes.set_ylabel(label(panel["unit"], 32, 2), fontsize=9)
    axes.set_xlabel(panel["axis"], fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(figure: Figure, looks: Mapping[str, Json], arms: Sequence[str], more: Sequence[Line2D]) -> None:
    handles = [*(Line2D([], [], label=short(name, 70), markersize=5, **looks[name]) for name in arms), *more]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=9, handlelength=3)


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
    """Write the PNG, whole or not at all."""
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")
