"""One figure: what is kept under every condition, by group, with its interval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.evaluation.style import escape, style
from specdec.files import staged

_GREY = "#9A9A9A"
_PANELS = (
    ("length_kept", "acceptance length kept (% of clean)"),
    ("drafts_kept", "accepted drafts kept (% of clean)"),
)
_SPREAD = 0.5  # of a row, that the drafters of a condition share


def plot(records: Sequence[dict[str, Any]], path: Path | str) -> None:
    """Draw what every drafter keeps as a PNG at ``path``, whole or not at all."""
    conditions = [one for one in records[0]["conditions"][1:] if one["skipped"] is None]
    places, names, heads, dividers = _rows(conditions)
    rows = len(places) + len(heads)
    figure = Figure(figsize=(13, max(4.0, 1.9 + 0.19 * rows * (1 + 0.35 * (len(records) - 1)))), dpi=110)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (share, label) in zip(axes, _PANELS, strict=True):
        _panel(panel, records, conditions, places, share)
        panel.set_xlabel(f"{label}\n95 % interval over prompts")
        for y in dividers:
            panel.axhline(y, color=_GREY, linewidth=0.6)
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


def _panel(
    axes: Axes,
    records: Sequence[dict[str, Any]],
    conditions: Sequence[dict[str, Any]],
    places: Sequence[int],
    share: str,
) -> None:
    ends, begins = [110.0], [0.0]
    for row, one in enumerate(records):
        own = {condition["name"]: condition[share] for condition in one["conditions"]}
        offset = _SPREAD * (row / (len(records) - 1) - 0.5) if len(records) > 1 else 0.0
        for place, condition in zip(places, conditions, strict=True):
            found = own[condition["name"]]
            if found is None:
                continue
            mean = 100 * found["mean"]
            low, high = (mean if found[key] is None else 100 * found[key] for key in ("low", "high"))
            bar = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            axes.errorbar([mean], [place + offset], xerr=bar, capsize=2, markersize=5, elinewidth=1.3, **_look(row))
            ends.append(high)
            begins.append(low)
    axes.axvline(100, color="black", linewidth=1.1, linestyle="--")
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
