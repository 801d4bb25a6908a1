"""``specdec doctor``: a set-up's faults, before it is trained.

The arguments are those of specdec fit: specdec doctor --config RUN.yaml examines what specdec fit --config RUN.yaml
would train; without arguments, the quick start's. --drafter examines a saved, exported or published drafter in its
place. The exit status is 1 if a fault was found.
"""

import argparse
import re
import signal
import sys
from pathlib import Path

from rich.console import Console

from specdec.arguments import target_shorthand
from specdec.doctor.checks import CHECKS
from specdec.doctor.examine import examine
from specdec.doctor.report import as_json, curve, sound, table, told
from specdec.files import write_json
from specdec.imports import flags
from specdec.provenance import provenance

DEFAULT = ["--config", "conf/quickstart.yaml"]
REPORT, CURVE = "doctor.json", "overfit.png"


def main(argv: list[str]) -> int:
    """Run the command; status 1 if a fault was found.

    Raises:
        ValueError: an argument is wrong, or ``specdec fit`` would refuse the set-up.
    """
    own, args = _parser().parse_known_args(argv)
    if own.seconds <= 0:
        raise ValueError(f"--seconds is {own.seconds:g}: it must be above 0")
    out = Path(own.out) if own.out else None
    if out is not None and any((out / name).exists() for name in (REPORT, CURVE, "config.yaml", "DONE.json")):
        raise ValueError(f"{out} holds a report or a run already: choose another --out")
    args = [re.sub(r"^--target\.", "--model.target.", arg) for arg in target_shorthand(args)] or DEFAULT
    try:
        found = examine(args, own.drafter, own.only, own.seconds)
    except SystemExit as error:  # what Lightning makes of Ctrl-C
        if error.code == 1:
            return 128 + signal.SIGINT
        raise
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    console.print(table(found.findings))
    for line in told(found.findings):
        console.print(line, markup=False, highlight=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = {"target": found.target, "drafter": own.drafter, "seconds": found.seconds, "curve": found.curve}
        about["provenance"] = provenance(["specdec", "doctor", *flags(), *argv])
        if found.curve:
            curve(found.curve, out / CURVE)
        write_json(out / REPORT, as_json(found.findings, **about))
    return 0 if sound(found.findings) else 1


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="specdec doctor", description=__doc__, allow_abbrev=False, epilog="all other flags are specdec fit's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    out.add_argument("--drafter", metavar="DIR", help="a saved, exported or published drafter to examine")
    out.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="checks to make")
    out.add_argument("--seconds", type=float, default=40.0, help="for the overfitted sample, at most")
    out.add_argument("--out", metavar="DIR", help=f"a directory for {REPORT} and {CURVE}")
    return out
