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
