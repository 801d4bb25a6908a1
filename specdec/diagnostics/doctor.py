"""``specdec doctor``: a set-up's faults, before it is trained.

The options are those of specdec fit: specdec doctor --config RUN.yaml examines what specdec fit --config RUN.yaml
would train; without any, the quick start's set-up. --drafter examines a saved drafter in the place of a new one, as
specdec import makes it of a published one; --target NAME is short for --model.target.source NAME. --samples shows the
training data instead, for which only the target's tokenizer is loaded. The check setup comes first and reads config and
tokenizer alone; after a fault there the target is not loaded, unless --only names the checks to make. The exit status
is 1 if a fault was found, and 2 if specdec fit would refuse the set-up.

Example: specdec doctor --config run.yaml --only taps masks

Legend: T tokens, N documents.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec.commands.fit import Configured, configured
from specdec.commands.parser import OwnOptions, fit_options
from specdec.data import Document, TokenData
from specdec.diagnostics.doctor_data import masks, taps, template, vocabulary
from specdec.diagnostics.doctor_model import agreement, gradient, inputs
from specdec.diagnostics.doctor_overfit import overfit
from specdec.diagnostics.doctor_setup import (
    CheckResult,
    Finding,
    Findings,
    SetUp,
    first_findings,
    set_up,
    turn_ends,
)
from specdec.training.run_directory import RunDirectory
from specdec.utils.progress import progress
from specdec.utils.text import how_many, printable

CHECKS: dict[str, Callable[[SetUp], Findings]] = {
    "taps": taps, "template": template, "masks": masks, "vocabulary": vocabulary, "gradient": gradient,
    "inputs": inputs, "parity": agreement,
    "overfit": overfit,  # trains the drafter, so nothing comes after it
}  # fmt: skip
FIRST = "setup"  # before the target is loaded
SUPERVISED = "bold green"
PLAIN = "dim"
SHOWN = 600  # tokens of a sample


def doctor(argv: list[str]) -> int:
    """Run the command; status 1 if a fault was found.

    Raises:
        ValueError: an argument is wrong, or ``specdec fit`` would refuse the set-up.
    """
    parser = OwnOptions("doctor", __doc__, "all other options are specdec fit's")
    parser.add_argument("--drafter", metavar="DIR", help="a saved drafter to examine")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="show N training documents, and check nothing"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[FIRST, *CHECKS], help="checks to make, whatever setup finds"
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="for the overfitted sample, at most"
    )
    options, args = parser.parse_known_args(argv)
    if (options.samples or 0) < 0:
        raise ValueError(f"--samples is {options.samples}: it must be 0 or more")
    if options.seconds <= 0:
        raise ValueError(f"--seconds is {options.seconds:g}: it must be above 0")
    args = fit_options(args) or ["--config", "conf/quickstart.yaml"]
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    cli = configured(Configured, "fit", args, RunDirectory())
    if options.samples is not None:
        show_samples(
            cli.datamodule, cli.model.target_source.load_tokenizer(), options.samples, console
        )
        return 0
    chosen = options.only or (FIRST, *CHECKS)
    findings: list[Finding] = []
    if FIRST in chosen:
        findings += named_findings(
            FIRST, first_findings(cli.model, cli.datamodule, options.drafter)
        )
    stops = options.only is None and faulty(findings)
    later = [] if stops else [name for name in CHECKS if name in chosen]
    if later:
        setup = set_up(
            cli.model, cli.datamodule, cli.config["fit"].trainer, options.drafter, options.seconds
        )
        with (
            contextlib.closing(setup.module.source),
            progress("checks", "check", len(later)) as done,
        ):
            for name in later:
                done(0, name)
                findings += run_check(name, setup)
                done(1)
    show(findings, console)
    if stops:
        names = " ".join(CHECKS)
        console.print(
            f"doctor did not load the target: correct the fault above, or run the checks anyway: --only {names}"
        )
    return int(faulty(findings))


def faulty(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is a fault."""
    return any(finding.result is CheckResult.FAULTY for finding in findings)


def run_check(name: str, setup: SetUp) -> list[Finding]:
    """Return the findings of a check that looks at the built set-up."""
    return list(named_findings(name, CHECKS[name](setup)))


