"""Grouped-query attention that leaves masks and keys to the view.

Legend: B batch, T nodes, H width, h query heads, g key heads, d head width, W = (h + 2g) d.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.nn.cache import attend
from specdec.nn.pointwise import pointwise
from specdec.nn.rope import turn
from specdec.nn.view import View


@pointwise
def _part(qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_BTnd.transpose(1, 2).split([h, g, g], dim=1)
    return turn(q, cos, sin), turn(k, cos, sin), v.contiguous()


@pointwise
def _join(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = torch.cat([turn(q_BhTd, cos, -sin), turn(k_BgTd, cos, -sin), v_BgTd], dim=1)
    return heads.transpose(1, 2).contiguous()


class _Part(torch.autograd.Function):
    """Queries, keys and values out of one projection, the first two rotated; nothing of it is kept."""

    @staticmethod
    def forward(ctx: Any, qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _part(qkv_BTnd, cos, sin, h, g)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor) -> tuple[Tensor | None, ...]:
        return _join(q_BhTd, k_BgTd, v_BgTd, *ctx.saved_tensors), None, None, None, None


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
        part = _Part.apply if qkv_BTnd.requires_grad else _part
        q, k, v = part(qkv_BTnd, *rope, self.heads, self.kv_heads)
        q, sight = view.wanted(q, 2), view.wanted_sight
        if view.cache is None:
            out = attend(q, k, v, sight)
        else:
            out = view.cache.attend(self.layer, q, k, v, sight, view.slots_BT)
        return self.o_proj(out.transpose(1, 2).flatten(2))
