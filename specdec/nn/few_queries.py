"""Attention of a few queries over many keys, as decoding has it.

Legend: B batch, h query heads, g key heads, r = h / g, T queries, S keys, d head width.
"""

import torch
from torch import Tensor

STEP = 16  # widths of keys and values that one kernel serves are multiples of it
FUSED = (torch.float32, torch.bfloat16, torch.float16)  # its dtypes
MOST = 64  # queries of a head up to which two plain products beat a fused kernel on a CPU, at any number of keys


def additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where the mask allows, the least finite number elsewhere: -inf would make NaN of a row without keys."""
    return torch.zeros_like(allowed_B1TS, dtype=dtype).masked_fill(~allowed_B1TS, torch.finfo(dtype).min)


def attend_few(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention, (B, h, T, d); the heads of a group share their keys' pass.

    Two products, or in a compiled round on a CPU one kernel (:mod:`specdec.decoding.few_queries`), if widths and dtypes
    suit it.

    Args:
        bias_B1TS: added to the scaled products.
    """
    attend = attend_fused if _fusible(q_BhTd, k_BgSd, v_BgSd, bias_B1TS) else by_products
    return attend(q_BhTd, k_BgSd, v_BgSd, bias_B1TS, scale)


def by_products(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """The same with a library's products."""
    B, h, T, _ = q_BhTd.shape
    weights = weigh(q_BhTd, k_BgSd, bias_B1TS, scale).to(v_BgSd.dtype)
    out = weights.flatten(2, 3) @ v_BgSd
    return out.reshape(B, h, T, -1)  # values may be narrower than keys


def weigh(q_BhTd: Tensor, k_BgSd: Tensor, bias_B1TS: Tensor | None, scale: float) -> Tensor:
    """How much each query takes of each key, (B, g, r, T, S), float32 at least; the last dimension adds up to one.

    Args:
        bias_B1TS: added to the scaled products.
    """
    B, h, T, d = q_BhTd.shape
    g = k_BgSd.shape[1]
    grouped = (q_BhTd * scale).reshape(B, g, h // g * T, d)
    scores = (grouped @ k_BgSd.transpose(-1, -2)).view(B, g, h // g, T, -1)
    if bias_B1TS is not None:
        scores = scores + bias_B1TS[:, :, None]
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


@torch.library.custom_op("specdec::attend_fused", mutates_args=())
def attend_fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """:func:`attend_few` as an operation of its own, for compilation to find; without gradients."""
    return by_products(q, k, v, bias, scale).transpose(1, 2).contiguous().transpose(1, 2)


@attend_fused.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    B, h, T, _ = q.shape
    return v.new_empty(B, T, h, v.shape[-1]).transpose(1, 2)


def _fusible(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    if not torch.compiler.is_compiling() or torch.is_grad_enabled() or q.device.type != "cpu":
        return False
    given = [x for x in (q, k, v, bias) if x is not None]
    suits = all(x.dtype in FUSED for x in given) and q.shape[-1] % STEP == 0 == v.shape[-1] % STEP
    return suits and (bias is None or bias.shape[1] == 1)
