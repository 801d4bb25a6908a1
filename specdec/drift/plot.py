"""One picture of one or several drafters: every quantity by draft step, in small multiples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from specdec.drift.results import Document
from specdec.evaluation.style import LINES, escape, style
from specdec.files import staged

PANELS = (
    ("sink_mass", "prompt_mass", "recent_mass", "own_mass"),
    ("entropy", "state_rms", "out_rms", "cosine"),
    ("feature_cosine", "kl", "conditional_acceptance", "sources"),
)
TITLES = {
    "recent_mass": "Attention on recent text",
    "state_rms": "RMS of the recurrent state",
    "out_rms": "RMS before the output norm",
    "cosine": "Cosine, steps k and k - 1",
    "feature_cosine": "Cosine with the true feature",
    "kl": "KL(target || drafter)",
}
FORMATS = ("png", "pdf")
_WIDE = 8.0  # a largest value so many times the smallest is shown on a logarithmic axis
_PROMPTS = 5  # with chains that reach a step, below which it is left out
_LEAST = 0.1  # the least that a linear axis shows
_GREY = "#707070"


def plot(found: Sequence[tuple[str, Document]], stem: Path) -> list[Path]:
    """Draw drafters, by their labels, as ``STEM.png`` and ``STEM.pdf``, each whole or not at all.

    Markers are hollow beyond a drafter's trained depth; where all have the same, a dotted line marks it. Steps that
    chains of fewer than five prompts reach are left out.

    Raises:
        ValueError: there is nothing to draw, or a file cannot be written.
    """
    if not found:
        raise ValueError(f"{stem}: there is no drafter to plot")
    figure = Figure(figsize=(13, 8.4), dpi=130)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    axes: dict[str, Axes] = figure.subplot_mosaic([list(row) for row in PANELS])
    documents = [document for _, document in found]
    for name, panel in axes.items():
        if name == "sources":
            _sources(panel, documents)
        else:
            _series(panel, documents, name)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=_handles(found), loc="outside lower center", ncols=4, frameon=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out now, for all formats
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # letters stay letters, as journals ask
        return [_saved(figure, stem.with_name(f"{stem.name}.{kind}"), kind) for kind in FORMATS]


def _saved(figure: Figure, path: Path, kind: str) -> Path:
    with staged(path) as temporary:
        figure.savefig(temporary, format=kind)
    return path


def _series(axes: Axes, documents: Sequence[Document], name: str) -> None:
    deepest = max(document["depths"] for document in documents)
    means = []
    for row, document in enumerate(documents):
        one, look = document["series"][name], _look(row)
        steps = [k for k, weights in enumerate(one["weights"], start=1) if _is_told(weights)]
        at = [k + _aside(row, len(documents)) for k in steps]
        mean, bars = _bars(one, [k - 1 for k in steps])
        means += mean
        axes.errorbar(
            at, mean, yerr=bars, capsize=2, elinewidth=1, linewidth=1.4, markersize=0, **look | {"marker": ""}
        )
        trained = document["trained_depth"]
        for beyond in (False, True):
            chosen = [i for i, k in enumerate(steps) if (trained is not None and k > trained) == beyond]
            face = "white" if beyond else look["color"]
            axes.plot([at[i] for i in chosen], [mean[i] for i in chosen], linestyle="", marker=look["marker"],
                      markersize=5.5, color=look["color"], markerfacecolor=face, zorder=3)  # fmt: skip
    depths = {document["trained_depth"] for document in documents}
    common = depths.pop() if len(depths) == 1 else None
    if common is not None and common < deepest:
        axes.axvline(common + 0.5, color=_GREY, linestyle=":", linewidth=1.2)
    kind = documents[0]["series"][name]
    axes.set_title(TITLES.get(name, kind["title"]), fontsize=11)
    axes.set_ylabel(kind["unit"])
    axes.set_xlabel("draft step k")
    axes.set_xlim(0.6, deepest + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if name == "conditional_acceptance":
        axes.set_ylim(-0.03, 1.03)
    elif "cosine" in name:
        axes.set_ylim(min(-0.05, *(mean - 0.1 for mean in means)), 1.05)
    else:
        _range(axes, means, logarithmic="rms" in name)


def _is_told(weights: Sequence[int]) -> bool:
    """Whether enough prompts have chains that reach a step; of few prompts all have to."""
    return sum(weight > 0 for weight in weights) >= min(_PROMPTS, len(weights))


def _sources(axes: Axes, documents: Sequence[Document]) -> None:
    marks = {"aux_rms": "", "normed_aux_rms": "n", "fused_rms": ""}
    names: list[str] = []
    means: list[float] = []
    for row, document in enumerate(documents):
        for source, mark in marks.items():
            one = document["sources"][source]
            labels = [f"{of.removeprefix('boundary ')}{mark}" for of in one["of"]]
            names += [label for label in labels if label not in names]
            at = [names.index(label) + _aside(row, len(documents)) for label in labels]
            mean, bars = _bars(one, range(len(labels)))
            means += mean
            axes.errorbar(
                at, mean, yerr=bars, capsize=2, elinewidth=1, markersize=5.5, **_look(row) | {"linestyle": ""}
            )
    axes.set_title("RMS of the fused sources", fontsize=11)
    axes.set_ylabel("RMS")
    axes.set_xlabel("boundary (n: after its norm)")
    axes.set_xticks(range(len(names)), names, rotation=60 if len(names) > 9 else 0)
    axes.set_xlim(-0.5, len(names) - 0.5)
    _range(axes, means, logarithmic=True)


def _range(axes: Axes, means: Sequence[float], logarithmic: bool) -> None:
    """From zero, or logarithmic where the values may be and are far apart."""
    if logarithmic and means and min(means) > 0 and max(means) > _WIDE * min(means):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        top = max(1.05 * axes.dataLim.y1, _LEAST)
        axes.set_ylim(-0.03 * top, top)


def _bars(one: Document, chosen: Sequence[int]) -> tuple[list[float], Any]:
    mean = [one["mean"][i] for i in chosen]
    ends = [(one["low"][i], one["high"][i]) for i in chosen]
    below = [0.0 if low is None else max(0.0, m - low) for m, (low, _) in zip(mean, ends, strict=True)]
    above = [0.0 if high is None else max(0.0, high - m) for m, (_, high) in zip(mean, ends, strict=True)]
    return mean, [below, above]


def _aside(row: int, rows: int) -> float:
    """Several drafters stand a little beside each other."""
    return 0.0 if rows == 1 else 0.24 * (row / (rows - 1) - 0.5)


def _look(row: int) -> dict[str, Any]:
    return style(row) | {"linestyle": LINES[row % len(LINES)]}


def _handles(found: Sequence[tuple[str, Document]]) -> list[Line2D]:
    handles = [
        Line2D([], [], label=_named(label, document), **_look(row)) for row, (label, document) in enumerate(found)
    ]
    if any(document["trained_depth"] is not None for _, document in found):
        handles.append(Line2D([], [], linestyle="", marker="o", color=_GREY, markerfacecolor="white",
                              label="hollow: beyond the trained depth"))  # fmt: skip
    if any(len(document["prompts"]) > 1 for _, document in found):
        handles.append(Line2D([], [], linestyle="", marker="|", markersize=12, color=_GREY,
                              label="95 % interval over prompts"))  # fmt: skip
    return handles


def _named(label: str, document: Document) -> str:
    depth = document["trained_depth"]
    return escape(label if depth is None else f"{label} (trained to step {depth})")
