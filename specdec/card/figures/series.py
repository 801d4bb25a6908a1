"""Curves over draft steps (drift), over optimizer steps (losses), and tables of shares (robustness)."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.card.figures.page import (
    MOST_TOGETHER,
    Panel,
    Row,
    dots,
    greys,
    hollow,
    legend,
    legend_height,
    line_style,
    note,
    page,
    panels,
    save,
    tidy,
)
from specdec.evaluation.style import GREY, escape, label

Json = dict[str, Any]


def drift(series: Json, depths: dict[str, int | None], order: list[str], path: Path) -> None:
    """One panel for each series: curves, hollow beyond the trained depth, or a table of greys where arms are many."""
    arms = [name for name in order if any(name in one["arms"] for one in series.values())]
    if len(arms) > MOST_TOGETHER:
        return _tables(series, arms, path)
    looks = {name: line_style(number) for number, name in enumerate(arms)}
    columns = min(3, len(series))
    deep, width = -(-len(series) // columns), max(6.4, 3.9 * columns)
    figure = page(width, 2.7 * deep + legend_height(arms, width) + 0.2)
    grid = [axes for row in figure.subplots(deep, columns, squeeze=False) for axes in row]
    for axes in grid[len(series) :]:
        axes.set_visible(False)
    beyond = False
    for axes, one in zip(grid, series.values(), strict=False):
        for number, name in enumerate(arms):
            known = [(k, each) for k, each in enumerate(one["arms"].get(name, []), start=1) if each is not None]
            beyond |= curve(axes, known, 0.06 * (number - (len(arms) - 1) / 2), looks[name], depths.get(name))
        axes.set_title(label(one["title"], 44, 2), fontsize=9)
        axes.set_ylabel(label(one["unit"], 32, 2), fontsize=9)
        axes.set_xlabel("draft step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    legend(figure, arms, [looks[name] for name in arms], [hollow()] if beyond else [])
    return save(figure, path)


def curve(axes: Axes, known: list[tuple[int, Json]], shift: float, look: Json, depth: int | None) -> bool:
    """Draw a line with its intervals; whether any of it is beyond the trained depth."""
    axes.plot([k + shift for k, _ in known], [each["value"] for _, each in known], **{**look, "marker": ""})
    beyond = False
    for k, each in known:
        beyond = depth is not None and k > depth
        bar = None if each["low"] is None else [[each["value"] - each["low"]], [each["high"] - each["value"]]]
        plain = {**look, "linestyle": "", "markerfacecolor": "white" if beyond else look["color"]}
        axes.errorbar([k + shift], [each["value"]], yerr=bar, capsize=2, elinewidth=1, **plain)
    return beyond


def _tables(series: Json, arms: list[str], path: Path) -> None:
    """The series below each other, a row for each arm."""
    deepest = max(len(found) for one in series.values() for found in one["arms"].values())
    names = [label(name, 44, 3) for name in arms]
    tall = sum(0.16 + 0.14 * (name.count("\n") + 1) for name in names)
    figure = page(4.2 + 0.75 * deepest, len(series) * (tall + 0.75))
    for axes, one in zip(figure.subplots(len(series), squeeze=False)[:, 0], series.values(), strict=True):
        rows = [[each and each["value"] for each in one["arms"].get(name, [])] for name in arms]
        full = [[*row, *[None] * (deepest - len(row))] for row in rows]
        greys(axes, full, names, [str(k) for k in range(1, deepest + 1)])
        axes.set_title(f"{label(one['title'], 60, 2)} ({escape(one['unit'])}), by draft step", fontsize=9)
    save(figure, path)


def kept(found: Json, order: list[str], path: Path) -> None:
    """What share of its clean acceptance each arm keeps under every condition: with intervals, or in greys where arms
    are many."""
    arms = [name for name in order if name in found["arms"]]
    names = [name for name, one in found["conditions"].items() if not one["clean"]]
    titles = [found["conditions"][name]["title"] for name in names]
    if len(arms) <= MOST_TOGETHER:
        both = list(zip(names, titles, strict=True))
        axis = "acceptance length,\nover that on clean prompts"
        own = [[_row(title, found["arms"][arm].get(name)) for name, title in both] for arm in arms]
        return dots([Panel(arm, rows, axis, at=1.0) for arm, rows in zip(arms, own, strict=True)], path, same=True)
    rows = [[_row("", found["arms"][arm].get(name)).value for name in names] for arm in arms]
    labels, heads = [label(arm, 44, 3) for arm in arms], [label(title, 14, 4) for title in titles]
    tall = sum(0.18 + 0.14 * (name.count("\n") + 1) for name in labels)
    figure = page(4.2 + 1.05 * len(names), tall + 1.2)
    axes = figure.subplots()
    greys(axes, rows, labels, heads)
    axes.set_title("acceptance length, over that on clean prompts", fontsize=9)
    return save(figure, path)


def _row(title: str, found: Json | None) -> Row:
    if found is None or found.get("skipped"):
        return Row(title, None, None, None)
    return Row(title, found["kept"]["value"], found["kept"]["low"], found["kept"]["high"])


def losses(curves: Json, base: str, path: Path) -> None:
    """Training loss by optimizer step: every seed a line, the arms in panels where there are many."""
    arms = [name for name, runs in curves.items() if any(runs.values())]
    together = len(arms) <= MOST_TOGETHER
    foot = legend_height(arms, 7.6) if together else 0.5
    figure, flat = panels(1 if together else len(arms), 3.4 if together else 2.2, extra=foot)
    if together:
        figure.set_size_inches(7.6, 3.4 + foot)
    looks = [line_style(number) for number in range(len(arms))]
    for number, name in enumerate(arms):
        axes = flat[0 if together else number]
        if not together:
            axes.set_title(label(name, 36, 3), fontsize=8)
            for points in curves[base].values() if name != base and base in curves else ():
                axes.plot(*zip(*points, strict=True), color=GREY, linewidth=0.7)
        for points in curves[name].values():
            if points:
                axes.plot(*zip(*points, strict=True), **{**looks[number], "linewidth": 1.1, "markevery": 0.12})
    if together:
        flat[0].set_xlabel("optimizer step")
        flat[0].set_ylabel("training loss (nats; a line a seed)")
        legend(figure, arms, looks)
    else:
        figure.supxlabel("optimizer step", fontsize=10)
        figure.supylabel("training loss (nats; a line a seed)", fontsize=10)
        note(figure, [Line2D([], [], color=GREY, linewidth=1.2, label="the baseline")])
    save(figure, path)
