"""The host loop: requests, ends, lengths and what a generation reports."""

import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
import torch

import specdec.decoding.decoder as decoder_module
from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    Generation,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
    check_pair,
)
from specdec.drafter import Drafter
from specdec.target import Target
from tests.perfect import markov_target, perfect_drafter, successors, worst_drafter
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target

PROMPT = [3, 4, 5]
EVERYTHING = {
    name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in presets().items()
}
MARKOV = markov_target()
PERFECT = perfect_drafter(MARKOV, EVERYTHING["eagle3_1"])
GROWTHS: list[DraftShape] = [Chain(1), Chain(3), Chain(5), DynamicTree(depth=5, top_k=3, nodes=12)]
GROWTHS += [DynamicTree(depth=1, top_k=5, nodes=5), DynamicTree(depth=3, top_k=VOCAB, nodes=40)]


def following(token: int, count: int) -> list[int]:
    """What the Markov target says after ``token``."""
    out = [token]
    for _ in range(count):
        out.append(int(successors()[out[-1]]))
    return out[1:]


TEXT = following(PROMPT[-1], 60)


def speculate(
    growth: DraftShape, most: int, end: Collection[int] = (), prompt: list[int] = PROMPT
) -> Generation:
    return SpeculativeDecoder(MARKOV, PERFECT, growth).generate(prompt, most, end)


