"""``specdec inspect``: what a run would train on: samples with the supervised tokens marked, lengths, losses.

The options are those of specdec fit: specdec inspect --config RUN.yaml shows what specdec fit --config RUN.yaml would
train on. Only the target's tokenizer is loaded; --target NAME is short for --model.target.source NAME. The exit status
is 1 if there is nothing to learn from.

Example: specdec inspect --target Qwen/Qwen3-0.6B --data ChatData --data.train chats.jsonl
"""

import argparse
import sys
from collections import Counter
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from specdec.data import ChatData, Document, TokenData
from specdec.data.chat import MaskError
from specdec.evaluation.style import ReportTable, print_report
from specdec.fit import Configured, configured
from specdec.training.run_directory import RunDirectory
from specdec.utils.command import fit_options
from specdec.utils.files import write_json

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SUPERVISED, PLAIN = "bold green", "dim"
BRACKETS = ("【", "】")  # where there is no colour
LINES = {  # of the overview: figure and label
    "conversations": "conversations",
    "silent": "  without an answer, dropped",
    "cut_away": "  whose answers were all cut off, dropped",
    "cut": "  cut to data.seq_len",
    "tokens_lost": "tokens lost to the cut",
    "supervised_lost": "supervised tokens lost to the cut",
    "documents": "documents",
    "tokens": "tokens",
    "supervised": "supervised tokens",
    "supervised_share": "supervised share",
    "supervised_runs": "supervised runs",
    "rows": "packed rows",
    "padding_share": "padding",
}


def main(argv: list[str]) -> int:
    """Run the command; status 1 if there is nothing to learn from, or nothing but.

    Raises:
        ValueError: an argument, the data or the tokenizer is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="specdec inspect", description=__doc__, allow_abbrev=False, epilog="all other options are specdec fit's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=3, help="documents to show")
    parser.add_argument("--sample_tokens", type=int, default=600, help="tokens of each to show")
    parser.add_argument("--json", metavar="FILE", help="a file for all figures")
    own, args = parser.parse_known_args(argv)
    cli = configured(Configured, "fit", fit_options(args), RunDirectory())
    data, tokenizer = cli.datamodule, cli.model.target_source.load_tokenizer()
    try:
        train, validation = data.documents(tokenizer)
    except MaskError as error:
        sys.stderr.write(f"specdec inspect: refused: {error}\n")
        return 1
    documents = {"train": train, "validation": validation}
    conversations = data.conversations(tokenizer) if isinstance(data, ChatData) else {}
    splits = {name: _split(found, conversations.get(name), data, tokenizer) for name, found in documents.items()}
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    marks = ("", "") if console.is_terminal and console.color_system else BRACKETS
    for number, document in enumerate(train[: own.samples], start=1):
        console.print(sample(document, tokenizer, f"training document {number}", own.sample_tokens, marks))
    print_report(_tables(splits), console=console)
    if own.json:
        write_json(own.json, {"data": type(data).__name__, "seq_len": data.seq_len, "splits": splits})
    return 0


def _split(documents: list[Document], encoded: Any, data: TokenData, tokenizer: Any) -> dict[str, Any]:
    """The figures of one split; of conversations their lengths before the cut, and what that and silence cost."""
    lengths_N = torch.tensor([len(one.ids_T) for one in documents])
    supervised_N = torch.tensor([int(one.loss_mask_T.sum()) for one in documents])
    ends = Counter(token for one in documents for token in _run_ends(one))
    rows, tokens, supervised = data.pack(documents), int(lengths_N.sum()), int(supervised_N.sum())
    lost = {}
    if encoded is not None:
        lost, lengths_N, supervised_N = encoded.lost, encoded.lengths_N, encoded.supervised_N
    return lost | {
        "documents": len(documents),
        "tokens": tokens,
        "supervised": supervised,
        "supervised_share": supervised / max(tokens, 1),
        "supervised_runs": ends.total(),
        "runs_end_with": {tokenizer.decode([token]): n / ends.total() for token, n in ends.most_common(5)},
        "lengths": _quantiles(lengths_N),
        "supervised_lengths": _quantiles(supervised_N),
        "rows": len(rows.ids_BT),
        "padding_share": float((rows.documents_BT < 0).float().mean()),
    }


def _run_ends(document: Document) -> list[int]:
    """The last token of each supervised run."""
    mask_T = document.loss_mask_T
    return document.ids_T[mask_T & ~torch.cat([mask_T[1:], mask_T.new_zeros(1)])].tolist()


def _quantiles(values_N: Tensor) -> dict[str, float]:
    found = values_N.double().quantile(torch.tensor(QUANTILES, dtype=torch.double), interpolation="nearest")
    return {f"{q:.0%}": round(value, 4) for q, value in zip(QUANTILES, found.tolist(), strict=True)}


def sample(document: Document, tokenizer: Any, title: str, most: int, marks: tuple[str, str]) -> Panel:
    """A document's first tokens, the supervised ones in colour and between the marks."""
    text, pairs = Text(), list(zip(document.ids_T.tolist(), document.loss_mask_T.tolist(), strict=True))
    for supervised, run in groupby(pairs[:most], key=lambda pair: pair[1]):
        words = tokenizer.decode([token for token, _ in run])
        text.append(words.join(marks) if supervised else words, SUPERVISED if supervised else PLAIN)
    if len(pairs) > most:
        text.append(f" … {len(pairs) - most} more tokens", "italic")
    return Panel(text, title=title, title_align="left")


def _tables(splits: dict[str, dict[str, Any]]) -> list[ReportTable]:
    """Everything but the samples."""
    rows = [
        [label, *(format(split[key], ".1%" if "share" in key else ",") for split in splits.values())]
        for key, label in LINES.items()
        if all(key in split for split in splits.values())
    ]
    ends = (", ".join(f"{text!r} {n:.0%}" for text, n in split["runs_end_with"].items()) for split in splits.values())
    lengths = [
        [f"{name}, {what}", *(f"{x:,.0f}" for x in split[key].values())]
        for name, split in splits.items()
        for key, what in (("lengths", "tokens"), ("supervised_lengths", "supervised"))
    ]
    return [
        ReportTable("what is trained on", ["", *splits], [*rows, ["runs end with", *ends]]),
        ReportTable("lengths", ["quantiles", *splits["train"]["lengths"]], lengths),
    ]
