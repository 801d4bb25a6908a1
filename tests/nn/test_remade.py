"""What is made again instead of kept."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.mlp import SwiGLU
from specdec.nn.remade import remade


def floats(function, *args: Tensor) -> tuple[Tensor, int]:  # type: ignore[no-untyped-def]
    """A result, and how many bytes wait for its backward pass."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = function(*args)
    return out, sum(kept.values())


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_gradients_are_the_same_and_the_tensor_is_not_kept() -> None:
    x, first, second = random(2, 5, 8, seed=0), random(16, 8, seed=1), random(8, 16, seed=2)

    def plain(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, first).exp(), second)

    calls = []

    def thrifty(x: Tensor) -> Tensor:
        middle = F.linear(x, first)
        product = middle.exp()

        def make() -> Tensor:
            calls.append(torch.is_grad_enabled())
            return middle.exp()

        with remade(product, make):
            return F.linear(product, second)

    one, other = plain(x), thrifty(x)
    assert torch.equal(one, other) and not calls
    for a, b in zip(
        torch.autograd.grad(one.square().sum(), [x, first, second]),
        torch.autograd.grad(other.square().sum(), [x, first, second]),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert calls == [False]


def test_other_tensors_are_kept_as_ever() -> None:
    """One that only looks alike, a part of it, or its memory in another order, is not the tensor."""
    leaf = random(4, 4, seed=0)
    product, factor = leaf * 1.0, torch.arange(16.0, dtype=torch.float64).view(4, 4)

    def never() -> Tensor:
        raise AssertionError

    with remade(product, never):
        one = (leaf * 2.0).square().sum() + product[:2].square().sum() + (product.T @ factor).sum()
    (gradient,) = torch.autograd.grad(one, leaf)
    by_part = torch.where(torch.arange(4)[:, None] < 2, 2 * leaf, torch.zeros_like(leaf))
    by_turned = torch.ones(4, 4, dtype=torch.float64) @ factor.T
    torch.testing.assert_close(gradient, 8 * leaf + by_part + by_turned.T, rtol=0, atol=1e-12)
    product = leaf * 1.0
    with remade(product, lambda: leaf * 1.0):
        turned = product.T @ product.T  # keeps both factors, each the tensor in another order
    plain = leaf.T @ leaf.T
    wanted, found = (torch.autograd.grad((x * factor).sum(), leaf)[0] for x in (plain, turned))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_gated_block_keeps_no_product() -> None:
    """The widest of a layer: 2 I channels of gate and up wait, and not the I of their product."""
    width, inside = 4, 64
    block = SwiGLU(width, inside).double()
    x = random(3, 7, width, seed=3)
    out, kept = floats(block, x)
    weights = sum(p.numel() for p in block.parameters())
    assert kept <= 8 * (weights + 21 * (width + 2 * inside))
    gate, up = block.gate_up_proj(x).chunk(2, -1)
    want = block.down_proj(F.silu(gate) * up)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), [x, *block.parameters()]),
        torch.autograd.grad(want.square().sum(), [x, *block.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
