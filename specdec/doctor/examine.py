"""All checks of one set-up, one after another."""

import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.doctor.begun import FaultError
from specdec.doctor.checks import CHECKS
from specdec.doctor.finding import Finding, faulty, unchecked
from specdec.doctor.prepare import prepared
from specdec.doctor.subject import Subject
from specdec.evaluation.bars import Bar, bars

log = logging.getLogger(__name__)


class Examined(NamedTuple):
    """What came of it."""

    findings: list[Finding]
    target: dict[str, Any] | None
    seconds: dict[str, float]
    """That each check took."""
    curve: list[dict[str, Any]]
    """Of the overfitted sample."""


def examine(args: list[str], drafter: str | None, only: Sequence[str], seconds: float) -> Examined:
    """Prepare the set-up and make the checks that are asked for.

    Args:
        args: of ``specdec fit``.
        drafter: a directory, in place of the drafter that the run would make.
        seconds: for the overfitted sample.

    Raises:
        ValueError: ``specdec fit`` would refuse the set-up.
    """
    findings: list[Finding] = []
    took: dict[str, float] = {}
    subject: Subject | None = None
    with bars() as bar, tempfile.TemporaryDirectory(prefix="specdec-doctor-") as scratch:
        done = bar("checks", len(only) + 1)
        begin = time.monotonic()
        try:
            for found in prepared(args, drafter, seconds, Path(scratch)):
                if isinstance(found, Subject):
                    subject = found
                else:
                    findings.append(found)
        except FaultError as fault:
            findings.append(fault.finding)
            why = "there is a fault beyond which nothing can be built: mend that first"
            return Examined([*findings, *(unchecked(name, "all", why) for name in only)], None, took, [])
        assert subject is not None
        took["set-up"] = time.monotonic() - begin
        done(1)
        try:
            for name in (name for name in CHECKS if name in only):
                begin = time.monotonic()
                findings += made(name, subject, bar)
                took[name] = time.monotonic() - begin
                log.info("%s: %.1f s", name, took[name])
                done(1)
        finally:
            subject.module.source.close()
            subject.source.close()
    return Examined(findings, subject.target.identity, took, subject.curve)


def made(name: str, subject: Subject, bar: Bar | None = None) -> list[Finding]:
    """One check's findings; one that cannot be carried through is a fault: training would end there as well."""
    if name == "overfit" and bar is not None:
        subject.on_step = bar("one sample (s, at most)", int(subject.seconds))
    findings: list[Finding] = []
    try:
        for finding in CHECKS[name](subject):
            findings.append(finding)
    except ValueError as error:
        findings.append(faulty(name, "the check could be made", str(error)))
    return findings
