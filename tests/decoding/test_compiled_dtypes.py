"""Compiled decoding in the dtypes it is used in, over growths, families and drawn drafts."""

from dataclasses import replace

import pytest
import torch

from specdec.decoding import (
    Chain,
    DynamicTree,
    Growth,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)  # fmt: skip
from specdec.drafter import Drafter
from specdec.evaluation.greedy_check import Difference
from specdec.nn.few_queries import STEP
from specdec.target import Target
from tests.perfect import SHALLOW, TAPPED, astray, disturb, markov_target, perfect_drafter
from tests.tiny import presets

pytestmark = [pytest.mark.usefixtures("no_graphs"), pytest.mark.timeout(600)]  # several graphs a test

REQUESTS = [Request(prompt, 50, seed) for seed, prompt in enumerate(([3, 4, 5], [17], list(range(30)), [9, 2]))]
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def pair(family: str, dtype: torch.dtype) -> tuple[Target, Drafter]:
    """Drafts are taken now and then; heads are as wide as the attention kernel wants them."""
    wide = markov_target(family, {"llama": 0.55, "mistral": 0.55, "gemma2": 1.6}[family], head_dim=STEP, **SHALLOW)
    spec = replace(presets()["eagle3_1"], **TAPPED, attention_window=16 if family == "mistral" else "full")
    drafter = disturb(perfect_drafter(wide, spec, sharpness=2.0), 0.6)
    return Target(wide.model.to(dtype)), drafter.to(dtype)


@pytest.mark.parametrize(
    ("family", "growth", "dtype", "batch"),
    [
        ("llama", Chain(3), torch.float32, 1),
        ("llama", Chain(7), torch.bfloat16, 1),
        ("mistral", TREE, torch.bfloat16, 2),
        ("gemma2", DynamicTree(depth=3, top_k=2, nodes=6), torch.float32, 2),
    ],
)
def test_compiled_tokens_are_plain_ones_but_for_near_ties(
    family: str, growth: Growth, dtype: torch.dtype, batch: int
) -> None:
    target, drafter = pair(family, dtype)
    made = dict(SpeculativeDecoder(target, drafter, growth, batch=batch, compiled=True).generate_all(REQUESTS))
    plain, agreed, changed = PlainDecoder(target), 0, 0
    for number, (prompt, most, _) in enumerate(REQUESTS):
        got, wanted = made[number].ids, plain.generate(prompt, most).ids
        assert len(got) == len(wanted) == most
        at = next((i for i in range(most) if got[i] != wanted[i]), most)
        agreed, changed = agreed + at, changed + astray([prompt[-1], *wanted])
        assert at == most or Difference.of(target, number, [*prompt, *wanted[:at]], at, got[at], wanted[at]).near_tie
    assert agreed > 100 and changed > 0.1 * sum(most for _, most, _ in REQUESTS)
    assert sum(sum(one.accepted) for one in made.values()) > 20


@pytest.mark.parametrize("rule", ["with_replacement", "without_replacement"])
def test_compiled_draws_are_those_of_eager_decoding(rule: str) -> None:
    target, drafter = pair("llama", torch.float64)
    sampling = Sampling(temperature=0.9, top_k=20, rule=rule)  # type: ignore[arg-type]
    eager, compiled = (
        dict(SpeculativeDecoder(target, drafter, TREE, sampling, batch=2, compiled=how).generate_all(REQUESTS))
        for how in (False, True)
    )
    assert [compiled[n].ids for n in range(len(REQUESTS))] == [eager[n].ids for n in range(len(REQUESTS))]
    assert [compiled[n].accepted for n in range(len(REQUESTS))] == [eager[n].accepted for n in range(len(REQUESTS))]
    assert {0, 1} <= {taken for one in eager.values() for taken in one.accepted}
