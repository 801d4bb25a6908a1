import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.nn.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_llamas_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(16, 1e-3).to(dtype), LlamaRMSNorm(16, 1e-3).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.uniform_(0.5, 1.5))
    x = (torch.randn(3, 4, 16) * 0.1).to(dtype)
    got = ours(x)
    assert got.dtype == dtype
    if dtype == torch.float32:  # a square is not a power: the last bit may differ
        torch.testing.assert_close(got, theirs(x), rtol=1e-6, atol=0)
    else:
        assert torch.equal(got, theirs(x))


def test_float64_stays_float64_and_follows_the_formula() -> None:
    norm = RMSNorm(4, 0.5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[1.0, -2.0, 3.0, 0.25]], dtype=torch.float64)
    want = [w * v / (sum(u * u for u in x[0].tolist()) / 4 + 0.5) ** 0.5 for w, v in enumerate(x[0].tolist(), start=1)]
    torch.testing.assert_close(norm(x)[0], torch.tensor(want, dtype=torch.float64), rtol=1e-15, atol=0)


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(RMSNorm(8, 1e-6).half()(x), torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 4, 8)], ids=str)
def test_the_gradient_is_that_of_the_formula(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    norm = RMSNorm(8, 0.1).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    leaves = [x.requires_grad_(), norm.weight]
    plain = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    found, wanted = (torch.autograd.grad((out * grad).sum(), leaves) for out in (norm(x), plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_gradients_where_one_is_frozen(frozen: str) -> None:
    x, norm = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), RMSNorm(8, 0.1).double()
    (x if frozen == "x" else norm.weight).requires_grad_(False)
    leaf = norm.weight if frozen == "x" else x
    plain = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    found, wanted = (torch.autograd.grad(out.square().sum(), leaf)[0] for out in (norm(x), plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_dtypes_of_what_they_are_for() -> None:
    """Under autocast the weight is wider than the states; the sums over them are taken wide."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(500, 8, generator=generator).bfloat16().double().requires_grad_()
    norm, wide = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6).double()
    x = exact.detach().bfloat16().requires_grad_()
    norm(x).float().sum().backward()
    wide(exact).sum().backward()
    assert x.grad is not None and exact.grad is not None and norm.weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.weight.grad.double(), wide.weight.grad, rtol=1e-5, atol=1e-4)
