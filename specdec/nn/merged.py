"""Attention that gives its log-sum-exp, merged with a node's own keys of the later steps, such as flex attention."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.nn.backend import own_graphs, wide
from specdec.nn.own_columns import add_own_value, own_gradients, own_scores
from specdec.nn.unroll import Keys
from specdec.nn.view import Spans


class Merged:
    """Attention with a differentiable log-sum-exp for the causal block, and the columns next to it.

    Args:
        block: from queries, keys, values and who sees which to the output (B, h, T, d) and the log-sum-exp (B, h, T).
    """

    def __init__(
        self, block: Callable[[Tensor, Tensor, Tensor, Spans], tuple[Tensor, Tensor]]
    ) -> None:
        self.block = block

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        first, *later = steps
        out_BhTd, lse_BhT = self.block(q_BhTd, first.k_BgTd, first.v_BgTd, spans)
        if not later:
            return out_BhTd
        own_keys_and_values = [tensor for step in later for tensor in step]
        return _Merged.apply(q_BhTd, out_BhTd, lse_BhT, *own_keys_and_values)


class _Merged(torch.autograd.Function):
    """Output and log-sum-exp of the causal block, and own columns; no score is kept, and nothing wider than ``q``."""

    @staticmethod
    def forward(
        ctx: Any, q_BhTd: Tensor, out_BhTd: Tensor, lse_BhT: Tensor, *own: Tensor
    ) -> Tensor:
        B, h, T, d = q_BhTd.shape
        g = own[0].shape[1]
        q_BgrTd = q_BhTd.view(B, g, h // g, T, d)
        block_lse_BgrT = lse_BhT.to(wide(q_BgrTd.dtype)).view(q_BgrTd.shape[:-1])
        lse_BgrT = block_lse_BgrT
        all_own_scores = [own_scores(q_BgrTd, k_BgTd) for k_BgTd in own[0::2]]
        for scores_BgrT in all_own_scores:
            lse_BgrT = torch.logaddexp(lse_BgrT, scores_BgrT)
        block_share = torch.exp(block_lse_BgrT - lse_BgrT).unsqueeze(-1)
        merged = out_BhTd.view_as(q_BgrTd) * block_share
        for scores_BgrT, v_BgTd in zip(all_own_scores, own[1::2], strict=True):
            merged = add_own_value(merged, scores_BgrT, lse_BgrT, v_BgTd)
        merged_BhTd = merged.to(q_BgrTd.dtype).view_as(q_BhTd)
        ctx.save_for_backward(q_BhTd, out_BhTd, block_lse_BgrT, lse_BgrT, merged_BhTd, *own)
        return merged_BhTd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BhTd: Tensor) -> tuple[Tensor, ...]:
        q_BhTd, out_BhTd, block_lse_BgrT, lse_BgrT, merged_BhTd, *later = ctx.saved_tensors
        kind = lse_BgrT.dtype
        q = q_BhTd.view(*lse_BgrT.shape, -1)
        grad = grad_BhTd.reshape(q.shape)
        out = out_BhTd.view_as(q)
        inner_BgrT = (grad.to(kind) * merged_BhTd.view_as(q)).sum(-1)
        block_share = torch.exp(block_lse_BgrT - lse_BgrT)
        by_out = (grad * block_share.unsqueeze(-1)).to(out.dtype).view_as(out_BhTd)
        by_block = (grad.to(kind) * out).sum(-1) - inner_BgrT
        by_lse = (block_share * by_block).view(q_BhTd.shape[:-1])
        by_q = torch.zeros_like(q, dtype=kind)
        by_own: list[Tensor] = []
        for k_BgTd, v_BgTd in zip(later[0::2], later[1::2], strict=True):
            by_q_own, by_k, by_v = own_gradients(grad, q, lse_BgrT, inner_BgrT, k_BgTd, v_BgTd)
            by_q += by_q_own
            by_own += [by_k, by_v]
        return by_q.to(q.dtype).view_as(q_BhTd), by_out, by_lse, *by_own


def contiguous(spans: Spans) -> Spans:
    """Return these spans with tensors that are contiguous in memory."""
    sinks = None if spans.sinks is None else contiguous(spans.sinks)
    return spans._replace(
        first_BT=spans.first_BT.contiguous(), last_BT=spans.last_BT.contiguous(), sinks=sinks
    )


def _rule(spans: Spans) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the rule that flex attention asks of sequence, head, node and key, to make its block mask."""
    if (sinks := spans.sinks) is None:
        first_BT = spans.first_BT
        last_BT = spans.last_BT
        return lambda b, h, t, s: (s >= first_BT[b, t]) & (s <= last_BT[b, t])
    run = _rule(spans._replace(sinks=None))
    sunk = _rule(sinks)
    return lambda b, h, t, s: run(b, h, t, s) | sunk(b, h, t, s)


class Flex(Merged):
    """:class:`Merged` over flex attention (CUDA); the block mask is made once for every visibility that comes."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        super().__init__(self._causal_block)
        # for sequences of any number and length: a graph of each would soon be one too many, and what torch then runs
        # instead keeps all scores; a function compiled as a whole (own_graphs) fails then
        self._attend = own_graphs(flex_attention, dynamic=True)
        self._create = own_graphs(create_block_mask, dynamic=True)
        self._lse: Any = AuxRequest(lse=True)
        self._spans: Spans | None = None
        self._block_mask: Any = None

    def _causal_block(
        self, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if spans is not self._spans:
            B = len(q_BhTd)
            T = q_BhTd.shape[2]
            S = k_BgTd.shape[2]
            rule = _rule(contiguous(spans))  # another stride would be another graph
            self._block_mask = self._create(rule, B, None, T, S, device=str(q_BhTd.device))
            self._spans = spans
        mask = self._block_mask
        aux = self._lse
        out, more = self._attend(
            q_BhTd, k_BgTd, v_BgTd, block_mask=mask, enable_gqa=True, return_aux=aux
        )
        return out, more.lse
