"""Products of few rows: the library's numbers, and in a compiled graph no call of it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.few_rows import MOST, linear, product


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [None, random(7, seed=2)], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 5), (MOST, 5), (1, 2, 5), (MOST + 1, 5), (0, 5), (5,)])
def test_it_is_torchs_linear(shape: tuple[int, ...], bias: Tensor | None) -> None:
    x, w = random(*shape), random(7, 5, seed=1)
    got, want = linear(x, w, bias), F.linear(x, w, bias)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_float32_is_left_to_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.nn.few_rows.product", None)
    x, w = random(1, 5).float(), random(7, 5, seed=1).float()
    assert linear(x, w).equal(F.linear(x, w))


def test_a_product_keeps_the_dimensions_in_front_and_sums_wide() -> None:
    x, w = random(3, 2, 4, 300).bfloat16(), random(3, 2, 6, 300, seed=1).bfloat16()
    got = product(x, w)
    assert got.shape == (3, 2, 4, 6) and got.dtype == torch.bfloat16
    want = x.double() @ w.double().transpose(-1, -2)
    assert (got.double() - want).abs().max() < 0.02 * want.abs().max()
