"""Attention of a few queries over many keys, as decoding has it.

Legend: B batch, h query heads, g key heads, r = h / g, T queries, S keys, d head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.nn import few_rows

# queries of the heads that share keys, up to which loops of a compiled graph beat a library's products
LOOPS, LOOPS_FLOAT32 = 8, 2
MOST = 64  # queries of a head up to which two plain products beat a fused kernel on a CPU, at any number of keys


def additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where the mask allows, the least finite number elsewhere: -inf would make NaN of a row without keys."""
    return torch.zeros_like(allowed_B1TS, dtype=dtype).masked_fill(~allowed_B1TS, torch.finfo(dtype).min)


def attend_few(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention as two products, (B, h, T, d); the heads of a group share their keys' pass.

    Args:
        bias_B1TS: added to the scaled products.
    """
    weights = weigh(q_BhTd, k_BgSd, bias_B1TS, scale).to(v_BgSd.dtype)
    B, g, r, T, S = weights.shape
    out = _times(r * T, q_BhTd)(weights.view(B, g, r * T, S), v_BgSd.transpose(-1, -2))
    return out.reshape(B, g * r, T, -1)  # values may be narrower than keys


def weigh(q_BhTd: Tensor, k_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """How much each query takes of each key, (B, g, r, T, S), float32 at least; the last dimension adds up to one.

    Args:
        bias_B1TS: added to the scaled products.
    """
    B, h, T, d = q_BhTd.shape
    g = k_BgSd.shape[1]
    grouped = (q_BhTd * scale).reshape(B, g, h // g * T, d)
    scores = _times(h // g * T, q_BhTd)(grouped, k_BgSd).view(B, g, h // g, T, -1)
    if bias_B1TS is not None:
        scores = scores + bias_B1TS[:, :, None]
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _times(rows: int, q_BhTd: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    most = LOOPS_FLOAT32 if q_BhTd.dtype == torch.float32 else LOOPS
    loops = torch.compiler.is_compiling() and q_BhTd.device.type == "cpu" and 0 < rows <= most
    return few_rows.product if loops else _product


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.transpose(-1, -2)
