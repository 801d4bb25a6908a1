"""Pairs whose waterfall is known, or whose every level differs."""

import dataclasses
from functools import cache

import torch
from torch import Tensor, nn

from specdec.drafter import Drafter
from specdec.evaluation.pair import Pair
from specdec.explain.run import Asked, Measured, explain
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter, successors
from tests.published import fill, published
from tests.tiny import HIDDEN, presets

DEPTH, NEW = 4, 24
PROMPTS = [[11], [3, 4, 5], [7, 50, 2, 31, 19, 4, 44], [60, 1] * 9, [20, 21], [33]]
SPECS = {name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in presets().items()}


@cache
def sure() -> Target:
    """Every token's successor follows it."""
    return markov_target()


def unsure(end: tuple[int, ...] = ()) -> Target:
    """Its context leads it astray; some tokens may end a text."""
    target = markov_target(context=0.45)
    target.model.generation_config.eos_token_id = list(end) or None
    return target


def erring(name: str, target: Target, level: float) -> Drafter:
    """Right now and then, by feature, context and depth."""
    return disturb(perfect_drafter(target, SPECS[name], sharpness=1.0), level)


class Ruined(nn.Module):
    """Returns one huge state, whatever it gets."""

    def __init__(self, state_H: Tensor) -> None:
        super().__init__()
        self.state_H = state_H

    def forward(self, out_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.state_H.expand_as(out_BTH)


def drifting(target: Target, prompt: list[int]) -> Drafter:
    """Perfect on true states, and always wrong on its own in the answer to ``prompt``."""
    drafter = perfect_drafter(target, SPECS["eagle1"])
    w = published(drafter)
    w["entry.fc.weight"][:, HIDDEN:] = 1e-3 * torch.eye(HIDDEN, dtype=torch.float64)
    fill(drafter, w)
    last = (successors() == prompt[-1]).nonzero()[0, 0]  # the answer comes to it after all other tokens
    drafter.recurrence = Ruined(1e7 * target.head_weight()[last])
    return drafter


def explained(target: Target, drafter: Drafter, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> Measured:
    names = [str(number) for number in range(len(prompts))]
    return explain(Pair(target, drafter, True), Asked(prompts, names, new, DEPTH))


def lengths(found: Measured) -> dict[str, float]:
    return {level.name: level.length.mean for level in found.waterfall.levels}


def losses(found: Measured) -> dict[str, float]:
    return {bar.name: bar.loss.mean for bar in found.waterfall.bars}
