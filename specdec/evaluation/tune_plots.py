"""The figures of ``specdec tune``: the speed of every draft shape by batch size, and what a cost model says of chains.

A target pass with K drafts takes as long as one without and K times ``c`` of it, where ``c`` is the time of one draft
over that of a verification. It commits tau(K) tokens, so that the speed-up over plain decoding is tau(K) / (1 + c K):
Leviathan et al., Theorem 3.8 (https://arxiv.org/abs/2211.17192). tau(K) is 1 and the joint acceptance at positions 1 to
K, which the deepest chain has.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from specdec.decoding import Chain, parse_shape
from specdec.report.plots import (
    DOUBLE,
    GREY,
    SINGLE,
    PaperFigure,
    Point,
    label,
    paper_style,
    save_figure,
    shifts,
    style,
)

Json = dict[str, Any]
SPEED = "speed.png"
COST = "cost_model.png"
SPEEDUP = "speed-up over plain decoding"
OF_SPEED = "Speed of each draft shape by batch size, with 95 % intervals over prompts. Dashed: plain decoding."
OF_COST = (
    "Speed-up of chains, with 95 % intervals over prompts, and the cost model: tokens per target pass over 1 + c K. "
    "c is the measured time of a draft over that of a verification. Points below the line: a verification takes longer "
    "than a plain pass, or time goes elsewhere."
)


def cost_model(results: Sequence[Json]) -> Json | None:
    """Return ``draft_cost`` (c, the time of one draft over that of a verification) and ``speedup`` of chains of 0, 1,
    ... drafts by the model; None where no chain has times.

    Args:
        results: of one batch size, as :func:`shape_summary` gives them.
    """
    chains = {
        depth: result
        for depth, result in _chains(results).items()
        if result["pass_time"]["draft_ms"] and result["pass_time"]["verify_ms"]
    }
    if not chains:
        return None
    drafting = sum(result["pass_time"]["draft_ms"]["mean"] for result in chains.values())
    verifying = sum(
        depth * result["pass_time"]["verify_ms"]["mean"] for depth, result in chains.items()
    )
    cost = drafting / verifying
    joint = chains[max(chains)]["accepted_per_position"]["joint"]
    tokens_per_pass = accumulate(joint, initial=1.0)
    return {
        "draft_cost": cost,
        "speedup": [tokens / (1 + cost * drafts) for drafts, tokens in enumerate(tokens_per_pass)],
    }


def _chains(results: Sequence[Json]) -> dict[int, Json]:
    """Return the results of chains by their depth."""
    shapes = [(parse_shape(result["shape"]), result) for result in results]
    return {shape.depth: result for shape, result in shapes if isinstance(shape, Chain)}


@paper_style()
def plot_tuning(batches: Sequence[Json], folder: Path) -> list[tuple[str, str]]:
    """Draw what was measured at all batch sizes; return the files and captions."""
    _plot_speed(batches, folder / SPEED)
    modeled = [batch for batch in batches if batch["cost_model"]]
    if not modeled:
        return [(SPEED, OF_SPEED)]
    _plot_cost(modeled, folder / COST)
    return [(SPEED, OF_SPEED), (COST, OF_COST)]


def _batch(batch: Json) -> str:
    return f"batch size {batch['batch']}"


def _plot_speed(batches: Sequence[Json], path: Path) -> None:
    shapes = sorted(
        {result["shape"]: parse_shape(result["shape"]) for result in batches[0]["results"]}.items(),
        key=lambda pair: (not isinstance(pair[1], Chain), pair[1].depth, pair[1].nodes_drafted),
    )
    names = [name for name, _ in shapes]
    paper = PaperFigure(2, 2, 0.7 + max(0.2, 0.1 * len(batches)) * len(names), together=True)
    labels = [label(name, 32) for name in names]
    speedups = paper.dots("Speed-up", f"{SPEEDUP} (times)", "draft shape", labels, 1.0)
    rates = paper.dots("Speed", "tokens per second", "draft shape", labels)
    for number, batch in enumerate(batches):
        shift = shifts(len(batches), 0.25, 0.75)[number]
        look = style(number)
        for result in batch["results"]:
            name = result["shape"]
            height = names.index(name) + shift
            speedup = Point(result["speedup"], **result["speedup_interval"])
            speedups.dot(_batch(batch), name, height, speedup, look)
            rate = Point(
                result["tokens_per_second"]["speculative"],
                **result["tokens_per_second_interval"]["speculative"],
            )
            rates.dot(_batch(batch), name, height, rate, look)
        plain = batch["results"][0]["tokens_per_second"]["plain"]
        rates.axes.axvline(plain, color=look["color"], linestyle="--", linewidth=0.7, zorder=1)
        rates.record(f"{_batch(batch)}, plain", "plain decoding", Point(plain))
    paper.legend(
        [Line2D([], [], label=_batch(batch), **style(n)) for n, batch in enumerate(batches)]
    )
    save_figure(paper, path)


def _plot_cost(batches: Sequence[Json], path: Path) -> None:
    columns = min(3, len(batches))
    paper = PaperFigure(len(batches), columns, 1.9, DOUBLE if columns > 1 else SINGLE)
    for number, batch in enumerate(batches):
        model = batch["cost_model"]
        title = f"{_batch(batch)}, c = {model['draft_cost']:.3f}"
        panel = paper.curves(title, SPEEDUP, "drafts per target pass, K")
        panel.line("model", dict(enumerate(model["speedup"])), {"color": GREY})
        points = {
            depth: Point(result["speedup"], **result["speedup_interval"])
            for depth, result in sorted(_chains(batch["results"]).items())
        }
        panel.curve("measured", points, {**style(number), "linestyle": ""})
        panel.axes.axhline(1.0, color=GREY, linestyle="--", linewidth=0.7, zorder=1)
    paper.legend(
        [
            Line2D([], [], label="cost model", color=GREY),
            Line2D([], [], label="measured", color="black", marker="o", linestyle=""),
            Line2D([], [], label="plain decoding", color=GREY, linestyle="--", linewidth=0.7),
        ]
    )
    save_figure(paper, path)
