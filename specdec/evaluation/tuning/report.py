"""Tuning for people: ``report.md`` and tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.evaluation.tuning.results import PLAIN, SHOWN

_SHAPES = ("Growth", "Acceptance length", "Verify v(N)", "Drafting d*c", "Rest o", "Predicted speed-up")
_TRIALS = ("Batch", "Growth", "Predicted", "Measured", "Error", "Whole calls", "Acceptance length")
_MEANING = """\
Predicted speed-up S = tau / (v(N) + d*c + o), over plain decoding of the same kind and batch size. tau is the
acceptance length, replayed from the drafter's proposals at every place of the answers. v(N) is the time of a pass that
verifies N nodes, the root included, d*c that of the draft steps, o what else drafting takes, all in plain passes.

Measured is the same ratio over the passes of real decoding: tokens per pass times the median of a plain pass over that
of a pass with its drafting. Whole calls is the ratio of new tokens per second with everything: the prompts' passes, the
host's work between passes and places that stay empty at the end of a batch. The error is the prediction's, in percent
of what was measured over passes.
"""


def print_tuning(found: dict[str, Any], console: Console) -> None:
    """Tables and the recommendation."""
    for batch in found["batches"]:
        table = Table(title=_title(batch), title_justify="left")
        _columns(table, _SHAPES)
        for row in _best(batch):
            table.add_row(*row)
        console.print(table)
    table = Table(title="Checked by decoding", title_justify="left")
    _columns(table, _TRIALS)
    for batch in found["batches"]:
        table.add_row(*_trial(batch))
    console.print(table)
    for line in _conclusions(found):
        console.print(line, highlight=False)


def report(found: dict[str, Any], figure: str) -> str:
    """The text of ``report.md``; ``figure`` is the plot's path relative to it."""
    lines = ["# Tuning", "", *(f"- {line}" for line in _conclusions(found)), "", f"![Costs and speed-up]({figure})", ""]
    lines += ["## Checked by decoding", "", *_markdown(_TRIALS, [_trial(batch) for batch in found["batches"]]), ""]
    for batch in found["batches"]:
        costs = batch["costs"]
        lines += [f"## {_title(batch)}", "", *_markdown(_SHAPES, _best(batch)), ""]
        lines += [f"v: {_points(costs['verify'])}. c: {_points(costs['draft_step'])}. o: {costs['rest']:.2f}."]
        lines += [f"Largest misfit of a shape's drafting: {costs['largest_misfit_of_drafting']:.2f}.", ""]
    lines += ["## Meaning", "", _MEANING]
    if found["skipped"]:
        lines += ["## Left out", "", *(f"- {one['prompt_id']}: {one['reason']}" for one in found["skipped"]), ""]
    return "\n".join(lines)


def _columns(table: Table, headings: tuple[str, ...]) -> None:
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "Growth" else "right")


def _title(batch: dict[str, Any]) -> str:
    return f"Batch size {batch['batch']}: a plain pass takes {batch['costs']['plain_pass_ms']:.2f} ms"


def _best(batch: dict[str, Any]) -> list[list[str]]:
    return [
        [
            one["growth"],
            f"{one['acceptance_length']:.2f}",
            f"{one['verify']:.2f}",
            f"{one['drafting']:.2f}",
            f"{one['rest']:.2f}",
            f"{one['speedup']:.2f}x",
        ]
        for one in batch["predictions"][:SHOWN]
    ]


def _trial(batch: dict[str, Any]) -> list[str]:
    trial = batch["trial"]
    return [
        str(batch["batch"]),
        trial["growth"],
        f"{trial['predicted']:.2f}x",
        f"{trial['measured']:.2f}x",
        f"{trial['error_percent']:+.1f} %",
        f"{trial['calls']:.2f}x",
        f"{trial['acceptance_length']:.2f}",
    ]


def _conclusions(found: dict[str, Any]) -> list[str]:
    kind = "on" if found["settings"]["compile"] else "off"
    each = []
    for batch in found["batches"]:
        chosen = f"--growth {batch['recommended']} --compile {kind} --batch_size {batch['batch']}"
        each.append(f"Batch size {batch['batch']}: {chosen if batch['recommended'] else PLAIN}")
    return [*each, f"Break-even batch: {found['break_even']}"]


def _points(points: dict[Any, float]) -> str:
    return ", ".join(f"{at}: {value:.2f}" for at, value in points.items())


def _markdown(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    rule = ["---" if heading == "Growth" else "---:" for heading in headings]
    return [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]
