"""Speculative decoding gives the target's own greedy output, token for token: plain decoding's and transformers'."""

import dataclasses
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
import torch

from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    Generation,
    PlainDecoder,
    SpeculativeDecoder,
)
from specdec.drafter import Drafter, MaskBlock
from specdec.target import Target
from tests.parity.reference import generated
from tests.perfect import FAMILIES, WINDOW, disturb, markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, tiny_target, variants

NEW = 24
# how far the context leads astray: often, not always
CONTEXT = {"llama": 0.45, "mistral": 0.42, "gemma2": 1.2}
SHAPES: dict[str, DraftShape] = {
    "chain_1": Chain(1),
    "chain_2": Chain(2),
    "chain_5": Chain(5),
    "tree_narrow": DynamicTree(depth=4, top_k=2, nodes=6),
    "tree_wide": DynamicTree(depth=2, top_k=8, nodes=30),
    "tree_deep": DynamicTree(depth=8, top_k=3, nodes=24),
    "tree_of_all_candidates": DynamicTree(depth=3, top_k=3, nodes=21),
}
LENGTHS = [1, 2, WINDOW, 9, 30]


class Drafters(NamedTuple):
    """How the drafters of a test are made."""

    preset: str
    draft_vocab_size: int | str
    level: float
    sharpness: float = 20.0


NOISY = [
    Drafters("eagle1", "all", 0.5),
    Drafters("eagle1", "all", 0.8),
    Drafters("eagle3", 50, 0.3),
    Drafters("eagle3", "all", 0.5),
    Drafters("eagle3_1", 50, 0.5),
    Drafters("eagle3_1", "all", 0.3, sharpness=1.0),
]


@cache
def target_of(family: str, seed: int) -> Target:
    return markov_target(family, CONTEXT[family], seed)


@cache
def noisy(family: str, seed: int, how: Drafters) -> Drafter:
    spec = dataclasses.replace(presets()[how.preset], draft_vocab_size=how.draft_vocab_size)
    return disturb(
        perfect_drafter(target_of(family, seed), spec, seed, how.sharpness), how.level, seed
    )


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(0, 61, (length,), generator=generator).tolist()


@cache
def reference(family: str, seed: int, length: int, end: tuple[int, ...] = ()) -> list[int]:
    """What transformers and plain decoding agree on."""
    target, prompt = target_of(family, seed), prompt_of(length, seed)
    ids = generated(target, prompt, NEW, end)
    assert PlainDecoder(target).generate(prompt, NEW, end).ids == ids
    return ids


@cache
def random_target(seed: int) -> Target:
    return tiny_target(seed)


@cache
def random_reference(seed: int) -> list[int]:
    """What transformers and plain decoding agree on, of a random target."""
    target, prompt = random_target(seed % 2), prompt_of(LENGTHS[seed % 5], seed)
    ids = generated(target, prompt, 12)
    assert PlainDecoder(target).generate(prompt, 12).ids == ids
    return ids


def assert_counts(made: Generation, shape: DraftShape, most: int, end: tuple[int, ...]) -> None:
    """The counts add up to the tokens: one from the prefill, then each pass's accepted drafts and bonus token."""
    assert all(0 <= count <= shape.depth for count in made.accepted)
    total = 1 + sum(count + 1 for count in made.accepted)
    if made.ids[-1] in end:
        assert total == len(made.ids) or len(made.ids) == most
    else:
        assert len(made.ids) == most
        before = total - (made.accepted[-1] + 1 if made.accepted else 0)
        assert before < most <= total or not made.accepted


@pytest.mark.parametrize(
    ("how", "family"), list(zip(NOISY, 2 * list(FAMILIES), strict=True)), ids=str
)
def test_noisy_drafters_change_nothing(how: Drafters, family: str) -> None:
    """Every shape, of one drafter or another over prompts of one token, of about a window, and of several."""
    passes: Counter[int] = Counter()
    # every shape meets every length
    for number, (name, shape) in enumerate(SHAPES.items(), NOISY.index(how)):
        seed, length = number % 2, LENGTHS[number % 5]
        decoder = SpeculativeDecoder(target_of(family, seed), noisy(family, seed, how), shape)
        made = decoder.generate(prompt_of(length, seed), NEW)
        assert made.ids == reference(family, seed, length), (name, length)
        assert_counts(made, shape, NEW, ())
        passes.update(made.accepted)
    # it both refused and accepted
    assert passes[0] > 5 and sum(passes.values()) - passes[0] > 5, passes
    assert max(passes) > 1


@pytest.mark.parametrize(
    ("shape", "family"), list(zip(SHAPES.values(), 3 * list(FAMILIES), strict=False)), ids=str
)
def test_end_tokens_stop_all_three_alike(shape: DraftShape, family: str) -> None:
    for seed, length in ((0, 1), (1, 9)):
        text = reference(family, seed, length)
        decoder = SpeculativeDecoder(target_of(family, seed), noisy(family, seed, NOISY[0]), shape)
        for end in ((text[0],), (text[6],), (text[11], text[9]), (text[-1],)):
            wanted = reference(family, seed, length, end)
            assert len(wanted) <= 1 + text.index(end[0])
            made = decoder.generate(prompt_of(length, seed), NEW, end)
            assert made.ids == wanted
            assert_counts(made, shape, NEW, end)


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "peagle_3_1", "mla", "mtp", "dflash"])
def test_random_drafters_change_nothing(name: str) -> None:
    """A random target, whose every token hangs on the whole text, and drafters that are nearly always wrong."""
    designs = presets() | variants()
    for seed, shape in enumerate(SHAPES.values()):
        spec = designs[name]
        if spec.drafting.fixed_drafts:
            spec = dataclasses.replace(spec, recurrence=MaskBlock(masks=max(shape.depth, 5)))
        target, drafter = random_target(seed % 2), tiny_drafter(spec, seed)
        prompt = prompt_of(LENGTHS[seed % 5], seed)
        made = SpeculativeDecoder(target, drafter, shape).generate(prompt, 12)
        assert made.ids == random_reference(seed)
        assert_counts(made, shape, 12, ())


def test_the_text_outgrows_the_window_and_the_windows_matter() -> None:
    """Else the sliding families would prove nothing."""
    assert WINDOW * 3 < NEW
    for family in ("mistral", "gemma2"):
        target, prompt = target_of(family, 0), prompt_of(30, 0)
        narrow = generated(target, prompt, NEW)
        target.config.sliding_window = 512
        try:
            wide = PlainDecoder(target).generate(prompt, NEW).ids
        finally:
            target.config.sliding_window = WINDOW
        assert wide != narrow
        assert PlainDecoder(target).generate(prompt, NEW).ids == narrow


def test_a_reduced_draft_vocabulary_never_drafts_outside_itself() -> None:
    how = NOISY[2]
    drafter, text = noisy("llama", 0, how), reference("llama", 0, 9)
    known = set(drafter.vocab.target_ids_D.tolist())
    assert 0 < sum(token not in known for token in text) < len(text)
    made = SpeculativeDecoder(target_of("llama", 0), drafter, Chain(3)).generate(
        prompt_of(9, 0), NEW
    )
    place = 1
    for count in made.accepted:
        assert set(text[place : place + count]) <= known
        place += count + 1
    assert sum(made.accepted) > 0
