"""Texts of a target's own, and drafters that are right about them now and then."""

import functools

import torch
from torch import Tensor

from specdec.diagnostics.anchors import AnchoredText, AnsweredText, answered_texts
from specdec.diagnostics.drift_measure import drafted, no_sums
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


def places(text: AnsweredText, depth: int) -> range:
    """Every place of an answer that has ``depth`` more tokens behind it."""
    return range(text.prompt, len(text.ids) - depth)


def measure(target: Target, drafter: Drafter, text: AnsweredText, depth: int) -> Tensor:
    """The sums of chains from all of them."""
    anchors = places(text, depth)
    anchored = AnchoredText(target, drafter, text.ids, depth, len(anchors))
    parts = [
        drafted(anchored, some, text.prompt, anchors.stop).sums_FK2
        for some in anchored.groups(anchors)
    ]
    return torch.stack(parts).sum(0) if parts else no_sums(depth, False)[0]


@functools.cache
def texts() -> tuple[AnsweredText, ...]:
    return tuple(answered_texts(target(), PROMPTS, 28))


@functools.cache
def drafter(name: str = "eagle3_1") -> Drafter:
    """Right often enough that deep chains are accepted, and attending to more than itself."""
    return disturb(perfect_drafter(target(), SPECS[name], sharpness=1.0), 0.3)
