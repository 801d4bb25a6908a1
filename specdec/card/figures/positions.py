"""Conditional acceptance by draft position; positions beyond the trained depth are hollow."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.card.figures.page import MOST_TOGETHER, hollow, legend, legend_height, line_style, note, panels, save
from specdec.evaluation.style import GREY, label

_Y = "conditional acceptance\n(share of passes that came so far)"


def positions(own: dict[str, Any], depths: dict[str, int | None], base: str, path: Path) -> None:
    """One panel where there are few arms; else one for each, with the baseline in grey behind it."""
    arms, deepest = list(own["arms"]), own["depth"]
    looks = [line_style(number) for number in range(len(arms))]
    together = len(arms) <= MOST_TOGETHER
    height = legend_height(arms, 7.6) if together else 0.5
    figure, flat = panels(1 if together else len(arms), 3.6 if together else 2.4, extra=height)
    if together:
        figure.set_size_inches(7.6, 3.6 + height)
    for number, name in enumerate(arms):
        axes = flat[0 if together else number]
        if not together:
            axes.set_title(label(name, 36, 3), fontsize=8)
            if name != base and base in own["arms"]:
                _line(
                    axes, own["arms"][base]["conditional"], None, 0.0, {"color": GREY, "marker": "", "linewidth": 1.2}
                )
        shift = 0.05 * (number - (len(arms) - 1) / 2) if together else 0.0
        _line(axes, own["arms"][name]["conditional"], depths.get(name), shift, looks[number])
    for axes in flat:
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0.6, deepest + 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    notes = [hollow()] if any(depth and depth < deepest for depth in depths.values()) else []
    if together:
        flat[0].set_xlabel("draft position k (bars: 95 % interval)")
        flat[0].set_ylabel(_Y)
        legend(figure, arms, looks, notes)
    else:
        figure.supxlabel("draft position k (bars: 95 % interval)", fontsize=10)
        figure.supylabel(_Y.replace("\n", " "), fontsize=10)
        behind = Line2D([], [], color=GREY, linewidth=1.2, label="the baseline")
        note(figure, [behind, *notes])
    save(figure, path)


def _line(axes: Axes, found: list[Any], depth: int | None, shift: float, look: dict[str, Any]) -> None:
    """The curve with its bars; markers beyond ``depth`` are hollow."""
    known = [(k, each) for k, each in enumerate(found, start=1) if each is not None]
    if not known:
        return
    x, y = [k + shift for k, _ in known], [each["value"] for _, each in known]
    axes.plot(x, y, **{**look, "marker": ""})
    if not look["marker"]:
        return
    for at, (k, each) in zip(x, known, strict=True):
        low, high = (
            max(0.0, min(1.0, each[end])) if each[end] is not None else each["value"] for end in ("low", "high")
        )
        bar = [[max(0.0, each["value"] - low)], [max(0.0, high - each["value"])]]
        face = "white" if depth and k > depth else look["color"]
        plain = {**look, "linestyle": "", "markerfacecolor": face}
        axes.errorbar([at], [each["value"]], yerr=bar, capsize=2, elinewidth=1, **plain)
