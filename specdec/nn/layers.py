"""What a decoder layer is made of: attention that leaves masks and keys to the view, the gated feed-forward, RMSNorm.

Each keeps of its forward pass only what its backward pass cannot make again cheaply: training memory depends on it.

Legend: B batch, T nodes, H width, h query heads, g key heads, d head width, W = (h + 2g) d.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.nn.backend import pointwise, wide
from specdec.nn.cache import attend
from specdec.nn.rope import apply_rope
from specdec.nn.view import View


@pointwise
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_wide = x.to(wide(x.dtype))
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


@pointwise
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = wide(x.dtype)
    x_wide, grad = x.to(kind), grad.to(kind)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    normed = x_wide * scale
    by_normed = grad * weight.to(kind)
    grad_x = scale * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input alone; autograd's own formula would keep three more tensors of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return *_norm_backward(grad, x, weight, ctx.eps), None


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32 at least.

    (https://arxiv.org/abs/1910.07467), in the Llama form: the product with the weight is in the input's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., width); the dtype is kept."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _RMSNorm.apply(x, self.weight, self.eps)
        return _norm(x, self.weight, self.eps)


@pointwise
def _split_heads(qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_BTnd.transpose(1, 2).split([h, g, g], dim=1)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.contiguous()


@pointwise
def _join_heads(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = torch.cat([apply_rope(q_BhTd, cos, -sin), apply_rope(k_BgTd, cos, -sin), v_BgTd], dim=1)
    return heads.transpose(1, 2).contiguous()


class _SplitHeads(torch.autograd.Function):
    """Queries, keys and values out of one projection, the first two rotated; nothing of it is kept."""

    @staticmethod
    def forward(ctx: Any, qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _split_heads(qkv_BTnd, cos, sin, h, g)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor) -> tuple[Tensor | None, ...]:
        return _join_heads(q_BhTd, k_BgTd, v_BgTd, *ctx.saved_tensors), None, None, None, None


class NormHeads(nn.Module):
    """Norms on the queries and keys of every head before they are rotated, as in Qwen3."""

    def __init__(self, q_norm: nn.Module, k_norm: nn.Module, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sizes = [heads, kv_heads, kv_heads]

    def forward(self, qkv_BTnd: Tensor) -> Tensor:
        """(B, T, h + 2g, d) to the same."""
        q, k, v = qkv_BTnd.split(self.sizes, dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)


class Attention(nn.Module):
    """Multi-head attention with grouped keys (https://arxiv.org/abs/2305.13245) and an explicit head width.

    Queries, keys and values come from one matrix, in this order.

    Args:
        width: H, of input and output.
        layer: index under which the view's cache keeps this layer's keys.
        norm: on the heads, (B, T, h + 2g, d) to the same, before queries and keys are rotated.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, layer: int, norm: nn.Module) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        self.qkv_proj = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.norm = norm

    def forward(
        self, x_BTH: Tensor, view: View, rope: tuple[Tensor, Tensor], beside_BTW: Tensor | None = None
    ) -> Tensor:
        """(B, T, H) to the same, or (B, M, H) where the view asks for M nodes only; all give their keys.

        Args:
            rope: the tables for ``view.positions_BT``.
            beside_BTW: what else goes into queries, keys and values.
        """
        qkv_BTW = self.qkv_proj(x_BTH)
        if beside_BTW is not None:
            qkv_BTW = qkv_BTW + beside_BTW
        qkv_BTnd = self.norm(qkv_BTW.unflatten(-1, (-1, self.head_dim)))
        split = _SplitHeads.apply if qkv_BTnd.requires_grad else _split_heads
        q, k, v = split(qkv_BTnd, *rope, self.heads, self.kv_heads)
        visibility = view.visibility if view.wanted_BM is None else view.visibility.of(view.wanted_BM)
        q = view.wanted(q, 2)
        if view.cache is None:
            out = attend(q, k, v, visibility)
        else:
            out = view.cache.attend(self.layer, q, k, v, visibility, view.slots_BT)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Held(torch.autograd.Function):
    """A node that holds tensors as any operator does, so that gradient checkpointing can let go of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return torch.empty_like(anchor)


@contextlib.contextmanager
def recomputed(tensor: Tensor, make: Callable[..., Tensor], *sources: Tensor) -> Iterator[None]:
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


@pointwise
def _gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pointwise
def _gate_backward(grad: Tensor, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    silu = gate * share
    return torch.cat([grad * up * (share + silu * (1 - share)), grad * silu], dim=-1)


class _Gate(torch.autograd.Function):
    """``silu(gate) * up`` of ``[gate, up]``, which keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _gate(both)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gate_backward(grad, *ctx.saved_tensors)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), without biases; one matrix for both."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        both = self.gate_up_proj(x)
        if not both.requires_grad:
            return self.down_proj(_gate(both))
        product = _Gate.apply(both)
        with recomputed(product, _gate, both):  # as wide as the rest of the layer, and cheap to make again
            return self.down_proj(product)
