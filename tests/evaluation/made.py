"""Hand-made and drawn answers for the tests."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from specdec.decoding import Generation, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.metrics import Answer
from specdec.target import Target
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import presets


def answer(prompt_id: str, accepted: tuple[int, ...], depth: int = 3, **changes: object) -> Answer:
    tokens = sum(accepted) + len(accepted)
    base = Answer(
        prompt_id, None, tokens, accepted, (depth,) * len(accepted), 1.0, 2.0, tokens, True
    )
    return base._replace(**changes)


@st.composite
def answer_lists(draw: st.DrawFn, most: int = 6) -> list[Answer]:
    """Some prompts, some of them with two turns."""
    found = []
    for prompt in range(draw(st.integers(1, most))):
        for _ in range(draw(st.integers(1, 2))):
            depths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
            accepted = tuple(draw(st.integers(0, depth)) for depth in depths)
            found.append(answer(str(prompt), accepted, drafted=tuple(depths)))
    return found


def clustered(
    generator: np.random.Generator, prompts: int, better: float = 0.0, depth: int = 5
) -> list[list[Answer]]:
    """A and B: every prompt has its own rate of acceptance, B's is higher by ``better``; ten passes each.

    The mean rate of A is 0.6, so that the true acceptance length is 1 + 0.6 · depth.
    """
    rates = generator.beta(6, 4, size=prompts)
    return [
        [
            answer(
                str(n),
                tuple(generator.binomial(depth, min(1.0, rate + more), size=10).tolist()),
                depth=depth,
            )
            for n, rate in enumerate(rates)
        ]
        for more in (0.0, better)
    ]


def alter(
    patch: pytest.MonkeyPatch, change: Callable[[SpeculativeDecoder, Request, list[int]], list[int]]
) -> None:
    """Let speculative decoders say what ``change`` makes of their tokens."""
    original = SpeculativeDecoder.generate_all

    def changed(
        self: SpeculativeDecoder, requests: Sequence[Request], end: Collection[int] | None = None
    ) -> Iterator[tuple[int, Generation]]:
        for number, made in original(self, requests, end):
            yield number, dataclasses.replace(made, ids=change(self, requests[number], made.ids))

    patch.setattr(SpeculativeDecoder, "generate_all", changed)


def soft_target() -> tuple[Target, Drafter]:
    """A target that leaves room for chance, and a drafter that knows it."""
    target = markov_target()
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(0.1)
    return target, perfect_drafter(target, presets()["eagle3_1"])
