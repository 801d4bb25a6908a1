"""A drafter that never proposes what the target says: one token a pass, and still the target's own text.

Legend: B sequences, N tree nodes with the root, V vocabulary, D draft vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.decoding import (
    Chain,
    DraftShape,
    DraftTree,
    DynamicTree,
    PlainDecoder,
    Proposer,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target

SHAPES: dict[str, DraftShape] = {
    "chain": Chain(4),
    "static": StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=8),
}
SAMPLINGS = {"greedy": Sampling(), "one_hot": Sampling(temperature=0.8)}
REQUESTS = [Request([7], 14, 3), Request([3, 4, 5, 6, 7, 8], 9, 4), Request(list(range(30)), 11, 5)]
TARGET, DRAFTER = tiny_target(), tiny_drafter(presets()["eagle3_1"])
OFTEN = markov_target(context=0.45)  # whose drafter would often be right
RIGHT = disturb(perfect_drafter(OFTEN, presets()["eagle1"]), 0.4)


class Contrary(Proposer):
    """Grows its trees as ever, but puts another token in the place of every first draft that would be right."""

    truths: list[list[int]]  # the texts, as plain decoding says them
    replaced = 0

    def propose(self, length_B: Tensor, root_B: Tensor, *rest: Any) -> DraftTree:
        tree = super().propose(length_B, root_B, *rest)
        tokens_BN = tree.tokens_BN.clone()
        for b, (length, root) in enumerate(zip(length_B.tolist(), root_B.tolist(), strict=True)):
            fitting = {
                text[length + 1]
                for text in self.truths
                if length + 1 < len(text) and text[length] == root
            }
            wrong = min(set(range(VOCAB)) - fitting)
            firsts = (tree.parents_BN[b, 1:] == 0).nonzero()[:, 0] + 1
            bad = [int(node) for node in firsts if int(tokens_BN[b, node]) in fitting]
            tokens_BN[b, bad] = wrong
            type(self).replaced += len(bad)
        return tree._replace(tokens_BN=tokens_BN)


@pytest.mark.parametrize(
    ("shape", "sampling", "batch"),
    [
        ("chain", "greedy", 3),
        ("static", "one_hot", 3),
        ("dynamic", "greedy", 1),
        ("dynamic", "one_hot", 1),
    ],
)
def test_nothing_is_accepted_and_nothing_is_lost(
    shape: str, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = SAMPLINGS[sampling]
    plain = [
        PlainDecoder(OFTEN, how).generate(prompt, most, (), seed).ids
        for prompt, most, seed in REQUESTS
    ]
    truths = [[*request.prompt, *ids] for request, ids in zip(REQUESTS, plain, strict=True)]
    monkeypatch.setattr(Contrary, "truths", truths, raising=False)
    monkeypatch.setattr(Contrary, "replaced", 0)
    monkeypatch.setattr("specdec.decoding.round.Proposer", Contrary)
    decoder = SpeculativeDecoder(OFTEN, RIGHT, SHAPES[shape], how, batch=batch)
    made = dict(decoder.generate_all(REQUESTS))
    assert [made[number].ids for number in range(len(REQUESTS))] == plain
    passes = [count for one in made.values() for count in one.accepted]
    assert set(passes) == {0}  # acceptance length 1
    assert len(passes) == sum(len(ids) - 1 for ids in plain)  # the first token is the prefill's
    assert Contrary.replaced > 3


class Opposite(Sampling):
    """The target's distribution without the tokens that the drafter knows."""

    known_D: Tensor

    def probs(self, logits_BNV: Tensor) -> Tensor:
        struck = logits_BNV.clone()
        struck[..., self.known_D] = float("-inf")
        return super().probs(struck)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [(SHAPES["chain"], "one_hot"), (SHAPES["static"], "without_replacement")],
    ids=["chain", "static"],
)
def test_drawn_drafts_that_cannot_be_taken_leave_the_targets_distribution(
    shape: DraftShape, rule: Any
) -> None:
    """Of a drafter whose every token the target excludes, no draft is ever taken; tokens follow the target's."""
    sampling = Opposite(temperature=1.0, rule=rule)
    object.__setattr__(sampling, "known_D", DRAFTER.vocab.target_ids_D)
    runs, prompt = 200, [3, 4, 5]
    requests = [Request(prompt, 2, seed) for seed in range(runs)]
    decoder = SpeculativeDecoder(TARGET, DRAFTER, shape, sampling, batch=16)
    made = [generation for _, generation in decoder.generate_all(requests)]
    assert {count for one in made for count in one.accepted} == {0}
    counts = torch.bincount(torch.tensor([one.ids[1] for one in made]), minlength=VOCAB).double()
    with torch.inference_mode():
        first_V = sampling.probs(TARGET.model(torch.tensor([prompt])).logits[:, -1])[0]
        ids = first_V.nonzero()[:, 0]
        texts = torch.cat([torch.tensor(prompt).expand(len(ids), -1), ids[:, None]], 1)
        second_BV = sampling.probs(TARGET.model(texts).logits[:, -1])
    expected = runs * (first_V[ids, None] * second_BV).sum(0).double()
    assert not counts[DRAFTER.vocab.target_ids_D].any()
    rare = expected < 5
    assert (~rare).sum() > 3
    cells, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    statistic = ((cells - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(len(cells) - 1.0, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom / 2, statistic / 2)) > 1e-4
