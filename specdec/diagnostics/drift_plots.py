"""The figures of ``specdec drift``: where acceptance is lost, what the target gives, attention and states by step."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from specdec.diagnostics.drift_measure import Document
from specdec.diagnostics.waterfall import DOWN, MEANINGS, OBSERVED
from specdec.report.plots import (
    GREY,
    INK,
    Panel,
    PaperFigure,
    Point,
    label,
    paper_style,
    save_figure,
    shifts,
    short_label,
    style,
)
from specdec.report.tables import with_interval

WATERFALL = "waterfall.png"
INPUTS = "inputs.png"
CALIBRATION = "calibration.png"
LEAST_DRAFTS = 10  # of a bin of confidence that is drawn
BY_PLACE = ("target_sink_mass", "target_own_mass", "massive_ratio", "median_rms")
LOGARITHMIC = ("massive_ratio", "median_rms")
BY_STEP = {
    "attention.png": (
        "sink_mass", "own_mass", "drafted_mass", "recent_mass", "prompt_mass", "entropy",
    ),
    "states.png": (
        "out_rms", "state_rms", "feature_cosine", "cosine", "kl", "conditional_acceptance",
    ),
}  # fmt: skip
# Series of the target's that are drawn beside the drafters'.
OF_TARGET = {"sink_mass": "target_sink_mass", "own_mass": "target_own_mass"}
OPAQUE = 0.75
INTERVALS = "with 95 % intervals over prompts"
CAPTIONS = {
    WATERFALL: (
        "Where acceptance is lost, from perfect drafts to what decoding accepts. Each bar begins at the level above "
        "and ends at its own, whose 95 % interval is drawn; hatched: a gain. In brackets: the interval of the loss."
    ),
    INPUTS: f"What the target gives to the drafter, by place, {INTERVALS}.",
    "attention.png": (
        f"The drafter's attention by draft step, {INTERVALS}. Hollow: beyond the trained depth. Gray, dashed: the "
        "target's own, in the layers that the drafter reads."
    ),
    "states.png": (
        f"The drafter's states, and what they are worth, by draft step, {INTERVALS}. Hollow: beyond the trained depth."
    ),
    CALIBRATION: (
        f"The drafter's confidence and what is accepted, {INTERVALS}: a point for every tenth of confidence that has "
        f"{LEAST_DRAFTS} drafts. On the dashed line confidence means what it says; below it the drafter is "
        "overconfident."
    ),
}


@paper_style()
def plot_drift(drifts: Sequence[Document], names: Sequence[str], folder: Path) -> None:
    """Draw the figures of :data:`CAPTIONS` into ``folder``, a color for each drafter in all of them.

    Args:
        names: of the drafters.
    """
    _plot_waterfall(drifts, names, folder / WATERFALL)
    _plot_inputs(drifts, names, folder / INPUTS)
    for file, series in BY_STEP.items():
        _plot_steps(drifts, names, series, folder / file)
    _plot_calibration(drifts, names, folder / CALIBRATION)


def _drafters(names: Sequence[str], look: Mapping[str, Any] = MappingProxyType({})) -> list[Line2D]:
    """Return a legend entry for each drafter, in its style except for ``look``."""
    return [
        Line2D([], [], label=short_label(name, 60), **{**style(number), **look})
        for number, name in enumerate(names)
    ]


def _plot_waterfall(drifts: Sequence[Document], names: Sequence[str], path: Path) -> None:
    rows = (*DOWN, OBSERVED)
    height = 0.7 + len(rows) * max(0.24, 0.15 * len(names))
    paper = PaperFigure(1, 1, height)
    labels = [MEANINGS[row][0] for row in rows]
    panel = paper.dots("Where acceptance is lost", "tokens per target pass", "level", labels)
    ends = [1.0]
    for number, (name, drift) in enumerate(zip(names, drifts, strict=True)):
        ends += _draw_losses(panel, drift["waterfall"], name, number, len(names))
    # A third of the panel is for the numbers behind the bars.
    room = max(0.1, max(ends) - 1)
    panel.axes.set_xlim(1 - 0.01 * room, 1 + room / 0.66)
    panel.axes.set_xticks(range(1, int(max(ends)) + 1, max(1, round(room / 6))))
    panel.axes.grid(visible=False, axis="y")
    if len(names) > 1:
        paper.legend(_drafters(names, {"marker": "", "linewidth": 4, "alpha": OPAQUE}))
    save_figure(paper, path)


def _draw_losses(
    panel: Panel, waterfall: Document, name: str, number: int, count: int
) -> list[float]:
    """Draw one drafter's bars with intervals and numbers; return where bars and whiskers end."""
    levels = {level["name"]: Point.of(level["acceptance_length"]) for level in waterfall["levels"]}
    losses = {bar["to"]: (bar["from"], Point.of(bar["loss"])) for bar in waterfall["bars"]}
    color = style(number)["color"]
    ends = []
    for row, (level, length) in enumerate(levels.items()):
        y = row + 0.8 * ((number + 0.5) / count - 0.5)
        panel.record(f"{name}, level", MEANINGS[level][0], length)
        start = 1.0
        hatch = ""
        text = f"{length.value:.2f}"
        if level in losses:
            upper, loss = losses[level]
            panel.record(f"{name}, loss", MEANINGS[level][0], loss)
            start = levels[upper].value
            hatch = "/////" if loss.value < 0 else ""
            text = f"{_loss(loss)}, leaves {text}"
        panel.axes.barh(
            y, length.value - start, left=start, height=0.72 / count, color=color, alpha=OPAQUE, hatch=hatch
        )  # fmt: skip
        panel.axes.errorbar(
            [length.value], [y], xerr=[[end] for end in length.reach], color=INK, capsize=2, elinewidth=0.9
        )  # fmt: skip
        ends.append(max(start, length.value + length.reach[1]))
        panel.axes.annotate(
            text, (ends[-1], y), xytext=(4, 0), textcoords="offset points", va="center"
        )
    return ends


