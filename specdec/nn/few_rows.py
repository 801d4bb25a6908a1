"""Products of a few rows with a matrix, in compiled code on a CPU: a library's call costs more than they do.

Of other dtypes than float32 a very few rows are written as sums, which become loops of the graph's own, joined with
what stands around them.

Legend: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 4  # rows as loops: every one reads the whole matrix


def product(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """``x @ w.T`` row by row, (..., M, N), with equal dimensions in front; sums in float32 at least."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    rows = [(w_NK * x_K[..., None, :]).sum(-1, dtype=wide) for x_K in x_MK.unbind(-2)]
    return torch.stack(rows, -2).to(x_MK.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by :func:`product` if it is few rows on a CPU, and not float32."""
    rows = input.shape[:-1].numel()
    plain = input.device.type == "cpu" and input.is_floating_point() and input.dtype == weight.dtype
    if not plain or input.dtype == torch.float32 or not 0 < rows <= MOST:
        return F.linear(input, weight, bias)
    out = product(input.reshape(rows, -1), weight).view(*input.shape[:-1], -1)
    return out if bias is None else out + bias
