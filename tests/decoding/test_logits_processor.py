"""Warped laws against transformers' own processors.

Legend: M rows, V vocabulary.
"""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.decoding.sampling import LogitsProcessor

V = 40


def theirs(warp: LogitsProcessor, logits_MV: Tensor) -> Tensor:
    """What generate() draws from, steps in the order in which it puts them; see GenerationMixin."""
    steps = LogitsProcessorList()
    if warp.temperature not in (0, 1):
        steps.append(TemperatureLogitsWarper(warp.temperature))
    if warp.temperature and warp.top_k:
        steps.append(TopKLogitsWarper(warp.top_k))
    if warp.temperature and warp.top_p < 1:
        steps.append(TopPLogitsWarper(warp.top_p))
    if warp.temperature and warp.min_p:
        steps.append(MinPLogitsWarper(warp.min_p))
    scores_MV = steps(torch.zeros(len(logits_MV), 1, dtype=torch.int64), logits_MV)
    if warp.temperature == 0:
        return torch.nn.functional.one_hot(scores_MV.argmax(-1), V).to(scores_MV.dtype)
    return scores_MV.softmax(-1)


WARPS = [
    LogitsProcessor(temperature, top_p, top_k, min_p)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.0, 0.6, 1.0, 1.7), (0.3, 0.9, 1.0), (0, 1, 7, 100), (0.0, 0.1, 1.0)
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_what_transformers_draws_from(dtype: torch.dtype) -> None:
    """All 144 combinations, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    logits_MV = 3 * torch.randn(50, V, generator=generator, dtype=dtype)
    for warp in WARPS:
        law_MV = warp.probs(logits_MV)
        assert law_MV.dtype == dtype
        assert torch.equal(law_MV, theirs(warp, logits_MV)), warp


def test_steps_interact_so_the_order_can_be_told() -> None:
    """A law in which every two steps swapped would give another: the test above sees the order."""
    logits_1V = torch.full((1, V), -30.0)
    logits_1V[0, :4] = torch.tensor([0.5, 0.25, 0.15, 0.10]).log()
    warp = LogitsProcessor(temperature=1.0, top_p=0.65, top_k=3)  # of the three: 0.56, 0.28, 0.17
    assert warp.probs(logits_1V)[0].nonzero().flatten().tolist() == [0, 1]
    assert (
        LogitsProcessor(temperature=1.0, top_p=0.85, min_p=0.25).probs(logits_1V)[0].gt(0).sum()
        == 3
    )
    assert LogitsProcessor(temperature=2.0, top_p=0.65).probs(logits_1V)[0].gt(0).sum() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_nucleus_is_one_token(dtype: torch.dtype) -> None:
    """Even if 1 - top_p rounds to one."""
    logits_MV = torch.randn(50, V, dtype=dtype, generator=torch.Generator().manual_seed(4))
    assert torch.equal(
        LogitsProcessor(0.7, top_p=1e-30).probs(logits_MV), LogitsProcessor().probs(logits_MV)
    )


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
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"sampling: {name} must be .*, not ") as refusal:
        LogitsProcessor(**values)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
