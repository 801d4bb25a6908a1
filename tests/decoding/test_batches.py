"""Sequences decoded side by side are what each is alone: tokens, acceptance and all."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    Generation,
    PlainDecoder,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.decoding.decoder import Request
from specdec.drafter import Drafter
from specdec.target import Target
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets

GROWTHS: dict[str, DraftShape | None] = {
    "plain": None,
    "chain": Chain(4),
    "static": StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(depth=4, top_k=3, nodes=12),
}
REPEATABLE = {
    "greedy": Sampling(),
    "one_hot": Sampling(temperature=0.7),
    "cut": Sampling(temperature=0.7, top_k=20),
}
DRAWN = {
    "without_replacement": Sampling(
        temperature=0.7, rule="without_replacement", draft_temperature=1.2
    ),
}
PROMPTS = [
    [11],
    [3, 4, 5],
    [7, 50, 2, 31, 19, 4, 44],
    [60, 1] * 9,
    [5, 5],
    [22, 9, 13, 40],
    [1, 2, 3, 4, 5, 6],
    [58],
]
LIMITS = [9, 1, 14, 5, 2, 17, 6, 11]
REQUESTS = [Request(p, n, 100 + i) for i, (p, n) in enumerate(zip(PROMPTS, LIMITS, strict=True))]


class Told(NamedTuple):
    """What must not hang on the company."""

    ids: list[int]
    accepted: tuple[int, ...]


def told(made: Generation) -> Told:
    return Told(made.ids, made.accepted)


@cache
def pair(family: str = "llama") -> tuple[Target, Drafter]:
    """A target that looks at its context, and a drafter that is right often and wrong often."""
    target = markov_target(family, {"llama": 0.45, "mistral": 0.42, "gemma2": 1.2}[family])
    return target, disturb(perfect_drafter(target, presets()["eagle1"]), 0.4)


def decoder_of(
    name: str, sampling: Sampling = REPEATABLE["greedy"], batch: int = 1, **how: str
) -> PlainDecoder:
    (target, drafter), growth = pair(**how), GROWTHS[name]
    if growth is None:
        return PlainDecoder(target, sampling, batch=batch)
    return SpeculativeDecoder(target, drafter, growth, sampling, batch=batch)


def alone(
    decoder: PlainDecoder, requests: Sequence[Request], end: Collection[int] = ()
) -> list[Told]:
    return [told(decoder.generate(prompt, most, end, seed)) for prompt, most, seed in requests]


def together(
    decoder: PlainDecoder, requests: Sequence[Request], end: Collection[int] = ()
) -> list[Told]:
    """In the order asked, after checking that each came once."""
    made = list(decoder.generate_all(requests, end))
    assert sorted(number for number, _ in made) == list(range(len(requests)))
    return [told(generation) for _, generation in sorted(made, key=lambda one: one[0])]


@cache
def plain(sampling: str) -> list[list[int]]:
    """What plain decoding says."""
    return [one.ids for one in alone(decoder_of("plain", REPEATABLE[sampling]), REQUESTS)]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("plain", "greedy"), ("static", "one_hot"), ("dynamic", "cut")],
)
def test_a_batch_of_any_size_gives_what_each_gives_alone(name: str, sampling: str) -> None:
    wanted = alone(decoder_of(name, REPEATABLE[sampling]), REQUESTS)
    for batch in (3, 8):
        assert together(decoder_of(name, REPEATABLE[sampling], batch), REQUESTS) == wanted
    assert [one.ids for one in wanted] == plain(sampling)
    assert [len(one.ids) for one in wanted] == LIMITS
    if name != "plain":
        counts = [count for one in wanted for count in one.accepted]
        assert 0 in counts and max(counts) > 1, counts  # neither always nor never


@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("name", ["chain", "static"])
def test_drawn_drafts_do_not_hang_on_the_company(name: str, sampling: str) -> None:
    """All noise is the text's own, so tokens and acceptance repeat, though they are not plain decoding's."""
    wanted = alone(decoder_of(name, DRAWN[sampling]), REQUESTS)
    for batch in (3,):
        assert together(decoder_of(name, DRAWN[sampling], batch), REQUESTS) == wanted
    assert wanted != alone(
        decoder_of(name, DRAWN[sampling]), [request._replace(seed=1) for request in REQUESTS]
    )


@pytest.mark.parametrize("family", ["mistral"])
@pytest.mark.parametrize("name", ["chain", "dynamic"])
def test_windows_of_a_batch_are_each_ones_own(name: str, family: str) -> None:
    wanted = alone(decoder_of(name, family=family), REQUESTS)
    assert together(decoder_of(name, batch=3, family=family), REQUESTS) == wanted


@pytest.mark.parametrize("name", ["dynamic"])
def test_end_tokens_end_their_own_sequence(name: str) -> None:
    """The first token of some, a later one of others, none of the rest."""
    whole = alone(decoder_of("plain"), REQUESTS)
    end = {whole[0].ids[0], whole[2].ids[5], whole[5].ids[13]}
    wanted = alone(decoder_of(name), REQUESTS, end)
    assert wanted[0].ids == whole[0].ids[:1] and wanted[0].accepted == ()
    cut = [len(a.ids) < len(b.ids) for a, b in zip(wanted, whole, strict=True)]
    assert 2 <= sum(cut) < len(cut)
    for batch in (3,):
        assert together(decoder_of(name, batch=batch), REQUESTS, end) == wanted


@pytest.mark.parametrize("name", ["plain", "chain"])
def test_results_come_as_they_are_done(name: str) -> None:
    """A slot that is free takes the next request, in the order asked."""
    requests = [
        Request([3, 4], 40),
        Request([5], 2),
        Request([6], 1),
        Request([7], 3),
        Request([8, 9], 4),
    ]
    assert [number for number, _ in decoder_of(name, batch=2).generate_all(requests)] == [
        1,
        2,
        3,
        4,
        0,
    ]
    first = decoder_of(name, batch=5).generate_all(requests)
    assert next(first)[0] == 2  # and nothing waits for the long one
    assert [number for number, _ in decoder_of(name, batch=1).generate_all(requests)] == list(
        range(5)
    )


def test_no_pass_is_made_with_a_place_free_that_someone_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also not where answers end with their prefill, one after another."""
    lengths: list[torch.Size] = []
    forward = Target.forward

    def spy(self: Target, ids_BT: torch.Tensor, *args: Any) -> Any:
        lengths.append(ids_BT.shape)
        return forward(self, ids_BT, *args)

    monkeypatch.setattr(Target, "forward", spy)
    requests = [Request([3, 4, 5], most) for most in (20, 1, 1, 1, 20)]
    assert len(list(decoder_of("plain", batch=2).generate_all(requests))) == 5
    assert lengths == [(1, 3)] * 5 + [(2, 1)] * 19


def test_a_request_that_is_wrong_is_refused_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forwards: list[Any] = []
    monkeypatch.setattr(Target, "forward", lambda self, *args: forwards.append(args))
    for name in ("plain", "chain"):
        for wrong, message in (
            (Request([], 4), "the prompt is empty"),
            (Request([1, 99], 4), "token ids outside 0..60"),
            (Request([1], 0), "max_new_tokens must be at least 1, not 0"),
            (Request([1] * 500, 13), "exceed the target's 512 positions"),
        ):
            with pytest.raises(ValueError, match=message):
                next(decoder_of(name, batch=2).generate_all([REQUESTS[0], REQUESTS[1], wrong]))
    assert not forwards
