"""Training data for the eye: samples with what is supervised in colour, and tables."""

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec.data import Document
from specdec.inspection.figures import Record

SUPERVISED, PLAIN = "bold green", "dim"
BRACKETS = ("【", "】")  # where there is no colour
WIDTH = 40  # of a histogram's longest bar


def sample(document: Document, tokenizer: Any, title: str, most: int, marks: tuple[str, str]) -> Panel:
    """A document's first tokens, the supervised ones in colour and between the marks."""
    text = Text()
    pairs = list(zip(document.ids_T.tolist(), document.loss_mask_T.tolist(), strict=True))
    for supervised, run in groupby(pairs[:most], key=lambda pair: pair[1]):
        words = tokenizer.decode([token for token, _ in run])
        text.append(words.join(marks) if supervised else words, SUPERVISED if supervised else PLAIN)
    if len(pairs) > most:
        text.append(f" … {len(pairs) - most} more tokens", "italic")
    return Panel(text, title=title, title_align="left")


def tables(record: Record) -> RenderableType:
    """Everything but the samples."""
    splits: dict[str, Record] = record["splits"]
    parts: list[RenderableType] = [_overview(splits, record["seq_len"]), _quantiles(splits)]
    parts += [_histogram(name, split, record["seq_len"]) for name, split in splits.items() if name == "train"]
    if "layouts" in record:
        found = ", ".join(f"{name} {count:,}" for name, count in record["layouts"].items())
        parts.append(Text(f"layouts of the rows: {found}"))
    return Group(*parts)


def _overview(splits: dict[str, Record], seq_len: int) -> Table:
    out = Table("", *splits, title="what is trained on", title_justify="left")

    def line(label: str, key: str, form: str) -> None:
        if any(key in split for split in splits.values()):
            out.add_row(label, *(format(split[key], form) if key in split else "-" for split in splits.values()))

    line("conversations", "conversations", ",")
    line("  without an answer, dropped", "silent", ",")
    line("  whose answers were all cut off, dropped", "cut_away", ",")
    line(f"  cut to {seq_len} tokens", "cut", ",")
    line("tokens lost to the cut", "tokens_lost", ",")
    line("supervised tokens lost to the cut", "supervised_lost", ",")
    line("documents", "documents", ",")
    line("tokens", "tokens", ",")
    line("supervised tokens", "supervised", ",")
    line("supervised share", "supervised_share", ".1%")
    line("supervised runs per document", "supervised_runs_of_documents", ".2f")
    out.add_row("  which end with", *(_shares(split["runs_end_with"]) for split in splits.values()))
    line("packed rows", "rows", ",")
    line("padding", "padding_share", ".1%")
    return out


def _shares(found: dict[str, float]) -> Text:
    return Text("\n".join(f"{text!r} {share:.1%}" for text, share in found.items()))


def _quantiles(splits: dict[str, Record]) -> Table:
    first = next(iter(splits.values()))
    out = Table("quantiles", *first["lengths"], title="lengths", title_justify="left")
    for name, split in splits.items():
        for label, key, form in (
            ("tokens", "lengths", ",.0f"),
            ("supervised", "supervised_lengths", ",.0f"),
            ("supervised share", "supervised_share_of_documents", ".1%"),
        ):
            out.add_row(f"{name}, {label}", *(format(value, form) for value in split[key].values()))
    return out


def _histogram(name: str, split: Record, seq_len: int) -> Table:
    out = Table("up to", "", "", title=f"{name}: tokens before the cut to {seq_len}", title_justify="left")
    most = max(count for _, count in split["histogram"])
    for end, count in split["histogram"]:
        style = "yellow" if end // 2 >= seq_len else ""
        out.add_row(f"{end:,}", Text("█" * round(WIDTH * count / most), style), f"{count:,}", style=style)
    return out
