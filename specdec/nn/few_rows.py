"""Products of a few rows with a matrix, in compiled code on a CPU.

Written as sums they become loops of the graph's own, joined with what stands before and behind them: a library's call
has an overhead that a matrix read once or twice does not pay for.

Legend: M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn import functional as F

MOST = 4  # every row reads the whole matrix


def product(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """``x @ w.T`` row by row, (..., M, N), with equal dimensions in front; sums in float32 at least."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    rows = [(w_NK * x_K[..., None, :]).sum(-1, dtype=wide) for x_K in x_MK.unbind(-2)]
    return torch.stack(rows, -2).to(x_MK.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by :func:`product` if it is few rows on a CPU."""
    rows = input.shape[:-1].numel()
    plain = input.device.type == "cpu" and input.is_floating_point() and input.dtype == weight.dtype
    if not plain or not 0 < rows <= MOST:
        return F.linear(input, weight, bias)
    out = product(input.reshape(rows, -1), weight).view(*input.shape[:-1], -1)
    return out if bias is None else out + bias


class Loops(CustomGraphPass):
    """Inductor's pass that gives every ``F.linear`` of a graph to :func:`linear`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        for node in graph.nodes:
            if node.target is F.linear:
                node.target = linear

    def uuid(self) -> bytes:
        """Of this file; torch's cache of kernels asks."""
        return get_hash_for_files((__file__,), str(MOST))
