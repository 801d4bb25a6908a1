"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), its keys and values expanded to heads.

Legend: B batch, T nodes, H width, h heads, d width of a head's keys, n of it not rotated, r of it rotated.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.nn.layers import Attention, RMSNorm
from specdec.nn.rope import apply_rope


class LatentAttention(Attention):
    """Queries from one latent, keys and values from another, the keys' rotated part shared by all heads.

    ``qkv_proj`` makes both latents and that part; its output is named as in :class:`Attention`, so that an entry may
    add to it. Values are kept as wide as keys, with zeros behind them, so that every kernel and cache takes them.

    Args:
        width: H, of input and output.
        heads: h.
        q_rank: width of the queries' latent; 0 for none.
        kv_rank: width of the latent of keys and values.
        plain: n.
        rotated: r.
        values: width of a head's values.
        layer: index under which the view's cache keeps this layer's keys.
        eps: of the norms on the latents.
        scale: on the product of queries and keys, in addition to that of their width.
    """

    def __init__(
        self, width: int, heads: int, q_rank: int, kv_rank: int, plain: int, rotated: int, values: int, layer: int,
        eps: float, scale: float,
    ) -> None:  # fmt: skip
        head_dim = plain + rotated
        sizes = [q_rank or heads * head_dim, kv_rank, rotated]
        super().__init__(width, sum(sizes), heads, values, layer, nn.Identity())
        self.head_dim = head_dim
        self.plain = plain
        self.sizes = sizes
        self.scale = scale
        self.q_a_layernorm = RMSNorm(q_rank, eps) if q_rank else nn.Identity()
        self.q_b_proj = (
            nn.Linear(q_rank, heads * self.head_dim, bias=False) if q_rank else nn.Identity()
        )
        self.kv_a_layernorm = RMSNorm(kv_rank, eps)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (plain + values), bias=False)

    def split(self, qkv_BTW: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, h, T, d)."""
        q, latent, shared_BTr = qkv_BTW.split(self.sizes, dim=-1)
        q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
        )
        k, v = kv.split([self.plain, self.value_dim], dim=-1)
        turned_B1Tr = apply_rope(apart(shared_BTr[:, None]), *rope)
        turned_q = apply_rope(apart(q[..., self.plain :]), *rope)
        q = torch.cat([q[..., : self.plain], turned_q], -1) * self.scale
        k = torch.cat([k, turned_B1Tr.expand(*k.shape[:-1], -1)], -1)
        return q, k, F.pad(v, (0, self.head_dim - self.value_dim))


def apart(x: Tensor) -> Tensor:
    """Reorders adjacent pairs into halves, as :func:`apply_rope` needs them; the products of queries and keys stay
    the same."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
