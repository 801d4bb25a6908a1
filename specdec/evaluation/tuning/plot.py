"""One picture of a tuning: what verification costs, and predicted speed-up against the number of nodes."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from specdec.files import staged

# Okabe and Ito's palette without its yellow
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREY = "#9A9A9A"


def plot(found: dict[str, Any], path: Path | str) -> None:
    """Draw what ``tune.json`` holds as a PNG at ``path``, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 5), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    costs, gains = figure.subplots(1, 2)
    for row, batch in enumerate(found["batches"]):
        style = {"color": _COLOURS[row % len(_COLOURS)], "marker": _MARKERS[row % len(_MARKERS)]}
        points = sorted((int(nodes), value) for nodes, value in batch["costs"]["verify"].items())
        costs.plot(*zip(*points, strict=True), label=f"batch size {batch['batch']}", markersize=5, **style)
        best = _best_by_nodes(batch["predictions"])
        gains.plot(*zip(*best, strict=True), label=f"batch size {batch['batch']}", markersize=4, **style)
        top = batch["predictions"][0]
        measured = batch["trial"]["measured"]
        gains.plot([top["nodes"]] * 2, [top["speedup"], measured], color=style["color"], linewidth=1, linestyle=":")
        gains.plot([top["nodes"]], [measured], "*", color=style["color"], markersize=14, markeredgecolor="black",
                   zorder=4)  # fmt: skip
    costs.set_title("Cost of verification")
    costs.set_xlabel("nodes verified per sequence, the root included")
    costs.set_ylabel("v: time of a pass over a plain pass")
    gains.plot([], [], "*", color="white", markersize=14, markeredgecolor="black", label="measured, at the best shape")
    gains.axhline(1, color=_GREY, linestyle="--", linewidth=1, label="plain decoding")
    gains.set_title("Predicted speed-up, best shape of each size")
    gains.set_xlabel("draft nodes")
    gains.set_ylabel("S: times plain decoding")
    for axes in (costs, gains):
        _dress(axes)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def _best_by_nodes(predictions: list[dict[str, Any]]) -> list[tuple[int, float]]:
    best: dict[int, float] = {}
    for one in predictions:  # the fastest first
        best.setdefault(one["nodes"], one["speedup"])
    return sorted(best.items())


def _dress(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 32, 64]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
