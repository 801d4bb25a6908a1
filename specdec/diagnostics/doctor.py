"""``specdec doctor``: a set-up's faults, before it is trained.

The options are those of specdec fit: specdec doctor --config RUN.yaml examines what specdec fit --config RUN.yaml
would train; without any, the quick start's set-up. --drafter examines a saved, exported or published drafter in the
place of a new one; --target NAME is short for --model.target.source NAME. The exit status is 1 if a fault was found,
and 2 if specdec fit would refuse the set-up.

Example: specdec doctor --config run.yaml --only taps masks --out report
"""

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.diagnostics.doctor_model import agreement, gradient, overfit, rope, switches
from specdec.diagnostics.doctor_setup import CheckResult, Finding, SetUp, labels, masks, set_up, taps, vocabulary
from specdec.fit import Configured, configured
from specdec.training.run_directory import RunDirectory
from specdec.utils.command import fit_options
from specdec.utils.files import write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress

CHECKS: dict[str, Callable[[SetUp], Iterator[Finding]]] = {
    "taps": taps, "masks": masks, "labels": labels, "vocabulary": vocabulary, "gradient": gradient,
    "switches": switches, "rope": rope, "parity": agreement,
    "overfit": overfit,  # trains the drafter, so nothing comes after it
}  # fmt: skip
MARKS = {CheckResult.SOUND: "sound", CheckResult.FAULTY: "[bold]FAULTY[/bold]", CheckResult.UNCHECKED: "unchecked"}
REPORT = "doctor.json"


def main(argv: list[str]) -> int:
    """Run the command; status 1 if a fault was found.

    Raises:
        ValueError: an argument is wrong, or ``specdec fit`` would refuse the set-up.
    """
    parser = argparse.ArgumentParser(
        prog="specdec doctor", description=__doc__, allow_abbrev=False, epilog="all other options are specdec fit's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--drafter", metavar="DIR", help="a saved, exported or published drafter to examine")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="checks to make")
    parser.add_argument("--seconds", type=float, default=40.0, help="for the overfitted sample, at most")
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"a directory for {REPORT}; no older one in it")
    own, args = parser.parse_known_args(argv)
    if own.seconds <= 0:
        raise ValueError(f"--seconds is {own.seconds:g}: it must be above 0")
    if own.out is not None and (own.out / REPORT).exists():
        raise ValueError(f"{own.out} holds a report already: choose another --out")
    args = fit_options(args) or ["--config", "conf/quickstart.yaml"]
    cli = configured(Configured, "fit", args, RunDirectory())
    with tempfile.TemporaryDirectory(prefix="specdec-doctor-") as scratch:
        given = cli.config["fit"].trainer, own.drafter, own.seconds, Path(scratch)
        setup = set_up(cli.model, cli.datamodule, *given)
    findings: list[Finding] = []
    with contextlib.closing(setup.module.source), progress("checks", "checks", len(own.only)) as done:
        for name in (name for name in CHECKS if name in own.only):
            findings += made(name, setup)
            done(1)
    show(findings, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False))
    sound = all(one.result is not CheckResult.FAULTY for one in findings)
    if own.out is not None:
        # JSON has no word for a number that is none
        figures = [one.figure if one.figure is not None and math.isfinite(one.figure) else None for one in findings]
        rows = [one._asdict() | {"figure": figure} for one, figure in zip(findings, figures, strict=True)]
        about = {"target": setup.target.identity, "drafter": own.drafter, "curve": setup.curve, "sound": sound}
        own.out.mkdir(parents=True, exist_ok=True)
        write_json(own.out / REPORT, about | {"findings": rows, "provenance": provenance()})
    return 0 if sound else 1


def made(name: str, setup: SetUp) -> list[Finding]:
    """One check's findings; that it cannot be carried through is one: training would end there as well."""
    findings: list[Finding] = []
    try:
        for finding in CHECKS[name](setup):
            findings.append(finding._replace(check=name))
    except ValueError as error:
        findings.append(Finding("the check could be made", CheckResult.FAULTY, note=str(error), check=name))
    return findings


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table of all findings, and a sentence for each one that is not sound."""
    table = Table("check", "what", "figure", "wanted", "result")
    for one in findings:
        remark = f"; {one.note}" if one.note and one.result is CheckResult.SOUND else ""
        figure = "" if one.figure is None else f"{one.figure:.4g}"
        table.add_row(one.check, escape(one.what + remark), figure, one.wanted, MARKS[one.result])
    console.print(table)
    for result, told in ((CheckResult.FAULTY, "FAULTY"), (CheckResult.UNCHECKED, "not checked")):
        for one in (one for one in findings if one.result is result):
            console.print(f"{one.check}: {told}: {one.what}: {one.note}", markup=False)
    sound, faulty, rest = (sum(one.result is result for one in findings) for result in CheckResult)
    end = f"{faulty} faults" if faulty else "no fault was found"
    console.print(f"{end}: {sound} sound, {rest} could not be checked")