def _loss(loss: Point) -> str:
    """Return ``lost 0.42 [0.30, 0.54]``, or ``gained`` and the same of a gain."""
    number = "{:z.2f}".format
    if loss.value > -0.005:
        return f"lost {with_interval(*loss, number)}"
    low, high = (None if end is None else -end for end in (loss.high, loss.low))
    return f"gained {with_interval(-loss.value, low, high, number)}"


def _plot_inputs(drifts: Sequence[Document], names: Sequence[str], path: Path) -> None:
    """Draw a row for each place; drafters may read other layers."""
    inputs = [drift["inputs"] for drift in drifts]
    layers = {place for drift in inputs for place in drift["places"][:-3]}
    places = sorted(layers, key=lambda place: int(place.rpartition(" ")[2]) if " " in place else 0)
    places += inputs[0]["places"][-3:]
    row_height = max(0.16, 0.11 * len(names))
    paper = PaperFigure(len(BY_PLACE), 2, 0.65 + row_height * len(places), together=True)
    for quantity in BY_PLACE:
        of_all = [drift["series"][quantity] for drift in inputs]
        labels = [label(place, 24) for place in places]
        panel = paper.dots(of_all[0]["title"], of_all[0]["unit"], "place", labels)
        lows = []
        for number, (name, drift, series) in enumerate(zip(names, inputs, of_all, strict=True)):
            shift = shifts(len(names), 0.3, 0.75)[number]
            for row, point in _points(series).items():
                place = drift["places"][row - 1]
                panel.dot(name, place, places.index(place) + shift, point, style(number))
                lows.append(point.value if point.low is None else point.low)
        if quantity in LOGARITHMIC and lows and min(lows) > 0:  # a logarithmic axis has no zero
            panel.scale_by_factors()
    if len(names) > 1:
        paper.legend(_drafters(names))
    save_figure(paper, path)


