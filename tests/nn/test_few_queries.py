"""Two plain products against PyTorch's own attention.

Legend: B batch, h query heads, g key heads, T queries, S keys, d head width.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.few_queries import additive, attend_few

B, T, S, d = 2, 5, 9, 6
SCALE = d**-0.5
heads = pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2), (6, 1)])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parts(h: int, g: int, queries: int = T, value_width: int = d) -> tuple[Tensor, Tensor, Tensor]:
    return random(B, h, queries, d), random(B, g, S, d, seed=1), random(B, g, S, value_width, seed=2)


def allowed() -> Tensor:
    """A mask (B, 1, T, S) that leaves every row a key."""
    mask_B1TS = random(B, 1, T, S, seed=3) > 0
    mask_B1TS[..., 0] = True
    return mask_B1TS


def torchs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float = SCALE) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@heads
@pytest.mark.parametrize("queries", [1, T])
def test_without_a_bias(h: int, g: int, queries: int) -> None:
    q, k, v = parts(h, g, queries)
    got = attend_few(q, k, v, None, SCALE)
    assert got.shape == (B, h, queries, d)
    torch.testing.assert_close(got, torchs(q, k, v, None), rtol=0, atol=1e-14)


@heads
def test_under_a_mask(h: int, g: int) -> None:
    """What the boolean mask says, and its additive form says the same."""
    (q, k, v), mask_B1TS = parts(h, g), allowed()
    got = attend_few(q, k, v, additive(mask_B1TS, torch.float64), SCALE)
    torch.testing.assert_close(got, torchs(q, k, v, mask_B1TS), rtol=0, atol=1e-14)
    assert (got - attend_few(q, k, v, None, SCALE)).abs().max() > 0.1


@heads
@pytest.mark.parametrize("batch", [1, B])
def test_any_bias_is_added_to_the_scaled_products(h: int, g: int, batch: int) -> None:
    (q, k, v), bias_B1TS = parts(h, g), random(batch, 1, T, S, seed=4)
    got = attend_few(q, k, v, bias_B1TS, 0.3)
    torch.testing.assert_close(got, torchs(q, k, v, bias_B1TS, 0.3), rtol=0, atol=1e-14)
    assert (got - attend_few(q, k, v, bias_B1TS, SCALE)).abs().max() > 1e-3  # the scale counts


def test_values_may_be_narrower_than_keys() -> None:
    """As in DeepSeek's latent attention."""
    q, k, v = parts(4, 4, value_width=4)
    torch.testing.assert_close(attend_few(q, k, v, None, SCALE), torchs(q, k, v, None), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_keys_is_a_number_and_disturbs_no_other(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in parts(4, 2))
    mask_B1TS = allowed()
    wanted = attend_few(q, k, v, additive(mask_B1TS, dtype), SCALE)
    mask_B1TS[0, :, 2] = False
    got = attend_few(q, k, v, additive(mask_B1TS, dtype), SCALE)
    assert got.isfinite().all() and got.dtype == dtype
    others = torch.ones(B, T, dtype=torch.bool)
    others[0, 2] = False
    assert torch.equal(got.transpose(1, 2)[others], wanted.transpose(1, 2)[others])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)])
def test_in_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    (q, k, v), mask_B1TS = parts(4, 2), allowed()
    got = attend_few(q.to(dtype), k.to(dtype), v.to(dtype), additive(mask_B1TS, dtype), SCALE)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torchs(q, k, v, mask_B1TS), rtol=0, atol=tolerance)


def test_the_additive_mask_is_zero_or_the_least_number() -> None:
    mask_B1TS = allowed()
    for dtype in (torch.float64, torch.bfloat16):
        bias = additive(mask_B1TS, dtype)
        assert bias.dtype == dtype and torch.equal(bias == 0, mask_B1TS)
        assert (bias[~mask_B1TS] == torch.finfo(dtype).min).all()
