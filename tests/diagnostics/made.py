"""Texts of a target's own, and drafters that are right about them now and then."""

import functools

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.drafter import Drafter
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, variants

SPECS = presets() | variants()
PROMPTS = [("one", [3, 4, 5, 6]), ("two", [9]), ("three", [1, 2, 3])]


@functools.cache
def target() -> Target:
    """One that a drafter is right about now and then."""
    return markov_target(context=0.45)


@functools.cache
def texts() -> tuple[AnsweredText, ...]:
    return tuple(answered_texts(target(), PROMPTS, 28))


@functools.cache
def drafter(name: str = "eagle3_1") -> Drafter:
    """Right often enough that deep chains are accepted, and attending to more than itself."""
    return disturb(perfect_drafter(target(), SPECS[name], sharpness=1.0), 0.3)
