"""Tensors that the backward pass makes again instead of keeping."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class _Held(torch.autograd.Function):
    """A node that holds tensors as any operator does, so that gradient checkpointing can let go of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return torch.empty_like(anchor)


@contextlib.contextmanager
def remade(tensor: Tensor, make: Callable[..., Tensor], *sources: Tensor) -> Iterator[None]:
    """Inside, operators that would keep ``tensor`` for their backward pass keep ``make`` and ``sources`` instead.

    Args:
        make: makes the same numbers again of ``sources``; called without gradient. A tensor that it holds itself
            stays in memory under gradient checkpointing too.
        sources: tensors that are kept anyway.
    """
    place, count, dtype, whole = tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous()
    held = _Held.apply(torch.empty(0, requires_grad=True), *sources).grad_fn

    def pack(kept: Tensor) -> Any:  # lives as long as the graph: it must not know ``tensor`` itself
        same = kept.data_ptr() == place and kept.numel() == count and kept.dtype == dtype
        in_order = whole and kept.is_contiguous()  # else it may be transposed
        return kept.shape if same and in_order else kept

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return make(*held.saved_tensors).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