def _plot_steps(
    drifts: Sequence[Document], names: Sequence[str], quantities: Sequence[str], path: Path
) -> None:
    """Draw series of every drafter by draft step, and the target's own attention next to the drafters'."""
    paper = PaperFigure(len(quantities), 3, 1.75)
    for quantity in quantities:
        series = [drift["series"][quantity] for drift in drifts]
        panel = paper.curves(series[0]["title"], series[0]["unit"], "draft step")
        for number, (name, drift) in enumerate(zip(names, drifts, strict=True)):
            points = _points(drift["series"][quantity])
            depth = drift["trained_depth"] or math.inf
            if points:
                panel.curve(name, points, style(number), shifts(len(names))[number], depth)
        if not any(map(_points, series)):
            panel.axes.text(0.5, 0.5, "not measured", ha="center", transform=panel.axes.transAxes)
        if quantity in OF_TARGET:
            _draw_target(panel, drifts, OF_TARGET[quantity])
    hollow = Line2D(
        [], [], label="beyond the trained depth", color=INK, marker="o", markerfacecolor="white", linestyle=""
    )  # fmt: skip
    handles = [*(_drafters(names) if len(names) > 1 else []), hollow]
    if OF_TARGET.keys() & set(quantities):
        dashed: Document = {"color": GREY, "linestyle": "--", "linewidth": 0.7}
        handles.append(Line2D([], [], label="the target's layers that the drafter reads", **dashed))
    paper.legend(handles)
    save_figure(paper, path)


def _draw_target(panel: Panel, drifts: Sequence[Document], quantity: str) -> None:
    """Draw a line for every place where some drafter reads the target and the target attends."""
    means: dict[str, Point] = {}
    for inputs in (drift["inputs"] for drift in drifts):
        for row, point in _points(inputs["series"][quantity]).items():
            means[inputs["places"][row - 1]] = point
    for place, point in means.items():
        panel.axes.axhline(point.value, color=GREY, linestyle="--", linewidth=0.7, zorder=1)
        panel.record(f"target, {place}", "", Point(point.value))


def _plot_calibration(drifts: Sequence[Document], names: Sequence[str], path: Path) -> None:
    """Draw reliability diagrams: of all draft steps, of the first and the last alone, and of whole chains."""
    last = drifts[0]["depths"]
    panels = {
        "Probability, any step": ("top", "all_steps"),
        "Probability, step 1": ("top", 0),
        f"Probability, step {last}": ("top", last - 1),
        "Probability, chain so far": ("product", "all_steps"),
    }
    if any("head" in drift["calibration"] for drift in drifts):
        panels["Confidence head, any step"] = ("head", "all_steps")
        panels["Confidence head, step 1"] = ("head", 0)
        panels["Confidence head, chain so far"] = ("head_product", "all_steps")
    paper = PaperFigure(len(panels), 4, 1.9, together=True)
    for title, (kind, step) in panels.items():
        panel = paper.curves(title, "share accepted", "confidence")
        panel.axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=0.7, zorder=1)
        panel.axes.set_xlim(-0.03, 1.03)
        panel.axes.xaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
        for number, (name, drift) in enumerate(zip(names, drifts, strict=True)):
            confidence = drift["calibration"].get(kind)
            if confidence is None:  # a drafter without a confidence head
                continue
            measured = confidence[step] if isinstance(step, str) else confidence["steps"][step]
            bins = [row for row in measured["bins"] if row["drafts"] >= LEAST_DRAFTS]
            points = {row["confidence"]: Point.of(row) for row in bins}
            if points:
                panel.curve(name, points, style(number))
    if len(names) > 1:
        paper.legend(_drafters(names))
    save_figure(paper, path)


def _points(series: Document) -> dict[int, Point]:
    """Return every row that has a mean, by its number from 1 on."""
    rows = zip(series["mean"], series["low"], series["high"], strict=True)
    return {number: Point(*row) for number, row in enumerate(rows, start=1) if row[0] is not None}
