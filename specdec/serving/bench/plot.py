"""One picture of a bench: what a user gets against what all get together, at every concurrency."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdec.files import staged

# of Okabe and Ito's palette, told apart by the colour-blind
_STYLES: dict[str, dict[str, Any]] = {
    "served": {"color": "#0072B2", "marker": "o"},
    "baseline": {"color": "#9A9A9A", "marker": "s"},
}


def plot(found: Mapping[str, Any], path: Path | str) -> None:
    """Draw ``bench.json`` as a PNG at ``path``, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    figure = Figure(figsize=(7, 5), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for name, style in _STYLES.items():
        levels = [(level["concurrency"], level[name]["tokens_per_second"]) for level in found["levels"] if level[name]]
        if not levels:
            continue
        axes.plot([rate["total"] for _, rate in levels], [rate["user"] for _, rate in levels], label=name, **style)
        for users, rate in levels:
            axes.annotate(f"{users}", (rate["total"], rate["user"]), (5, 5), textcoords="offset points")
    axes.set_xlabel("tokens per second of all users")
    axes.set_ylabel("tokens per second per user")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(0.12)
    axes.set_title("Throughput (numbers: users at a time)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with staged(path) as temporary:
        figure.savefig(temporary, format="png")
