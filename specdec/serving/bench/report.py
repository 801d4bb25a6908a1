"""The results as a table on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

HEADINGS = (
    "Users", "", "Tokens/s per user", "Tokens/s of all", "First token, ms", "Between tokens, ms", "Acceptance length",
    "by position", "Identical outputs",
)  # fmt: skip
CAPTION = (
    "latencies: median and 95th percentile over requests; by position: share of passes that accepted so many drafts; "
    "x: times the same requests without the drafter"
)


def print_bench(found: Mapping[str, Any], console: Console) -> None:
    """Show ``bench.json``."""
    table = Table(title=f"Bench of {found['engine']}", caption=CAPTION)
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column == 1 else "right")
    for level in found["levels"]:
        ratio = level["ratio"]
        same = f"{ratio['identical_outputs']} of {ratio['compared_outputs']}" if ratio else "-"
        if ratio and not ratio["compared_outputs"]:
            same = "not compared"
        table.add_row(str(level["concurrency"]), "served", *_row(level["served"], ratio), same)
        if level["baseline"]:
            table.add_row("", "baseline", *_row(level["baseline"], None), "")
    console.print(table)


def _row(one: Mapping[str, Any], ratio: Mapping[str, Any] | None) -> list[str]:
    speeds = [
        f"{one['tokens_per_second'][name]:,.1f}" + (f" ({ratio[name]:.2f}x)" if ratio else "")
        for name in ("user", "total")
    ]
    latencies = [_spread(one[name]) for name in ("first_token_seconds", "inter_token_seconds")]
    acceptance = one["acceptance"]
    if not acceptance:
        return [*speeds, *latencies, "-", "-"]
    joint = " ".join(f"{share:.2f}" for share in acceptance["accepted_per_position"]["joint"])
    return [*speeds, *latencies, f"{acceptance['acceptance_length']:.2f}", joint]


def _spread(value: Mapping[str, float] | None) -> str:
    return f"{1e3 * value['median']:.1f} / {1e3 * value['p95']:.1f}" if value else "-"
