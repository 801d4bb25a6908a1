"""The report of ``specdec drift``: its tables and its picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.diagnostics.drift_measure import Document
from specdec.diagnostics.waterfall import draw_waterfall, waterfall_table
from specdec.report.tables import (
    GREY,
    ReportTable,
    format_interval,
    label,
    save_figure,
    short_label,
    style,
    whiskers,
)
from specdec.utils.text import how_many

BY_PLACE = ("massive_ratio", "median_rms")
BY_STEP = (
    "out_rms", "state_rms", "sink_mass", "own_mass", "drafted_mass", "recent_mass", "prompt_mass", "entropy",
    "kl", "conditional_acceptance", "feature_cosine", "cosine",
)  # fmt: skip
# Series of the target's that are drawn beside the drafters'.
OF_TARGET = {"sink_mass": "target_sink_mass", "own_mass": "target_own_mass"}


def drafter_names(drifts: Sequence[Document]) -> list[str]:
    """Return the drafters' labels, or their directories if labels are alike."""
    labels, directories = (
        [drift["drafter"][key] for drift in drifts] for key in ("label", "directory")
    )
    return labels if len({*labels}) == len(labels) else directories


def drift_tables(drift: Document) -> list[ReportTable]:
    """Return one drafter's waterfall, summary, and every mean by step and by place."""
    trained = drift["trained_depth"]
    steps = [str(k) for k in range(1, drift["depths"] + 1)]
    if trained is not None:
        steps[trained:] = [f"{step}*" for step in steps[trained:]]
    figures = [
        [figure["title"], format_interval(figure, _number)] for figure in drift["summary"].values()
    ]
    about = f"{how_many(sum(drift['chains']), 'chain')} of {how_many(len(drift['prompts']), 'prompt')}, "
    about += f"trained depth {trained or 'unknown'}"
    inputs = drift["inputs"]
    return [
        waterfall_table(drift["waterfall"], drift["depths"]),
        ReportTable("Drift", ["Figure", ""], figures),
        ReportTable(
            about, ["Mean at step (*: beyond the trained depth)", *steps], _means(drift["series"])
        ),
        ReportTable(
            "What the target gives", ["Mean at place", *inputs["places"]], _means(inputs["series"])
        ),
    ]


def _means(series: Document) -> list[list[str]]:
    return [
        [f"{row['title']} ({row['unit']})", *map(_number, row["mean"])] for row in series.values()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"


def plot_drift(drifts: Sequence[Document], path: Path) -> None:
    """Draw the waterfall and every quantity by place and by draft step, a color for each drafter in all panels.

    Hollow markers lie beyond the trained depth; grey lines are the target's own, at the layers that are fused.
    """
    figure = Figure(figsize=(16, 14), dpi=120, layout="constrained")
    grid = figure.add_gridspec(4, 4)
    draw_waterfall([drift["waterfall"] for drift in drifts], figure.add_subplot(grid[0, :2]))
    for column, name in enumerate(BY_PLACE, start=2):
        _by_place(drifts, name, figure.add_subplot(grid[0, column]))
    for number, name in enumerate(BY_STEP):
        _by_step(drifts, name, figure.add_subplot(grid[1 + number // 4, number % 4]))
    handles = [
        Line2D([], [], label=short_label(name, 70), **style(number))
        for number, name in enumerate(drafter_names(drifts))
    ]
    handles.append(
        Line2D([], [], label="beyond the trained depth", color="#404040", marker="o", markerfacecolor="white",
               linestyle="")
    )  # fmt: skip
    handles.append(
        Line2D([], [], label="the target's, where its states are fused", color=GREY, linestyle="--")
    )
    figure.legend(
        handles=handles, loc="outside lower center", frameon=False, ncols=min(4, len(handles))
    )
    save_figure(figure, path)


def _by_step(drifts: Sequence[Document], name: str, axes: Axes) -> None:
    """Draw one series of every drafter, and the target's own attention beside the drafters'."""
    for number, drift in enumerate(drifts):
        trained = drift["trained_depth"] or drift["depths"]
        shift = 0.08 * (number - (len(drifts) - 1) / 2)
        rows = _rows(drift["series"][name])
        points = [(k + shift, row, k > trained) for k, row in rows]
        _draw_points(points, number, axes, "-")
    if name in OF_TARGET:
        for place, mass in _target_means(drifts, OF_TARGET[name]).items():
            axes.axhline(mass, color=GREY, linestyle="--", linewidth=1, zorder=0)
            axes.annotate(place, (0.99, mass), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom",
                          color="#606060")  # fmt: skip
    series = drifts[0]["series"][name]
    deepest = max(drift["depths"] for drift in drifts)
    axes.set(ylabel=series["unit"], xlabel="draft step", xlim=(0.5, deepest + 0.5))
    axes.set_title(series["title"], fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _target_means(drifts: Sequence[Document], name: str) -> dict[str, float]:
    """Return one series of the target's by place, over all places that some drafter reads."""
    means: dict[str, float] = {}
    for drift in drifts:
        places = drift["inputs"]["places"]
        for number, row in _rows(drift["inputs"]["series"][name]):
            means[places[number - 1]] = row["mean"]
    return means


def _by_place(drifts: Sequence[Document], name: str, axes: Axes) -> None:
    """Draw one series of the inputs of every drafter; drafters may fuse other layers."""
    layers = {place for drift in drifts for place in drift["inputs"]["places"][:-3]}
    places = sorted(layers, key=lambda place: int(place.rpartition(" ")[2]) if " " in place else 0)
    places += drifts[0]["inputs"]["places"][-3:]
    for number, drift in enumerate(drifts):
        shift = 0.1 * (number - (len(drifts) - 1) / 2)
        columns = [places.index(place) + shift for place in drift["inputs"]["places"]]
        rows = _rows(drift["inputs"]["series"][name])
        points = [(columns[place - 1], row, False) for place, row in rows]
        _draw_points(points, number, axes, "")
    series = drifts[0]["inputs"]["series"][name]
    axes.set(yscale="log", ylabel=series["unit"])
    axes.set_title(series["title"], fontsize=10)
    axes.set_xticks(range(len(places)), [label(place, 8) for place in places], fontsize=8)
    axes.grid(alpha=0.3)


def _rows(series: Document) -> list[tuple[int, dict[str, Any]]]:
    """Return every row that has a mean, with its number from 1 on."""
    rows = []
    columns = zip(series["mean"], series["low"], series["high"], strict=True)
    for number, (mean, low, high) in enumerate(columns, start=1):
        if mean is not None:
            rows.append((number, {"mean": mean, "low": low, "high": high}))
    return rows


def _draw_points(
    points: Sequence[tuple[float, dict[str, Any], bool]], number: int, axes: Axes, line: str
) -> None:
    """Draw means with intervals in a drafter's look on a line.

    Args:
        points: x, the row with its mean, and whether the marker is hollow.
        number: the drafter's.
        line: matplotlib's style of the line, empty for none.
    """
    look = style(number)
    means = [row["mean"] for _, row, _ in points]
    axes.plot([x for x, *_ in points], means, color=look["color"], linestyle=line)
    for x, row, hollow in points:
        axes.errorbar(
            x,
            row["mean"],
            yerr=[[end] for end in whiskers(row)],
            capsize=2,
            elinewidth=1,
            markerfacecolor="white" if hollow else look["color"],
            markersize=5,
            **look,
        )
