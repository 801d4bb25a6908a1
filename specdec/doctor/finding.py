"""What a check found."""

import math
import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Literal, NamedTuple

Rule = Literal["at most", "at least", "above", "below"]

HOLDS: dict[str, Callable[[float, float], bool]] = {
    "at most": operator.le,
    "at least": operator.ge,
    "above": operator.gt,
    "below": operator.lt,
}


class Verdict(StrEnum):
    """How it came out."""

    SOUND = "sound"
    FAULTY = "faulty"
    UNCHECKED = "cannot be checked"


class Finding(NamedTuple):
    """One thing that was checked."""

    check: str
    what: str
    verdict: Verdict
    figure: float | None = None
    rule: Rule | None = None
    bound: float | None = None
    said: str = ""
    """Of a fault its likely cause and what to do; of what cannot be checked, why; else a remark."""

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return "" if self.bound is None else f"{self.rule} {self.bound:.4g}"


def judged(check: str, what: str, figure: float, rule: Rule, bound: float, fault: str, remark: str = "") -> Finding:
    """Sound if the figure keeps its bound, which one that is no number never does.

    Args:
        fault: said if it does not.
        remark: said if it does.
    """
    sound = not math.isnan(figure) and HOLDS[rule](figure, bound)
    verdict = Verdict.SOUND if sound else Verdict.FAULTY
    return Finding(check, what, verdict, figure, rule, bound, remark if sound else fault)


def faulty(check: str, what: str, fault: str) -> Finding:
    """A fault without a figure."""
    return Finding(check, what, Verdict.FAULTY, said=fault)


def unchecked(check: str, what: str, why: str, figure: float | None = None) -> Finding:
    """What cannot be said here."""
    return Finding(check, what, Verdict.UNCHECKED, figure, said=why)
