"""The truth that everything rests on: what is trained is what is decoded."""

import pytest
import torch

from specdec.decoding.growth import Chain
from specdec.decoding.proposer import Proposer
from specdec.drafter import DrafterSpec
from specdec.training.ttt import ttt_unroll
from tests.tiny import HIDDEN, VOCAB, all_specs, presets, tiny_drafter

LENGTH, STEPS = 8, 3
SPECS = list(all_specs())


def worst_gap(spec: DrafterSpec, documents: list[int]) -> float:
    """Largest difference between unrolled and cached logits, over every anchor and depth."""
    drafter = tiny_drafter(spec)
    n = len(drafter.config.aux_layers)
    ids = torch.randint(0, VOCAB, (1, LENGTH))
    aux = torch.randn(1, LENGTH, n, HIDDEN, dtype=torch.float64)
    unrolled = [
        drafter.logits(step.normed_BTH)[0] for step in ttt_unroll(drafter, ids, aux, torch.tensor([documents]), STEPS)
    ]
    gap = 0.0
    for anchor in range(LENGTH - 1):
        first = documents.index(documents[anchor])
        proposer = Proposer(drafter, Chain(STEPS), LENGTH)
        frontier = proposer.extend(ids[0, first + 1 : anchor + 2], aux[:, first : anchor + 1])
        for k in range(STEPS):
            want = unrolled[k][anchor].log_softmax(-1)
            gap = max(gap, float((frontier.log_probs_KD[0] - want).abs().max()))
            token = anchor + 2 + k
            if token >= LENGTH or documents[token] != documents[anchor]:
                break
            seen = torch.ones(1, k + 1, dtype=torch.bool)
            frontier = proposer._expand(ids[0, token : token + 1], frontier.h_KH, seen, torch.arange(k + 1))
    return gap


def test_there_are_many_combinations() -> None:
    assert len(SPECS) > 100


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_unrolled_logits_equal_cached_drafting(spec: DrafterSpec) -> None:
    assert worst_gap(spec, [0] * LENGTH) < 1e-12


@pytest.mark.parametrize("name", presets())
def test_the_same_in_packed_documents(name: str) -> None:
    assert worst_gap(presets()[name], [0, 0, 0, 0, 1, 1, 1, 1]) < 1e-12
