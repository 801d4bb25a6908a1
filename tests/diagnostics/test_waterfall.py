"""The waterfall of acceptance: levels against drafters made for them and against the decoder."""

import dataclasses
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.waterfall import (
    DOWN,
    Levels,
    MeasuredText,
    measure_levels,
    pass_starts,
    waterfall,
)
from specdec.drafter import Drafter
from specdec.target import Target
from tests.diagnostics.made import measure
from tests.perfect import disturb, markov_target, perfect_drafter, successors
from tests.published import fill, published
from tests.tiny import HIDDEN, presets

DEPTH, NEW = 4, 18
PROMPTS = [[11], [3, 4, 5], [7, 50, 2, 31, 19, 4, 44], [60, 1] * 9, [20, 21], [33]]
SPECS = {
    name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in presets().items()
}
ENDS = (9, 27, 40, 55)


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


def explained(
    target: Target, drafter: Drafter, prompts: list[list[int]] = PROMPTS, new: int = NEW
) -> tuple[Levels, list[MeasuredText]]:
    named = [(str(number), ids) for number, ids in enumerate(prompts)]
    return measure_levels(target, drafter, answered_texts(target, named, new + DEPTH), new, DEPTH)


def figures(levels: Levels) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Acceptance lengths, losses and the check."""
    told = waterfall(levels)
    lengths = {one["name"]: one["acceptance_length"]["mean"] for one in told["levels"]}
    return lengths, {bar["to"]: bar["loss"]["mean"] for bar in told["bars"]}, told["check"]


@pytest.mark.parametrize("name", SPECS)
def test_a_perfect_drafter_loses_nothing(name: str) -> None:
    lengths, losses, check = figures(explained(sure(), perfect_drafter(sure(), SPECS[name]))[0])
    assert set(lengths.values()) == {DEPTH + 1} and set(losses.values()) == {0.0}
    assert check["holds"] and check["same_passes"] == check["passes"] > len(PROMPTS)


def test_a_reduced_vocabulary_costs_its_ceiling_and_nothing_else() -> None:
    drafter = perfect_drafter(sure(), presets()["eagle3_1"])
    lengths, losses, _ = figures(explained(sure(), drafter)[0])
    vocabulary, *others = losses.values()
    assert vocabulary > 1 and others == [0.0, 0.0, 0.0]
    assert lengths["vocabulary"] == lengths["observed"] == DEPTH + 1 - vocabulary
    known, committed, begun = set(drafter.vocab.target_ids_D.tolist()), 0, 0
    for prompt in PROMPTS:  # by hand
        answer, n = PlainDecoder(sure()).generate(prompt, NEW + DEPTH).ids, 1
        while n < NEW:
            run = [token in known for token in answer[n : n + DEPTH]]
            count = 1 + (run.index(False) if False in run else DEPTH)
            n, committed, begun = n + count, committed + count, begun + 1
    assert lengths["vocabulary"] == committed / begun


class Ruined(nn.Module):
    """Returns one huge state, whatever it gets."""

    def __init__(self, state_H: Tensor) -> None:
        super().__init__()
        self.state_H = state_H

    def forward(self, out_BTH: Tensor, normed_BTH: Tensor) -> Tensor:
        return self.state_H.expand_as(out_BTH)


def test_a_recurrence_that_ruins_its_state_is_drift_and_nothing_else() -> None:
    drafter, prompt = perfect_drafter(sure(), SPECS["eagle1"]), PROMPTS[1]
    w = published(drafter)
    w["entry.fc.weight"][:, HIDDEN:] = 1e-3 * torch.eye(HIDDEN, dtype=torch.float64)
    fill(drafter, w)
    # the answer comes to it after all other tokens
    last = (successors() == prompt[-1]).nonzero()[0, 0]
    drafter.recurrence = Ruined(1e7 * sure().head_weight()[last])
    lengths, losses, check = figures(explained(sure(), drafter, [prompt])[0])
    assert losses == {
        "vocabulary": 0.0,
        "true_features": 0.0,
        "own_features": DEPTH - 1,
        "own_tokens": 0.0,
    }
    assert lengths["observed"] == 2 and check["holds"]


@pytest.mark.parametrize(("name", "level", "end"), [("eagle1", 0.7, ENDS), ("eagle3_1", 0.2, ())])
def test_the_bars_add_up_to_what_the_decoder_accepts_pass_by_pass(
    name: str, level: float, end: tuple[int, ...]
) -> None:
    target = unsure(end)
    drafter = erring(name, target, level)
    levels, texts = explained(target, drafter)
    decoder = SpeculativeDecoder(target, drafter, Chain(DEPTH))
    one_by_one = [list(decoder.generate(prompt, NEW, end).accepted) for prompt in PROMPTS]
    assert levels["own_tokens"] == levels["observed"] == [own for own in one_by_one if own]
    # or the equality says little
    assert {0, 1, 2} <= {count for own in one_by_one for count in own}
    runs = [one.accepted for one in texts]
    at_these = [
        [run["own_features"][place] for place in pass_starts(run["true_features"])] for run in runs
    ]
    assert levels["own_features"] == at_these != levels["true_features"]
    for text in texts:  # the curves are of the chains within the answer
        ids = [*text.prompt, *PlainDecoder(target).generate(text.prompt, NEW, end).ids]
        answered = AnsweredText(text.prompt_id, ids, len(text.prompt))
        torch.testing.assert_close(text.sums_FK2, measure(target, drafter, answered, DEPTH))
    lengths, losses, _ = figures(levels)
    assert lengths["perfect"] - sum(losses.values()) == pytest.approx(
        lengths["observed"], abs=1e-12
    )
    assert (
        all(lengths[one] >= lengths[two] for one, two in pairwise(DOWN[:3]))
        and losses["true_features"] > 0.3
    )


def test_end_tokens_are_counted_as_decoding_counts_them() -> None:
    """At several lengths of answer: ends inside, at its end, and among the drafts behind it."""
    target = unsure(ENDS)
    drafter, seen = perfect_drafter(target, SPECS["eagle1"]), set()
    for new in (2, 3, 4, 5, 9):
        levels, texts = explained(target, drafter, PROMPTS[:4], new)
        assert levels["own_tokens"] == levels["observed"], new
        for text in texts:
            ids = PlainDecoder(target).generate(text.prompt, new + DEPTH, ENDS).ids
            seen.add((len(ids) > new) - (len(ids) < new) if ids[-1] in ENDS else None)
    assert {0, 1, None} <= seen


@given(st.lists(st.integers(0, 5), max_size=30))
def test_passes_follow_each_other(accepted: list[int]) -> None:
    begun = pass_starts(accepted)
    assert begun[:1] == [0][: len(accepted)]
    assert all(two == one + accepted[one] + 1 for one, two in pairwise(begun))
    assert not begun or begun[-1] < len(accepted) <= begun[-1] + accepted[begun[-1]] + 1
