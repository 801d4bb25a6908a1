"""One figure: what is kept under every condition, by group, with its interval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.evaluation.style import GREY, escape, style
from specdec.files import staged

_SPREAD = 0.4  # of a row, that the drafters of a condition share

Series = dict[int, dict[str, dict[str, Any] | None]]
"""Intervals by the drafter's place and the condition's name."""


def plot(records: Sequence[dict[str, Any]], compared: dict[str, Any] | None, path: Path | str) -> None:
    """Draw what every drafter keeps, and how several differ, as a PNG at ``path``, whole or not at all.

    Args:
        compared: as of :func:`specdec.robustness.record.comparison`; None for one drafter.
    """
    conditions = [one for one in records[0]["conditions"][1:] if one["skipped"] is None]
    places, names, heads, dividers = _rows(conditions)
    rows = len(places) + len(heads)
    panels = _panels(records, compared)
    height = max(4.0, 1.9 + 0.19 * rows * (1 + 0.35 * (len(records) - 1)))
    figure = Figure(figsize=(3 + 5 * len(panels), height), dpi=110)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    axes = figure.subplots(1, len(panels), sharey=True)
    for panel, (label, none, series) in zip(axes, panels, strict=True):
        _draw(panel, series, dict(zip((one["name"] for one in conditions), places, strict=True)), none)
        panel.set_xlabel(f"{label}\n95 % interval over prompts")
        for y in dividers:
            panel.axhline(y, color=GREY, linewidth=0.6)
    axes[0].set_yticks([*places, *heads], [*names, *heads.values()])
    for tick, text in zip(axes[0].get_yticklabels(), [*names, *heads.values()], strict=True):
        tick.set_fontweight("bold" if text in heads.values() else "normal")
    axes[0].set_ylim(max([*places, *heads], default=0) + 0.8, -0.8)
    handles = [
        Line2D([], [], markersize=7, label=escape(f"{one['drafter']['label']}: clean {_clean(one)}"), **_look(row))
        for row, one in enumerate(records)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(len(handles), 3)), frameon=False)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def _rows(conditions: Sequence[dict[str, Any]]) -> tuple[list[int], list[str], dict[int, str], list[float]]:
    """Where each condition stands, their names, where a group's heading stands, and lines between groups."""
    places: list[int] = []
    names: list[str] = []
    heads: dict[int, str] = {}
    dividers: list[float] = []
    y, group = 0, None
    for one in conditions:
        if one["group"] != group:
            if group is not None:
                dividers.append(y - 0.5)
            group = one["group"]
            heads[y] = group
            y += 1
        places.append(y)
        names.append(one["title"])
        y += 1
    return places, names, heads, dividers


def _panels(records: Sequence[dict[str, Any]], compared: dict[str, Any] | None) -> list[tuple[str, float, Series]]:
    """Label, where nothing is lost, and what is drawn, of each."""

    def own(share: str) -> Series:
        return {row: {c["name"]: c[share] for c in one["conditions"][1:]} for row, one in enumerate(records)}

    panels = [
        ("acceptance length kept (% of clean)", 100.0, own("length_kept")),
        ("accepted drafts kept (% of clean)", 100.0, own("drafts_kept")),
    ]
    if compared:
        less = {
            row: {c["name"]: c["drafts_kept"] for c in one["conditions"]}
            for row, one in enumerate(compared["differences"], start=1)
        }
        first = escape(records[0]["drafter"]["label"])
        panels.append((f"accepted drafts kept, less those of {first} (points)", 0.0, less))
    return panels


def _draw(axes: Axes, series: Series, places: dict[str, int], none: float) -> None:
    ends, begins = [none + 10], [0.0 if none else -10.0]
    for order, (row, own) in enumerate(series.items()):
        offset = _SPREAD * (order / (len(series) - 1) - 0.5) if len(series) > 1 else 0.0
        for name, place in places.items():
            found = own[name]
            if found is None:
                continue
            mean = 100 * found["mean"]
            low, high = (mean if found[key] is None else 100 * found[key] for key in ("low", "high"))
            bar = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            axes.errorbar([mean], [place + offset], xerr=bar, capsize=2, markersize=5, elinewidth=1.3, **_look(row))
            ends.append(high)
            begins.append(low)
    axes.axvline(none, color="black", linewidth=1.1, linestyle="--")
    axes.set_xlim(min(begins) - 3, max(ends) + 3)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _look(row: int) -> dict[str, Any]:
    """Every second one is hollow, so that a print in grey tells them apart."""
    found = style(row)
    return found | {"linestyle": "", "markerfacecolor": "white" if row % 2 else found["color"]}


def _clean(record: dict[str, Any]) -> str:
    found = record["conditions"][0]["acceptance_length"]
    return "-" if found is None else f"acceptance length {found['mean']:.2f}"