def test_plain_decoding_is_the_argmax_of_the_whole_text_each_time() -> None:
    target = tiny_target()
    ids = list(PROMPT)
    for _ in range(12):
        with torch.no_grad():
            ids.append(
                int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    made = PlainDecoder(target).generate(PROMPT, 12)
    assert made.ids == ids[3:] and made.seconds > 0
    assert made.accepted == (0,) * 11  # the prefill gave the first
    assert len(set(made.ids)) > 3


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
def test_of_a_perfect_drafter_everything_is_accepted(name: str, growth: DraftShape) -> None:
    drafter = perfect_drafter(MARKOV, EVERYTHING[name])
    rounds = 4
    made = SpeculativeDecoder(MARKOV, drafter, growth).generate(
        PROMPT, 1 + rounds * (growth.depth + 1)
    )
    assert made.ids == TEXT[: len(made.ids)] and len(made.ids) == 1 + rounds * (growth.depth + 1)
    assert made.accepted == (growth.depth,) * rounds  # acceptance length: depth + 1
    assert made.seconds > 0


@pytest.mark.parametrize("growth", [GROWTHS[1], StaticTree()], ids=str)
@pytest.mark.parametrize("batch", [2])
def test_of_the_worst_drafter_nothing_is_accepted_and_nothing_is_lost(
    growth: DraftShape, batch: int
) -> None:
    requests = [Request(prompt, 12) for prompt in (PROMPT, [9], list(range(20)))]
    plain, decoder = (
        PlainDecoder(MARKOV),
        SpeculativeDecoder(MARKOV, worst_drafter(MARKOV), growth, batch=batch),
    )
    for number, made in decoder.generate_all(requests):
        assert made.ids == plain.generate(requests[number].prompt, 12).ids
        assert made.accepted == (0,) * 11  # acceptance length 1: the prefill gave the first token
        assert max(made.drafted) == growth.depth


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("most", [1, 3, 7])
def test_never_more_than_asked(growth: DraftShape, most: int) -> None:
    made = speculate(growth, most)
    assert made.ids == TEXT[:most]
    kept = 1 + sum(made.accepted) + len(made.accepted)
    # the last pass may go beyond, and no pass more is made
    assert most <= kept <= most + growth.depth
    assert len(made.accepted) == -(-(most - 1) // (growth.depth + 1))


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("position", [0, 2, 5, 8])
def test_it_stops_after_an_end_token_wherever_it_comes(growth: DraftShape, position: int) -> None:
    """The end may be the target's first token, a draft in the middle or at the end of a path, or a bonus token."""
    end = {TEXT[position], TEXT[position + 2]}
    made = speculate(growth, 40, end)
    assert made.ids == TEXT[: position + 1] == PlainDecoder(MARKOV).generate(PROMPT, 40, end).ids
    # nothing behind the end is counted
    assert 1 + sum(made.accepted) + len(made.accepted) == len(made.ids)
    assert len(made.accepted) == -(-position // (growth.depth + 1))


def test_an_end_token_in_the_prompt_does_not_stop() -> None:
    assert speculate(Chain(3), 6, PROMPT).ids == TEXT[:6]
    assert PlainDecoder(MARKOV).generate(PROMPT, 6, PROMPT).ids == TEXT[:6]


def test_every_pass_is_timed_by_the_devices_own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter(range(1000))
    monkeypatch.setattr("specdec.decoding.decoder._timestamp", lambda device: float(next(marks)))
    made = speculate(Chain(3), 9)
    assert made.draft_ms == made.verify_ms == (1000.0,) * len(made.accepted)
    assert speculate(Chain(3), 1).draft_ms == ()  # no pass, no mark


def test_a_gpus_marks_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's events, whose times come from the device."""
    made: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.number = len(made)
            made.append(self.number)

        def elapsed_time(self, end: "Event") -> float:
            return 5.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    first, _, last = (decoder_module._timestamp(torch.device("cuda")) for _ in range(3))
    assert decoder_module._ms(first, last) == 10.0


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
def test_a_prompt_of_one_token(growth: DraftShape) -> None:
    assert speculate(growth, 9, prompt=[5]).ids == TEXT[:9]


@pytest.fixture(scope="module")
def short() -> tuple[Target, Drafter]:
    """A target of 32 positions."""
    return tiny_target(max_position_embeddings=32), tiny_drafter(presets()["eagle3"])


@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("most", [1, 12])
def test_the_last_position_can_be_used(
    short: tuple[Target, Drafter], growth: DraftShape, most: int
) -> None:
    target, drafter = short
    if growth.depth == 3 and isinstance(growth, DynamicTree):
        growth = dataclasses.replace(growth, top_k=40)  # the whole draft vocabulary
    prompt = list(range(32 - most))
    plain = PlainDecoder(target).generate(prompt, most)
    made = SpeculativeDecoder(target, drafter, growth).generate(prompt, most)
    assert made.ids == plain.ids and len(made.ids) == most


@pytest.mark.parametrize(
    ("what", "overrides"),
    [
        ("hidden size is 64, the drafter was made for 32", {"hidden_size": 64}),
        ("vocabulary size is 62, the drafter was made for 61", {"vocab_size": 62}),
        ("number of layers is 8, the drafter was made for 7", {"num_hidden_layers": 8}),
    ],
)
def test_a_drafter_of_another_target_is_refused(what: str, overrides: dict[str, int]) -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    check_pair(tiny_target(), drafter)
    other = tiny_target(**overrides)
    for refuse in (
        lambda: check_pair(other, drafter),
        lambda: SpeculativeDecoder(other, drafter, Chain(2)),
    ):
        with pytest.raises(ValueError, match=what):
            refuse()


def test_a_growth_wider_than_the_draft_vocabulary_is_refused_before_decoding() -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    with pytest.raises(ValueError, match="top_k 41 is more than the draft vocabulary of 40"):
        SpeculativeDecoder(tiny_target(), drafter, DynamicTree(depth=1, top_k=41, nodes=4))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", ["one_hot", "without_replacement", "block"])
def test_plain_decoding_draws_the_targets_own_tokens_under_every_rule(
    short: tuple[Target, Drafter], rule: Any, temperature: float
) -> None:
    target, _ = short
    prompts = [Request([3, 1, 4, number], 8, number) for number in range(5)]
    auto = PlainDecoder(target, Sampling(temperature=temperature), batch=2)
    ruled = PlainDecoder(target, Sampling(temperature=temperature, rule=rule), batch=2)
    expected = {number: made.ids for number, made in auto.generate_all(prompts)}
    assert {number: made.ids for number, made in ruled.generate_all(prompts)} == expected
