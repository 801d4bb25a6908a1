"""Compiled rounds: the same tokens, and not one graph more than were announced."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from specdec.decoding import Chain, ConfidentChain, DynamicTree, Growth, PlainDecoder, Sampling, SpeculativeDecoder
from specdec.decoding.compiled import Compiled
from specdec.drafter import Drafter
from specdec.target import Target
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import presets

PROMPTS = [[3, 4, 5], [17], list(range(40))]
"""Of a target so small that a graph takes seconds."""


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    target = markov_target()
    return target, perfect_drafter(target, presets()["eagle3_1"])


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("growth", "sampling", "count"),
    [
        (Chain(3), Sampling(), 2),
        (DynamicTree(depth=3, top_k=2, nodes=6), Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2), 2),
        (ConfidentChain(4, 0.9), Sampling(), 1),  # drafting has no fixed shape
    ],
    ids=["chain", "tree", "confident"],
)
def test_no_text_needs_another_graph(
    pair: tuple[Target, Drafter], growth: Growth, sampling: Sampling, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter = pair
    decoder = SpeculativeDecoder(target, drafter, growth, sampling, batch=2, compiled=True)
    with caplog.at_level(logging.INFO, "specdec"):
        decoder.prepare(100)
    assert graphs() == count
    announced = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in announced] == ["compiling", "compiled"] * count
    plain = PlainDecoder(target, sampling)
    for seed, most in enumerate((1, 30, 60)):
        for prompt in PROMPTS:
            made = decoder.generate(prompt, most, {7}, seed)
            assert made.ids == plain.generate(prompt, most, {7}, seed).ids
    assert graphs() == count


def test_longer_texts_get_graphs_of_their_own(pair: tuple[Target, Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.decoder.ROOM", 8)
    target, _ = pair
    decoder, plain = PlainDecoder(target, compiled=True), PlainDecoder(target)
    for most, count in ((9, 1), (20, 2), (9, 2), (29, 2)):  # one slot is for the root
        assert decoder.generate([3, 4], most).ids == plain.generate([3, 4], most).ids
        assert graphs() == count
    with torch.no_grad():
        target.final_norm.weight.mul_(2)
    with pytest.raises(ValueError, match="weights have changed"):
        decoder.generate([3, 4], 9)
    with torch.no_grad():
        target.final_norm.weight.div_(2)


def test_what_cannot_be_compiled_is_said() -> None:
    waits = Compiled(lambda x: x * 2 if bool(x.sum() > 0) else x, "this", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"this cannot be compiled: .*; use --compile off"):
        waits(torch.ones(3))


def test_other_shapes_are_refused() -> None:
    twice = Compiled(lambda pair: pair[0] * 2, "doubling", torch.device("cpu"))
    with torch.inference_mode():
        for _ in range(2):
            assert twice((torch.ones(3), None)).tolist() == [2, 2, 2]
        with pytest.raises(ValueError, match=r"doubling was compiled for the shapes .*3.*, not .*4"):
            twice((torch.ones(4), None))
