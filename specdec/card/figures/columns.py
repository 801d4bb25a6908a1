"""Drift of a grid of many arms: a column for each combination of the first axes, a line for each level of the last."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from specdec.card.figures.page import MOST_TOGETHER, hollow, legend, legend_height, line_style, page, save, tidy
from specdec.card.figures.series import curve
from specdec.evaluation.style import label

Json = dict[str, Any]

SHOWN = ("state_rms", "sink_mass", "self_mass", "entropy", "kl", "conditional_acceptance")  # the tables have all
MOST_COLUMNS = 4


def columns(card: Json) -> dict[str, dict[str, str]]:
    """By the name of a column, its arms by the level of the last axis; empty where the arms make no such page.

    They do where they are too many for one panel, of two axes and more, and neither columns nor lines are too many.
    """
    axes = [axis for axis, levels in card["study"]["axes"].items() if len(levels) > 1]
    measured = {name for one in card["drift"].values() for name in one["arms"]}
    arms = [arm for arm in card["arms"] if arm["name"] in measured]
    if len(axes) < 2 or len(arms) <= MOST_TOGETHER:
        return {}
    out: dict[str, dict[str, str]] = {}
    for arm in arms:
        column = " ".join(f"{axis}={arm['levels'][axis]}" for axis in axes[:-1])
        out.setdefault(column, {})[f"{axes[-1]}={arm['levels'][axes[-1]]}"] = arm["name"]
    lines = {level for own in out.values() for level in own}
    return out if len(out) <= MOST_COLUMNS and len(lines) <= MOST_TOGETHER else {}


def drift_columns(series: Json, depths: dict[str, int | None], found: dict[str, dict[str, str]], path: Path) -> None:
    """The series that tell of drift, each with one axis for all columns; hollow beyond the trained depth."""
    shown: Sequence[Json] = [series[name] for name in SHOWN if name in series] or list(series.values())
    levels = list(dict.fromkeys(level for own in found.values() for level in own))
    looks = {level: line_style(number) for number, level in enumerate(levels)}
    width = max(6.4, 3.0 * len(found) + 0.6)
    figure = page(width, 2.3 * len(shown) + legend_height(levels, width) + 0.4)
    grid = figure.subplots(len(shown), len(found), sharex=True, sharey="row", squeeze=False)
    beyond = False
    for row, one in zip(grid, shown, strict=True):
        for place, (axes, (column, own)) in enumerate(zip(row, found.items(), strict=True)):
            for level, name in own.items():
                known = [(k, each) for k, each in enumerate(one["arms"].get(name, []), start=1) if each is not None]
                shift = 0.06 * (levels.index(level) - (len(levels) - 1) / 2)
                beyond |= curve(axes, known, shift, looks[level], depths.get(name))
            head = f"{label(column, 34, 2)}\n" if one is shown[0] else ""
            axes.set_title(head + label(one["title"], 38, 2), fontsize=9)
            if not place:
                axes.set_ylabel(label(one["unit"], 26, 2), fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            tidy(axes)
    for axes in grid[-1]:
        axes.set_xlabel("draft step", fontsize=9)
    legend(figure, levels, [looks[level] for level in levels], [hollow()] if beyond else [])
    save(figure, path)
