"""Warped laws against transformers' own processors.

Legend: B sequences, N nodes, V vocabulary.
"""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.decoding.sampling import LogitsProcessor, seen_tokens
from specdec.decoding.tree import ancestors
from tests.decoding.trees import path_to

V = 40


def theirs(warp: LogitsProcessor, logits_MV: Tensor, ids_MT: Tensor) -> Tensor:
    """What generate() draws from, steps in the order in which it puts them; see GenerationMixin."""
    steps = LogitsProcessorList()
    if warp.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(warp.repetition_penalty))
    if warp.temperature not in (0, 1):
        steps.append(TemperatureLogitsWarper(warp.temperature))
    if warp.temperature and warp.top_k:
        steps.append(TopKLogitsWarper(warp.top_k))
    if warp.temperature and warp.top_p < 1:
        steps.append(TopPLogitsWarper(warp.top_p))
    if warp.temperature and warp.min_p:
        steps.append(MinPLogitsWarper(warp.min_p))
    scores_MV = steps(ids_MT, logits_MV)
    if warp.temperature == 0:
        return torch.nn.functional.one_hot(scores_MV.argmax(-1), V).to(scores_MV.dtype)
    return scores_MV.softmax(-1)


def seen_in(ids_MT: Tensor) -> Tensor:
    return torch.zeros(len(ids_MT), V, dtype=torch.bool).scatter(1, ids_MT, True)


WARPS = [
    LogitsProcessor(temperature, top_p, top_k, min_p, penalty)
    for temperature, top_p, top_k, min_p, penalty in itertools.product(
        (0.0, 0.6, 1.0, 1.7), (0.3, 0.9, 1.0), (0, 1, 7, 100), (0.0, 0.1, 1.0), (0.8, 1.0, 1.3)
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_what_transformers_draws_from(dtype: torch.dtype) -> None:
    """All 432 combinations, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    logits_MV = 3 * torch.randn(50, V, generator=generator, dtype=dtype)
    ids_MT = torch.randint(0, V, (50, 12), generator=generator)
    for warp in WARPS:
        law_MV = warp.probs(logits_MV, seen_in(ids_MT))
        assert law_MV.dtype == dtype
        assert torch.equal(law_MV, theirs(warp, logits_MV, ids_MT)), warp


def test_steps_interact_so_the_order_can_be_told() -> None:
    """A law in which every two steps swapped would give another: the test above sees the order."""
    logits_1V = torch.full((1, V), -30.0)
    logits_1V[0, :4] = torch.tensor([0.5, 0.25, 0.15, 0.10]).log()
    warp = LogitsProcessor(temperature=1.0, top_p=0.65, top_k=3)  # of the three: 0.56, 0.28, 0.17
    assert warp.probs(logits_1V, None)[0].nonzero().flatten().tolist() == [0, 1]
    assert LogitsProcessor(temperature=1.0, top_p=0.85, min_p=0.25).probs(logits_1V, None)[0].gt(0).sum() == 3
    assert LogitsProcessor(temperature=2.0, top_p=0.65).probs(logits_1V, None)[0].gt(0).sum() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_nucleus_is_one_token(dtype: torch.dtype) -> None:
    """Even if 1 - top_p rounds to one."""
    logits_MV = torch.randn(50, V, dtype=dtype, generator=torch.Generator().manual_seed(4))
    assert torch.equal(
        LogitsProcessor(0.7, top_p=1e-30).probs(logits_MV, None), LogitsProcessor().probs(logits_MV, None)
    )


def test_a_draft_on_the_path_counts_as_seen() -> None:
    """The law at a node is what transformers gives after the prompt and the path to the node."""
    parents = [0, 0, 0, 1, 1, 3]
    generator = torch.Generator().manual_seed(3)
    B, N, T = 4, len(parents), 5
    tokens_BN = torch.randint(0, 6, (B, N), generator=generator)  # repetitions on and off the path
    prompt_BT = torch.randint(0, V, (B, T), generator=generator)
    logits_BNV = 3 * torch.randn(B, N, V, generator=generator)
    warp = LogitsProcessor(temperature=0.9, top_p=0.9, repetition_penalty=1.4)
    seen_BNV = seen_tokens(tokens_BN, ancestors(torch.tensor(parents).expand(B, N)), seen_in(prompt_BT))
    law_BNV = warp.probs(logits_BNV, seen_BNV)
    for node in range(N):
        ids_BT = torch.cat([prompt_BT, tokens_BN[:, path_to(node, parents)]], 1)
        assert torch.equal(seen_BNV[:, node], seen_in(ids_BT))
        assert torch.equal(law_BNV[:, node], theirs(warp, logits_BNV[:, node], ids_BT))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"sampling: {name} must be .*, not ") as refusal:
        LogitsProcessor(**values)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_a_repetition_penalty_wants_to_know_the_past() -> None:
    with pytest.raises(ValueError, match="give seen_BNV"):
        LogitsProcessor(repetition_penalty=1.1).probs(torch.zeros(1, 1, V), None)
