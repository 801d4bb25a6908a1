"""One picture of an evaluation: acceptance length, acceptance by position, and speed."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from specdec.evaluation.style import GREY, label, short, style
from specdec.files import staged

_NAME_WIDTH = 20
_LONGEST = 3 * _NAME_WIDTH
_LEGEND_WIDTH = 160  # letters


def plot(metrics: dict[str, Any], path: Path | str) -> None:
    """Draw the results of ``metrics`` as a PNG at ``path``, whole or not at all.

    Raises:
        ValueError: there is no result, or the file cannot be written.
    """
    results = metrics["results"]
    if not results:
        raise ValueError(f"{path}: there is no result to plot")
    names = [label(result["growth"], _NAME_WIDTH) for result in results]
    rows = sum(max(1.6, 1 + name.count("\n")) for name in names)
    height = max(4.8, 1.8 + 0.42 * rows + 0.24 * (len(names) // 2))
    figure = Figure(figsize=(15, height), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    axes: dict[str, Axes] = figure.subplot_mosaic([["length", "joint", "speed"], ["length", "conditional", "speed"]])
    axes["conditional"].sharex(axes["joint"])
    _lengths(axes["length"], results, names)
    _positions(axes["joint"], axes["conditional"], results)
    _speeds(axes["speed"], results, names)
    handles: list[Line2D | Patch] = [
        Line2D([], [], label=short(result["growth"], _LONGEST), **style(row)) for row, result in enumerate(results)
    ]
    handles.append(Patch(color=GREY, label="plain decoding"))
    columns = min(len(handles), _LEGEND_WIDTH // max(8 + len(str(handle.get_label())) for handle in handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def _lengths(axes: Axes, results: list[dict[str, Any]], names: list[str]) -> None:
    ends = []
    for row, result in enumerate(results):
        mean, low, high = (result["acceptance_length"][key] for key in ("mean", "low", "high"))
        bar = None if low is None else [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        axes.errorbar([mean], [row], xerr=bar, capsize=4, markersize=7, elinewidth=2, **style(row))
        axes.annotate(f"{mean:.2f}", (mean, row), (0, 8), textcoords="offset points", ha="center")
        ends.append(mean if high is None else high)
    axes.axvline(1, color=GREY, linestyle=":")
    axes.set_xlim(0.9, 1 + (max(*ends, 1.2) - 1) * 1.12)
    measured = any(result["acceptance_length"]["low"] is not None for result in results)
    axes.set_xlabel(
        "tokens per target pass, bonus token included" + ("\n(bars: 95 % interval over prompts)" if measured else "")
    )
    axes.set_title("Acceptance length")
    _name_rows(axes, names)


def _positions(joint: Axes, conditional: Axes, results: list[dict[str, Any]]) -> None:
    deepest = max(len(result["accepted_per_position"]["joint"]) for result in results)
    for row, result in enumerate(results):
        for axes, key in ((joint, "joint"), (conditional, "conditional")):
            rates = enumerate(result["accepted_per_position"][key], start=1)
            known = [(k, rate) for k, rate in rates if rate is not None]
            if known:  # the layout engine goes astray over an empty line
                axes.plot(*zip(*known, strict=True), markersize=5, clip_on=False, zorder=3, **style(row))
    for axes in (joint, conditional):
        axes.set_ylim(0, 1)
        axes.set_xlim(0.7, max(deepest, 1) + 0.3)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if not deepest:
            axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center")
    joint.set_title("Acceptance by draft position")
    joint.set_ylabel("joint\n(share of passes)")
    joint.tick_params(labelbottom=False)
    conditional.set_ylabel("conditional\n(given k - 1 accepted)")
    conditional.set_xlabel("draft position k")
    conditional.xaxis.set_major_locator(MaxNLocator(integer=True))


def _speeds(axes: Axes, results: list[dict[str, Any]], names: list[str]) -> None:
    longest = 0.0
    for row, result in enumerate(results):
        speculative, plain = (result["tokens_per_second"][key] for key in ("speculative", "plain"))
        speedup = "" if result["speedup"] is None else f"  ({result['speedup']:.2f}x)"
        bars = (
            ("speculative", speculative, -0.19, style(row)["color"], speedup),
            ("plain", plain, 0.19, GREY, ""),
        )
        for kind, rate, offset, colour, remark in bars:
            shown = f"{kind} not measured" if rate is None else f"{rate:,.1f}{remark}"
            axes.barh(row + offset, rate or 0, height=0.34, color=colour)
            axes.annotate(shown, (rate or 0, row + offset), (4, 0), textcoords="offset points", va="center")
            longest = max(longest, rate or 0)
    axes.set_xlim(0, (longest or 1) * 1.38)  # room for the numbers at the ends
    axes.set_xlabel("tokens per second (x: times plain decoding)")
    axes.set_title("Speed")
    _name_rows(axes, names)


def _name_rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names) - 0.4, 0.8), min(-0.6, 0.2 - 1 / len(names)))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
