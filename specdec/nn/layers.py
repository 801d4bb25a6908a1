"""What a decoder layer is made of: attention that leaves masks and keys to the view, rotary positions, the gated
feed-forward, RMSNorm.

Each keeps of its forward pass only what its backward pass cannot make again cheaply: training memory depends on it.

Legend: B batch, T nodes, H width, h query heads, g key heads, d head width, W = (h + 2g) d.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.nn.backend import pointwise, wide
from specdec.nn.cache import attend
from specdec.nn.rope import apply_rope
from specdec.nn.view import View


class _Lean(torch.autograd.Function):
    """A function whose gradient is written out, and for which only the inputs from ``first`` on are kept.

    Args:
        function: of inputs and options.
        gradient: of the outputs' gradients, the kept inputs and the options: a gradient, or None, for each input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable,
        gradient: Callable,
        first: int,
        options: tuple,
        *inputs: Tensor,
    ) -> Any:
        ctx.gradient = gradient
        ctx.options = options
        ctx.save_for_backward(*inputs[first:])
        return function(*inputs, *options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # else a graph for every mix of gradients wanted
        inputs = [x.detach() for x in ctx.saved_tensors]
        return None, None, None, None, *ctx.gradient(*grads, *inputs, *ctx.options)


@pointwise
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_wide = x.to(wide(x.dtype))
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


@pointwise
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = wide(x.dtype)
    x_wide = x.to(kind)
    grad = grad.to(kind)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    normed = x_wide * scale
    by_normed = grad * weight.to(kind)
    grad_x = scale * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32 at least.

    (https://arxiv.org/abs/1910.07467), in the Llama form: the product with the weight is in the input's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` (..., width); the dtype is kept."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _Lean.apply(_norm, _norm_backward, 0, (self.eps,), x, self.weight)
        return _norm(x, self.weight, self.eps)


@pointwise
def _split_heads(
    qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_BTnd.transpose(1, 2).split([h, g, g], dim=1)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.contiguous()


@pointwise
def _join_heads(
    q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int
) -> tuple[Tensor, None, None]:
    q_BhTd = apply_rope(q_BhTd, cos, -sin)
    k_BgTd = apply_rope(k_BgTd, cos, -sin)
    heads = torch.cat([q_BhTd, k_BgTd, v_BgTd], dim=1)
    return heads.transpose(1, 2).contiguous(), None, None


class NormHeads(nn.Module):
    """Norms on the queries and keys of every head before they are rotated, as in Qwen3."""

    def __init__(self, q_norm: nn.Module, k_norm: nn.Module, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sizes = [heads, kv_heads, kv_heads]

    def forward(self, qkv_BTnd: Tensor) -> Tensor:
        """(B, T, h + 2g, d) to the same."""
        q, k, v = qkv_BTnd.split(self.sizes, dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)


class Attention(nn.Module):
    """Base of the attentions: one matrix into queries, keys and values, which :meth:`split` takes apart, the
    view's keys, and one matrix back.

    Args:
        width: H, of input and output.
        projected: W, of what the first matrix makes.
        heads: h.
        value_dim: width of a head's values, as the last matrix reads them.
        layer: index under which the view's cache keeps this layer's keys.
        norm: on the heads, before queries and keys are rotated.
        qkv_bias: whether the first matrix has a bias.
        o_bias: whether the last one has.
    """

    def __init__(
        self,
        width: int,
        projected: int,
        heads: int,
        value_dim: int,
        layer: int,
        norm: nn.Module,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.value_dim = value_dim
        self.layer = layer
        self.norm = norm
        self.qkv_proj = nn.Linear(width, projected, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=o_bias)

    def forward(
        self,
        x_BTH: Tensor,
        view: View,
        rope: tuple[Tensor, Tensor],
        qkv_bias_BTW: Tensor | None = None,
        context_BCH: Tensor | None = None,
    ) -> Tensor:
        """(B, T, H) to the same, or (B, M, H) where the view asks for M nodes only; all give their keys.

        Args:
            rope: the tables for ``view.positions_BT``.
            qkv_bias_BTW: what else goes into queries, keys and values.
            context_BCH: further nodes, which have keys and values alone; they precede the T in rope, slots and cache.
        """
        qkv_BTW = self.qkv_proj(x_BTH)
        if qkv_bias_BTW is not None:
            qkv_BTW = qkv_BTW + qkv_bias_BTW
        if context_BCH is not None:
            qkv_BTW = torch.cat([self.qkv_proj(context_BCH), qkv_BTW], dim=1)
        q, k, v = self.split(qkv_BTW, rope)
        if context_BCH is not None:
            q = q[:, :, context_BCH.shape[1] :]
        visibility = view.visibility
        if view.wanted_BM is not None:
            visibility = visibility.of(view.wanted_BM)
            q = q.take_along_dim(view.wanted_BM[:, None, :, None], dim=2)
        if view.cache is None:
            out = attend(q, k, v, visibility)
        else:
            out = view.cache.attend(self.layer, q, k, v, visibility, view.slots_BT)
        return self.o_proj(out[..., : self.value_dim].transpose(1, 2).flatten(2))

    def split(self, qkv_BTW: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h, T, d), keys and values (B, g, T, d), rotated; values may end in zeros up to d."""
        raise TypeError(f"{type(self).__name__} must say what its projections are")


class GroupedAttention(Attention):
    """Multi-head attention with grouped keys (https://arxiv.org/abs/2305.13245) and an explicit head width.

    Queries, keys and values come from one matrix, in this order.

    Args:
        width: H, of input and output.
        layer: index under which the view's cache keeps this layer's keys.
        norm: on the heads, (B, T, h + 2g, d) to the same, before queries and keys are rotated.
        qkv_bias: whether the first projection has a bias.
        o_bias: whether the last one has.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layer: int,
        norm: nn.Module,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__(
            width, (heads + 2 * kv_heads) * head_dim, heads, head_dim, layer, norm, qkv_bias, o_bias
        )
        self.kv_heads = kv_heads
        self.head_dim = head_dim

    def split(self, qkv_BTW: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h, T, d), keys and values (B, g, T, d), rotated."""
        qkv_BTnd = self.norm(qkv_BTW.unflatten(-1, (-1, self.head_dim)))
        if not qkv_BTnd.requires_grad:
            return _split_heads(qkv_BTnd, *rope, self.heads, self.kv_heads)
        # of the projection itself nothing is kept
        return _Lean.apply(
            _split_heads, _join_heads, 1, (self.heads, self.kv_heads), qkv_BTnd, *rope
        )


@pointwise
def _gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pointwise
def _gate_backward(grad: Tensor, both: Tensor) -> tuple[Tensor]:
    gate, up = both.chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    silu = gate * share
    by_gate = grad * up * (share + silu * (1 - share))
    by_up = grad * silu
    return (torch.cat([by_gate, by_up], dim=-1),)


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
        product = _Lean.apply(_gate, _gate_backward, 0, (), both)
        # the product is as wide as the rest of the layer, and cheap to make again: its shape is kept instead, and an
        # empty tensor whose node holds its factors as any operator does, so that gradient checkpointing can let go of
        # them (before torch 2.12 a node loses them with its last tensor); the hooks live as long as the graph, so they
        # must not know the product itself
        held = _Lean.apply(lambda both: both.new_empty(0), None, 0, (), both)
        place = product.data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: kept.shape if kept.data_ptr() == place else kept,
            lambda kept: (
                kept if isinstance(kept, Tensor) else _gate(*held.grad_fn.saved_tensors).view(kept)
            ),
        ):
            return self.down_proj(product)
