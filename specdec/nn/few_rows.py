"""Products of a few rows with a matrix, in compiled code on a CPU: a library's call costs more than they do.

float32 takes inductor's own C++ template, which packs the matrix and reads it once for all rows. Of other dtypes a
very few rows are written as sums, which become loops of the graph's own, joined with what stands around them.

Legend: M rows, K inputs, N outputs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import ChoiceCaller, Layout
from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache
from torch.nn import functional as F

MOST = 4  # rows as loops: every one reads the whole matrix
MOST_FLOATS = 6  # rows of float32 by the template: for many the library is faster
OFFER: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"}  # inductor's options


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


class Loops(CustomGraphPass):
    """Inductor's pass that gives every ``F.linear`` of a graph to :func:`linear`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        for node in graph.nodes:
            if node.target is F.linear:
                node.target = linear

    def uuid(self) -> bytes:
        """Of this file; torch's cache of kernels asks."""
        return get_hash_for_files((__file__,), str((MOST, MOST_FLOATS)))


def choose(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """One kernel of those that ``OFFER`` brings: they would race else, and not always end alike."""
    library: list[ChoiceCaller] = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    few = [choice for choice in choices if choice not in library and _few_floats(choice.layout)]
    return (few or library or choices)[:1]


def _few_floats(out: Layout) -> bool:
    return out.dtype == torch.float32 and len(out.size) == 2 and int(out.size[0]) <= MOST_FLOATS


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Inside, compilation asks :func:`choose`."""
    functions = get_algorithm_selector_cache().preprocessing_fns
    functions.append(choose)
    try:
        yield
    finally:
        functions.remove(choose)
