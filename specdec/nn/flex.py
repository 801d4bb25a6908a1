"""The unroll's attention on a GPU: flex attention for the causal block, the own columns merged by log-sum-exp.

Legend: B batch, h query heads, g key heads, T nodes, S step-0 keys, d head width, k own columns.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.nn.sight import Sight
from specdec.nn.unroll import Keys, wide

Block = Callable[[Tensor, Tensor, Tensor, Sight], tuple[Tensor, Tensor]]


@cache
def _flex() -> tuple[Callable, Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def rule(sight: Sight) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What flex attention asks of sequence, head, node and key, whose block mask it makes without one of all pairs."""
    return lambda b, h, t, s: sight.sees(b, t, s)


class FlexBlock:
    """Output and log-sum-exp of the causal block; the block mask is made once for every sight that comes."""

    def __init__(self) -> None:
        self._sight: Sight | None = None
        self._block_mask: Any = None

    def __call__(self, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """(B, h, T, d) and (B, h, T)."""
        from torch.nn.attention.flex_attention import AuxRequest

        attend, create = _flex()
        if sight is not self._sight:
            B, T, S = len(q_BhTd), q_BhTd.shape[2], k_BgTd.shape[2]
            self._sight, self._block_mask = sight, create(rule(sight), B, None, T, S, device=str(q_BhTd.device))
        out, aux = attend(
            q_BhTd, k_BgTd, v_BgTd, block_mask=self._block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse


class Merged:
    """Any attention with a differentiable log-sum-exp for the causal block, and the columns beside it.

    Args:
        block: output (B, h, T, d) and log-sum-exp (B, h, T) of queries, keys, values and who sees which of them.
    """

    def __init__(self, block: Block) -> None:
        self.block = block

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], sight: Sight) -> Tensor:
        """See :class:`specdec.nn.unroll.UnrollKernel`."""
        B, h, T, d = q_BhTd.shape
        first, own = steps[0], steps[1:]
        out, lse = self.block(q_BhTd, first.k_BgTd, first.v_BgTd, sight)
        if not own:
            return out
        g = first.k_BgTd.shape[1]
        kind = wide(q_BhTd.dtype)
        q = q_BhTd.view(B, g, h // g, T, d).to(kind)
        scores = torch.stack([(q * keys.k_BgTd.unsqueeze(2)).sum(-1) for keys in own], dim=-1) * d**-0.5
        lse = lse.to(kind).view(B, g, h // g, T)
        total = torch.logaddexp(lse, scores.logsumexp(-1))
        merged = (lse - total).exp().unsqueeze(-1) * out.view_as(q)
        for weight, keys in zip((scores - total.unsqueeze(-1)).exp().unbind(-1), own, strict=True):
            merged = merged + weight.unsqueeze(-1) * keys.v_BgTd.unsqueeze(2)
        return merged.to(q_BhTd.dtype).view(B, h, T, d)


class Flex(Merged):
    """:class:`Merged` over flex attention. torch 2.13 has no backward pass for it on a CPU."""

    def __init__(self) -> None:
        super().__init__(FlexBlock())
