"""Attention of a few queries over many keys, as decoding has it.

Legend: B batch, h query heads, g key heads, r = h / g, T queries, S keys, d head width; of a product M rows, K
inputs, N outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# queries of the heads that share keys, up to which a compiled graph's loops beat a library's products (tried on Zen 4)
LOOPS = 2
WIDE = 24  # likewise, up to which the library's products of float32 beat those of 16 bits
MOST = 64  # queries of a head up to which two plain products beat a fused kernel on a CPU, at any number of keys


def additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where the mask allows, the least finite number elsewhere: -inf would make NaN of a row without keys."""
    return torch.zeros_like(allowed_B1TS, dtype=dtype).masked_fill(~allowed_B1TS, torch.finfo(dtype).min)


def attend_few(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention as two products, (B, h, T, d); the heads of a group share their keys' pass.

    Args:
        bias_B1TS: added to the scaled products.
    """
    dtype, (B, h, T, _) = v_BgSd.dtype, q_BhTd.shape
    g, S = k_BgSd.shape[1:3]
    if _compiled(q_BhTd) and LOOPS < h // g * T <= WIDE and dtype.itemsize == 2:
        q_BhTd, k_BgSd, v_BgSd = q_BhTd.float(), k_BgSd.float(), v_BgSd.float()
    weights = weigh(q_BhTd, k_BgSd, bias_B1TS, scale).to(v_BgSd.dtype)
    out = _times(q_BhTd, h // g * T)(weights.view(B, g, h // g * T, S), v_BgSd.transpose(-1, -2))
    return out.reshape(B, h, T, -1).to(dtype)  # values may be narrower than keys


def weigh(q_BhTd: Tensor, k_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """How much each query takes of each key, (B, g, r, T, S), float32 at least; the last dimension adds up to one.

    Args:
        bias_B1TS: added to the scaled products.
    """
    B, h, T, d = q_BhTd.shape
    g = k_BgSd.shape[1]
    grouped = (q_BhTd * scale).reshape(B, g, h // g * T, d)
    scores = _times(q_BhTd, h // g * T)(grouped, k_BgSd).view(B, g, h // g, T, -1)
    if bias_B1TS is not None:
        scores = scores + bias_B1TS[:, :, None]
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _compiled(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def _times(x: Tensor, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    return sums if _compiled(x) and 0 < rows <= LOOPS else _product


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.transpose(-1, -2)


def sums(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """``x @ w.T`` row by row, (..., M, N), with equal dimensions in front; sums in float32 at least.

    In compiled code on a CPU they become loops of the graph's own, joined with what stands around them.
    """
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    rows = [(w_NK * x_K[..., None, :]).sum(-1, dtype=wide) for x_K in x_MK.unbind(-2)]
    return torch.stack(rows, -2).to(x_MK.dtype)
