"""What a comparison found, as a table and as JSON."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from specdec.parity.comparison import Row
from specdec.parity.passes import Engine
from specdec.parity.run import Parity


def table(rows: Sequence[Row], dtype: str) -> Table:
    """A line for each pair and place, and one for each depth that differs."""
    title = f"log-probabilities in {dtype}: a difference of up to {rows[0].allowed:g} of their range is rounding"
    out = Table("pair", "place", "depth", "difference", "of the range", "same best token", "verdict", title=title)
    for line in _lines(rows):
        out.add_row(*(escape(cell) for cell in line))
    return out


def engine_table(found: Engine, dtype: str) -> Table:
    """A line for each draft position."""
    title = f"{found.tokens} greedy tokens of vLLM, beside cached decoding in {dtype}"
    out = Table("draft", "passes", "accepted by vLLM", "expected", "verdict", title=title)
    for one in found.positions:
        out.add_row(*(str(cell) for cell in (one.position, one.passes, one.accepted, one.expected, one.verdict)))
    return out


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (pair, place, verdict), group in itertools.groupby(rows, key=lambda row: (row.pair, row.place, row.verdict)):
        run = list(group)
        depths = str(run[0].depth) if len(run) == 1 else f"{run[0].depth} to {run[-1].depth}"
        agree, anchors = sum(row.agree for row in run), sum(row.anchors for row in run)
        gap, share = max(row.gap for row in run), max(row.share for row in run)
        yield [pair, place, depths, f"{gap:.1e}", f"{share:.1e}", f"{agree} of {anchors}", verdict]


def as_json(found: Parity, **about: Any) -> dict[str, Any]:
    """Everything, for ``parity.json``; a difference that is infinite is null."""
    rows = [
        {name: None if value == math.inf else value for name, value in row._asdict().items()}
        | {"equal": row.equal, "verdict": row.verdict}
        for row in found.rows
    ]
    return {
        **about,
        "holds": found.holds,
        "export_not_compared": found.lacking,
        "findings": [finding.text for finding in found.findings],
        "rows": rows,
        "engine": found.engine.told() if found.engine else None,
        "engine_failed": found.failed,
    }
