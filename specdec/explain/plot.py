"""The waterfall as a picture: a bar for each step, hanging from the level above."""

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specdec.explain.report import number, title
from specdec.explain.waterfall import OBSERVED
from specdec.files import staged

_TOTAL, _LOSS, _GAIN = "#404040", "#D55E00", "#56B4E9"
_HATCH = {_TOTAL: "", _LOSS: "///", _GAIN: "..."}
_NAME_WIDTH = 24
_LABEL = 0.44  # of the axis, for the labels behind the longest bar


def plot(told: dict[str, Any], path: Path | str) -> None:
    """Draw what ``explain.json`` holds as a PNG at ``path``, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    levels = {level["name"]: level["acceptance_length"] for level in told["levels"]}
    rows = len(told["bars"]) + len(told["beyond"]) + 2
    figure = Figure(figsize=(10, 1.7 + 0.62 * rows), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    axes = figure.subplots()
    names = [title("perfect")]
    _total(axes, 0, levels["perfect"])
    for bar in told["bars"]:
        _step(axes, len(names), levels[bar["from"]]["mean"], bar["loss"])
        names.append(title(bar["to"]))
    _total(axes, len(names), levels[OBSERVED])
    names.append(title(OBSERVED))
    for bar in told["beyond"]:
        _step(axes, len(names), levels[OBSERVED]["mean"], bar["loss"])
        names.append(title(bar["to"]))
    if told["beyond"]:
        at = len(told["bars"]) + 1.5
        axes.axhline(at, color="black", linewidth=0.8, linestyle=":")
        axes.annotate("beside what is observed", (1, at), (-2, -3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", va="top", fontsize=9)  # fmt: skip # noqa: E501
    longest = max(1.2, *(level["mean"] for level in levels.values()))
    axes.set_xlim(1, longest + (longest - 1) * _LABEL)
    axes.set_xticks(range(1, int(longest) + 1))
    axes.set_yticks(range(len(names)), ["\n".join(textwrap.wrap(name, _NAME_WIDTH)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    intervals = any(level["low"] is not None for level in levels.values())
    axes.set_xlabel(
        "tokens per target pass, bonus token included"
        + ("\n(lines: 95 % interval over prompts; of a step that of the difference)" if intervals else "")
    )
    axes.set_title(f"Where acceptance is lost: chains of {told['depth']}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = ((_TOTAL, "acceptance length"), (_LOSS, "lost in this step"), (_GAIN, "won in this step"))
    handles = [Patch(facecolor=colour, hatch=_HATCH[colour], edgecolor="black", label=label) for colour, label in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")


def _total(axes: Axes, row: int, length: dict[str, Any]) -> None:
    _bar(axes, row, 0.0, length["mean"], _TOTAL)
    end = _interval(axes, row, length["mean"], length)
    _label(axes, row, end, number(length))


def _step(axes: Axes, row: int, upper: float, loss: dict[str, Any]) -> None:
    """From the level above to what is left of it."""
    lower = upper - loss["mean"]
    _bar(axes, row, min(upper, lower), abs(loss["mean"]), _LOSS if loss["mean"] >= 0 else _GAIN)
    left = {"low": None, "high": None}
    if loss["low"] is not None:
        left = {"low": upper - loss["high"], "high": upper - loss["low"]}
    end = _interval(axes, row, lower, left)
    axes.plot([upper, upper], [row - 1 + 0.3, row + 0.3], color="black", linewidth=0.8)
    sign = {key: None if value is None else -value for key, value in loss.items()}
    low_high = {"mean": sign["mean"], "low": sign["high"], "high": sign["low"]}
    _label(axes, row, max(end, upper), number(low_high))


def _bar(axes: Axes, row: int, left: float, width: float, colour: str) -> None:
    axes.barh(row, width, left=left, height=0.6, color=colour, hatch=_HATCH[colour], edgecolor="black", linewidth=0.8)


def _interval(axes: Axes, row: int, at: float, found: dict[str, Any]) -> float:
    """Draws it; returns how far it reaches."""
    low, high = found["low"], found["high"]
    if low is None:
        return at
    axes.plot([low, high], [row, row], color="white", linewidth=4, solid_capstyle="butt")
    axes.errorbar([at], [row], xerr=[[max(0, at - low)], [max(0, high - at)]], color="black", capsize=4, elinewidth=1.6)
    return max(at, high)


def _label(axes: Axes, row: int, at: float, text: str) -> None:
    axes.annotate(text, (at, row), (8, 0), textcoords="offset points", va="center")
