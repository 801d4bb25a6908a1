"""The causal block from elsewhere, merged with the own columns; flex attention itself where there is a GPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from specdec.nn.flex import Flex, Merged, rule
from specdec.nn.sight import Sight
from specdec.nn.unroll import Dense, Keys
from specdec.nn.view import View
from tests.plain_attention import plain_block


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def steps(flat: Sequence[Tensor]) -> list[Keys]:
    return [Keys(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]


def leaves(K: int, T: int, d: int, seed: int = 0) -> list[Tensor]:
    """As attention lays them out: heads beside each other in memory."""
    shapes = [(2, T, 4, d)] + [(2, T, 2, d)] * (2 * K)
    return [random(*shape, seed=seed + i).transpose(1, 2) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("K", [1, 2, 4])
def test_merged_is_the_dense_oracle(K: int) -> None:
    sight, weight = View.packed(torch.tensor([[0] * 7, [0, 0, 1, 1, 1, -1, -1]])).sight, random(2, 4, 7, 6, seed=99)
    found = []
    for kernel in (Merged(plain_block), Dense()):
        flat = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in leaves(K, 7, 6)]
        out = kernel(flat[0], steps(flat[1:]), sight)
        found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


def test_merged_keeps_the_dtype_and_merges_wide() -> None:
    """In bfloat16 too the weights sum to one, and scores in the thousands stay numbers."""
    sight = View.packed(torch.zeros(2, 5, dtype=torch.int64)).sight
    flat = [(100 * x).bfloat16() for x in leaves(3, 5, 6)]
    values = [torch.ones_like(x) if i % 2 else x for i, x in enumerate(flat[1:])]

    def low_block(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        out, lse = plain_block(q.float(), k.float(), v.float(), sight)
        return out.bfloat16(), lse

    out = Merged(low_block)(flat[0], steps(values), sight)
    assert out.dtype == torch.bfloat16 and out.shape == flat[0].shape
    assert float((out.float() - 1).abs().max()) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no backward pass for flex attention on a CPU")
@pytest.mark.parametrize("documents", [[[0] * 256, [0] * 256], [[0] * 100 + [1] * 156, [0] * 200 + [-1] * 56]])
def test_flex_is_the_dense_oracle(documents: list[list[int]]) -> None:
    """Forward and backward in float32, through three steps; a second sight is not taken for the first."""
    kernel, width = Flex(), 32
    for other in (documents, [row[::-1] for row in documents]):
        sight = View.packed(torch.tensor(other, device="cuda")).sight
        for K in (1, 3):
            found = []
            for run in (kernel, Dense()):
                flat = [x.cuda().float().requires_grad_() for x in leaves(K, 256, width)]
                out = run(flat[0], steps(flat[1:]), sight)
                weight = random(*out.shape, seed=9).cuda().float()
                found.append([out, *torch.autograd.grad((out * weight).sum(), flat)])
            for ours, dense in zip(*found, strict=True):
                torch.testing.assert_close(ours, dense, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("window", [0, 40])
def test_the_block_mask_is_made_from_spans(window: int) -> None:
    """On a CPU too: the blocks that flex attention skips, takes whole and asks about, one by one."""
    view = View.packed(torch.tensor([[0] * 256, [0] * 100 + [1] * 120 + [-1] * 36]))
    sight = (view.within(window) if window else view).sight
    block = create_block_mask(rule(sight), 2, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    dense = sight.mask_B1TS
    assert torch.equal(create_mask(rule(sight), 2, 1, 256, 256, device="cpu"), dense)
    seen = dense[:, 0].unflatten(2, (8, 32)).unflatten(1, (8, 32)).any(-1).any(2)
    assert torch.equal(block.to_dense()[:, 0].bool(), seen)
