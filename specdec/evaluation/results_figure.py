"""Draws what ``metrics.json`` of an evaluation holds."""

from pathlib import Path
from typing import Any

from specdec.report.plots import (
    GREY,
    Panel,
    PaperFigure,
    Point,
    label,
    paper_style,
    save_figure,
    shifts,
    style,
)

Json = dict[str, Any]

CAPTION = (
    "Acceptance by draft position, acceptance length and speed of each draft shape, with 95 % intervals over prompts. "
    "Each shape has one color and marker in all panels. Dashed: a target pass without drafts, and plain decoding."
)
PLAIN = "plain decoding"


@paper_style()
def plot(metrics: Json, path: Path) -> None:
    """Draw acceptance by position, acceptance length and speed: see :func:`save_figure`."""
    results = metrics["results"]
    baselines = metrics.get("baselines", [])
    plain = _plain_rate(results)
    names = [result["shape"] for result in results]
    names += [baseline["baseline"] for baseline in baselines] + [PLAIN] * (plain is not None)
    labels = [label(name, 20) for name in names]
    lines = sum(1 + name.count("\n") for name in labels)
    paper = PaperFigure(3, 3, max(2.2, 0.7 + 0.15 * lines))
    _plot_positions(paper.curves("Acceptance by position", PASSES, "draft position k"), results)
    lengths = paper.dots("Acceptance length", "tokens per target pass", "draft shape", labels, 1.0)
    for row, result in enumerate(results):
        length = Point.of(result["acceptance_length"])
        lengths.dot("drafting", result["shape"], row, length, style(row))
    speeds = paper.dots(
        "Speed",
        "tokens per second",
        "draft shape",
        [""] * len(names),
        plain.value if plain else None,
    )
    for row, result in enumerate(results):
        speeds.dot("drafting", result["shape"], row, _rate(result, "speculative"), style(row))
    look = {"color": GREY, "marker": "o"}
    for row, baseline in enumerate(baselines, start=len(results)):
        rate = Point(baseline["tokens_per_second"], **baseline["tokens_per_second_interval"])
        speeds.dot("baseline", baseline["baseline"], row, rate, look)
    if plain is not None:
        speeds.dot(PLAIN, PLAIN, len(names) - 1, plain, look)
    save_figure(paper, path)


PASSES = "share of passes with at least k accepted"


def _plot_positions(panel: Panel, results: list[Json]) -> None:
    places = shifts(len(results))
    for row, (result, shift) in enumerate(zip(results, places, strict=True)):
        shares = result["accepted_per_position"]["joint"]
        ends = result["accepted_per_position_interval"]["joint"]
        points = {
            k: Point(share, **interval)
            for k, (share, interval) in enumerate(zip(shares, ends, strict=True), start=1)
        }
        if points:  # the layout engine goes astray over an empty line
            panel.curve(result["shape"], points, style(row), shift)
    panel.axes.set_ylim(-0.03, 1.03)


def _rate(result: Json, kind: str) -> Point:
    rate = result["tokens_per_second"][kind]
    return Point(rate or 0.0, **result["tokens_per_second_interval"][kind])


def _plain_rate(results: list[Json]) -> Point | None:
    """Return the speed of plain decoding, which all shapes are compared with; None where it was not timed."""
    timed = [result for result in results if result["tokens_per_second"]["plain"] is not None]
    return _rate(timed[0], "plain") if timed else None
