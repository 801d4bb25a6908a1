"""Curves over draft steps (drift), over optimizer steps (losses), and tables of shares (robustness)."""

from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.card.figures.page import MOST_TOGETHER, legend, legend_height, line_style, page, panels, save, tidy
from specdec.evaluation.style import GREY, escape, label

Json = dict[str, Any]


def drift(series: Json, depths: dict[str, int | None], order: list[str], path: Path) -> None:
    """One panel for each series; markers beyond the trained depth are hollow."""
    arms = [name for name in order if any(name in one["arms"] for one in series.values())]
    looks = {name: line_style(number) for number, name in enumerate(arms)}
    columns = min(3, len(series))
    deep = -(-len(series) // columns)
    foot = legend_height(arms, 0)
    figure = page(max(6.4, 3.9 * columns), 2.7 * deep + foot + 0.2)
    grid = [axes for row in figure.subplots(deep, columns, squeeze=False) for axes in row]
    for axes in grid[len(series) :]:
        axes.set_visible(False)
    hollow = False
    for axes, one in zip(grid, series.values(), strict=False):
        for number, (name, found) in enumerate((name, one["arms"].get(name, [])) for name in arms):
            known = [(k, each) for k, each in enumerate(found, start=1) if each is not None]
            shift = 0.06 * (number - (len(arms) - 1) / 2) if len(arms) <= MOST_TOGETHER else 0.0
            if known:
                axes.plot([k + shift for k, _ in known], [each["value"] for _, each in known], **{**looks[name], "marker": ""})
            for k, each in known:
                beyond = bool(depths.get(name)) and k > (depths[name] or 0)
                hollow |= beyond
                plain = {**looks[name], "linestyle": "", "markerfacecolor": "white" if beyond else looks[name]["color"]}
                bar = None
                if each["low"] is not None and len(arms) <= MOST_TOGETHER:
                    bar = [[each["value"] - each["low"]], [each["high"] - each["value"]]]
                axes.errorbar([k + shift], [each["value"]], yerr=bar, capsize=2, elinewidth=1, **plain)
        axes.set_title(label(one["title"], 44, 2), fontsize=9)
        axes.set_ylabel(escape(one["unit"]), fontsize=9)
        axes.set_xlabel("draft step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    look = {"color": "#404040", "marker": "o", "markerfacecolor": "white", "linestyle": ""}
    notes = [Line2D([], [], label="beyond the trained depth", **look)] if hollow else []
    legend(figure, arms, [looks[name] for name in arms], notes)
    save(figure, path)


def losses(curves: Json, base: str, path: Path) -> None:
    """Training loss by optimizer step: every seed a line, the arms in panels where there are many."""
    arms = [name for name, runs in curves.items() if any(runs.values())]
    together = len(arms) <= MOST_TOGETHER
    foot = legend_height(arms, 0) if together else 0.5
    figure, flat = panels(1 if together else len(arms), 3.4 if together else 2.1, extra=foot)
    if together:
        figure.set_size_inches(7.6, 3.4 + foot)
    looks = [{**line_style(number), "marker": ""} for number in range(len(arms))]
    for number, name in enumerate(arms):
        axes = flat[0 if together else number]
        if not together:
            axes.set_title(label(name, 30, 2), fontsize=9)
            for points in curves[base].values() if name != base and base in curves else ():
                axes.plot(*zip(*points, strict=True), color=GREY, linewidth=0.7)
        for points in curves[name].values():
            if points:
                axes.plot(*zip(*points, strict=True), **{**looks[number], "linewidth": 1.1})
    if together:
        flat[0].set_xlabel("optimizer step")
        flat[0].set_ylabel("training loss (nats; a line a seed)")
        legend(figure, arms, looks)
    else:
        figure.supxlabel("optimizer step", fontsize=10)
        figure.supylabel("training loss (nats; a line a seed)", fontsize=10)
        legend(figure, [], [], [Line2D([], [], color=GREY, linewidth=1.2, label="the baseline")])
    save(figure, path)


def kept(found: Json, order: list[str], path: Path) -> None:
    """What share of its clean acceptance each arm keeps under every condition, as a table of greys with numbers."""
    arms = [name for name in order if name in found["arms"]]
    names = [name for name, one in found["conditions"].items() if not one["clean"]]
    rows = [[_share(found["arms"][arm].get(name)) for arm in arms] for name in names]
    titles = [label(found["conditions"][name]["title"], 40, 2) for name in names]
    heads = [label(arm, 16, 4) for arm in arms]
    tall = 0.42 * len(names) + 0.17 * max(head.count("\n") + 1 for head in heads) + 1.0
    figure = page(3.6 + 1.25 * max(2, len(arms)), tall)
    axes = figure.subplots()
    most = max(1.0, *(value for row in rows for value in row if value is not None)) if rows else 1.0
    shades = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axes.imshow(shades, cmap="Greys_r", vmin=0.0, vmax=most, aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            ink = "black" if value is None or value > 0.55 * most else "white"
            axes.text(x, y, "-" if value is None else f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(arms)), heads, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), titles, fontsize=9)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("acceptance length, over that of clean prompts")
    save(figure, path)


def _share(found: Json | None) -> float | None:
    return None if found is None or found.get("skipped") else found["kept"]["value"]
