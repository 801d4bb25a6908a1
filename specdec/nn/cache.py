"""Where keys and values live, and how queries meet them.

Legend: B batch, h query heads, g key heads, T new nodes, S key slots, d head width.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class KVCache(Protocol):
    """Stores the keys of new nodes and lets their queries attend to all the keys they may see."""

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, mask_B1TS: Tensor, slots_T: Tensor | None
    ) -> Tensor:
        """Attention output of the new nodes, shape (B, h, T, d)."""
        ...


def attend(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, mask_B1TS: Tensor) -> Tensor:
    """Scaled dot-product attention under a boolean mask; grouped query heads."""
    return F.scaled_dot_product_attention(q_BhTd, k_BgSd, v_BgSd, attn_mask=mask_B1TS, enable_gqa=True)


class StaticCache:
    """Fixed slots, written in place: the cache of decoding.

    Args:
        layers: number of attention layers.
        capacity: S, slots per layer.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, 1, heads, capacity, head_dim)
        self.capacity = capacity
        self.keys_LBgSd = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBgSd = torch.zeros(shape, dtype=dtype, device=device)

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, mask_B1TS: Tensor, slots_T: Tensor | None
    ) -> Tensor:
        """Write the new keys into ``slots_T`` and attend to every slot that the mask allows."""
        assert slots_T is not None, "a static cache needs slots: make the view with View.append"
        keys_BgSd, values_BgSd = self.keys_LBgSd[layer], self.values_LBgSd[layer]
        keys_BgSd.index_copy_(2, slots_T, k_BgTd)
        values_BgSd.index_copy_(2, slots_T, v_BgTd)
        return attend(q_BhTd, keys_BgSd, values_BgSd, mask_B1TS)


class UnrollCache:
    """Differentiable keys of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840).

    Step 0 attends under the mask; at every later step, node t attends to the step-0 keys that the mask gives it
    and to its own keys of steps 1..k, and to nobody else's. The (k+1)T wide mask is never built.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, mask_B1TS: Tensor, slots_T: Tensor | None
    ) -> Tensor:
        """Append this step's keys and attend to the causal block and the node's own diagonal columns."""
        blocks = self._blocks.setdefault(layer, [])
        blocks.append((k_BgTd, v_BgTd))
        if len(blocks) == 1:
            return attend(q_BhTd, k_BgTd, v_BgTd, mask_B1TS)
        B, h, T, d = q_BhTd.shape
        g = k_BgTd.shape[1]
        q_BgrTd = q_BhTd.reshape(B, g, h // g, T, d) * d**-0.5
        first_k, first_v = (x[:, :, None] for x in blocks[0])
        own_k_BgKTd = torch.stack([k for k, _ in blocks[1:]], dim=2)
        own_v_BgKTd = torch.stack([v for _, v in blocks[1:]], dim=2)
        causal_BgrTT = (q_BgrTd @ first_k.mT).masked_fill(~mask_B1TS[:, :, None], float("-inf"))
        own_BgrTK = torch.einsum("bgrtd,bgktd->bgrtk", q_BgrTd, own_k_BgKTd)
        scores = torch.cat([causal_BgrTT, own_BgrTK], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q_BhTd.dtype)
        out = weights[..., :T] @ first_v + torch.einsum("bgrtk,bgktd->bgrtd", weights[..., T:], own_v_BgKTd)
        return out.reshape(B, h, T, d)