def named_findings(name: str, check: Findings) -> Findings:
    """Yield a check's findings, with its name.

    A check that raises ValueError is a fault, since training would end there as well.
    """
    try:
        for finding in check:
            yield finding._replace(check=name)
    except ValueError as error:
        yield Finding("the check could be made", CheckResult.FAULTY, note=str(error), check=name)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of all findings, and a sentence for each one that is not sound, faults first."""
    table = Table("check", "what", "figure", "wanted", "result")
    by_result: dict[CheckResult, list[Finding]] = {result: [] for result in CheckResult}
    for finding in findings:
        by_result[finding.result].append(finding)
        remark = finding.result is CheckResult.SOUND and finding.note
        what = f"{finding.what}; {finding.note}" if remark else finding.what
        figure = "" if finding.figure is None else f"{finding.figure:.4g}"
        table.add_row(
            finding.check, escape(printable(what)), figure, finding.wanted, finding.result
        )
    console.print(table)
    sound, faults, unchecked = by_result.values()
    for finding in [*faults, *unchecked]:
        console.print(
            printable(f"{finding.check}: {finding.result}: {finding.what}: {finding.note}"),
            markup=False,
        )
    end = how_many(len(faults), "fault") if faults else "no fault was found"
    console.print(f"{end}: {len(sound)} sound, {len(unchecked)} could not be checked")


def show_samples(data: TokenData, tokenizer: Any, count: int, console: Console) -> None:
    """Show training documents with the supervised tokens marked, and what all documents come to.

    Raises:
        ValueError: the data cannot be read, or nothing of it is supervised, or all of a conversation's.
    """
    train, validation = data.documents(tokenizer)
    marks = ("", "") if console.is_terminal and console.color_system else ("【", "】")
    for number, document in enumerate(train[:count], start=1):
        console.print(
            Panel(
                marked(document, tokenizer, marks),
                title=f"training document {number}",
                title_align="left",
            )
        )
    columns = [_figures(documents, data, tokenizer) for documents in (train, validation)]
    table = Table("", "train", "validation")
    for name in columns[0]:
        table.add_row(name, *(escape(column[name]) for column in columns))
    console.print(table)


def marked(document: Document, tokenizer: Any, marks: tuple[str, str]) -> Text:
    """Return a document's first tokens, the supervised ones in color and between the marks."""
    text = Text()
    pairs = list(zip(document.ids_T.tolist(), document.loss_mask_T.tolist(), strict=True))
    for supervised, run in groupby(pairs[:SHOWN], key=lambda pair: pair[1]):
        words = printable(tokenizer.decode([token for token, _ in run]))
        text.append(words.join(marks) if supervised else words, SUPERVISED if supervised else PLAIN)
    if len(pairs) > SHOWN:
        text.append(f" … {how_many(len(pairs) - SHOWN, 'more token')}", "italic")
    return text


def _figures(documents: Sequence[Document], data: TokenData, tokenizer: Any) -> dict[str, str]:
    """Return a split's sizes; what was cut or dropped of it is logged where it is read."""
    sizes = [(len(document.ids_T), int(document.loss_mask_T.sum())) for document in documents]
    sizes_2N = torch.tensor(sizes).T
    tokens, supervised = sizes_2N.sum(1).tolist()
    quantiles_Q2 = sizes_2N.double().quantile(
        torch.tensor([0, 0.5, 0.95, 1]).double(), 1, interpolation="nearest"
    )
    of_tokens, of_supervised = (
        ", ".join(f"{value:,.0f}" for value in column) for column in quantiles_Q2.T.tolist()
    )
    ends = turn_ends(documents)
    rows = data.pack(list(documents))
    shares = (
        f"{tokenizer.decode([token])!r} {n / ends.total():.0%}" for token, n in ends.most_common(5)
    )
    return {
        "documents": f"{len(documents):,}",
        "packed rows": f"{len(rows.ids_BT):,}, {float((rows.documents_BT < 0).double().mean()):.1%} padding",
        "tokens": f"{tokens:,}, {supervised / max(tokens, 1):.1%} supervised",
        "tokens of a document: least, median, 95 %, most": of_tokens,
        "supervised tokens of a document": of_supervised,
        "supervised runs": f"{ends.total():,}",
        "which end with": ", ".join(shares),
    }
