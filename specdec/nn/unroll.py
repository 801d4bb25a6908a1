"""Attention of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840) without its (k+1)T wide mask.

At step k a node attends to the step-0 keys in its sight and to its own keys of steps 1..k: a causal block
and k diagonal columns. After step 0 there may be fewer nodes than step-0 keys. Three ways to the same numbers:

* :class:`Dense`: the oracle; explicit weights over T + k columns, differentiated by autograd.
* :class:`Blocked`: the causal block in tiles, merged with each other and with the columns through the log-sum-exp;
  keeps the output and one log-sum-exp a row, and makes the weights anew in the backward pass.
* :class:`Flex`: flex attention for the causal block (CUDA), merged likewise.

Legend: B batch, h query heads, g key heads, r = h/g, T nodes, S step-0 keys, d head width, k own columns, n keys of a
tile's part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.nn.pointwise import compiling, pointwise
from specdec.nn.sight import Sight
from specdec.nn.tiles import KEYS, ROWS, Plan

NOTHING = -1e30  # the log-sum-exp of no keys: finite, so that nothing less nothing is zero


class Keys(NamedTuple):
    """Keys and values of one unroll step, each (B, g, T, d); those of step 0 (B, g, S, d)."""

    k_BgTd: Tensor
    v_BgTd: Tensor


class UnrollKernel(Protocol):
    """Attention of one step's queries to the step-0 keys in sight and to the nodes' own later keys."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], sight: Sight) -> Tensor:
        """Output (B, h, T, d); ``steps`` are those of steps 0..k, the present one last."""
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and exponentials are taken in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Dense:
    """Explicit weights over the causal block and the own columns."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], sight: Sight) -> Tensor:
        """See :class:`UnrollKernel`."""
        B, h, T, d = q_BhTd.shape
        first, own = steps[0], steps[1:]
        g, S = first.k_BgTd.shape[1:3]
        q_BgrTd = q_BhTd.reshape(B, g, h // g, T, d) * d**-0.5
        scores = (q_BgrTd @ first.k_BgTd[:, :, None].mT).masked_fill(~sight.mask_B1TS[:, :, None], float("-inf"))
        if own:
            keys_BgTkd = torch.stack([keys.k_BgTd for keys in own], dim=3)
            scores = torch.cat([scores, torch.einsum("bgrtd,bgtkd->bgrtk", q_BgrTd, keys_BgTkd)], dim=-1)
        weights = scores.softmax(-1, dtype=wide(scores.dtype)).to(q_BhTd.dtype)
        out = weights[..., :S] @ first.v_BgTd[:, :, None]
        if own:
            values_BgTkd = torch.stack([keys.v_BgTd for keys in own], dim=3)
            out = out + torch.einsum("bgrtk,bgtkd->bgrtd", weights[..., S:], values_BgTkd)
        return out.reshape(B, h, T, d)


@pointwise
def _weights(scores: Tensor, bias: Tensor, before: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weights of a part's keys, and the log-sum-exp over these and what came before: other parts, own columns."""
    kind = before.dtype
    s = torch.add(bias, scores.to(kind), alpha=scale)
    top = torch.maximum(s.amax(-1, keepdim=True), before.unsqueeze(-1))
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True) + torch.exp(before.unsqueeze(-1) - top)
    return (e / total).to(scores.dtype), (top + total.log()).squeeze(-1)


@pointwise
def _merge(tile: Tensor, before: Tensor, after: Tensor, part: Tensor) -> Tensor:
    """A tile's output so far, and a further part of its keys under the log-sum-exp of both."""
    return tile.to(after.dtype) * torch.exp(before - after).unsqueeze(-1) + part


@pointwise
def _weights_back(
    scores: Tensor, bias: Tensor, lse: Tensor, by_weights: Tensor, inner: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights again, and the gradient by the products of queries and keys."""
    kind = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.exp(torch.add(bias, scores.to(kind), alpha=scale) - lse.unsqueeze(-1))
    by_scores = weights * (by_weights.to(kind) - inner.unsqueeze(-1)) * scale
    return weights.to(scores.dtype), by_scores.to(scores.dtype)


@pointwise
def _own_scores(q_BgrTd: Tensor, k_kBgTd: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the own columns, and their log-sum-exp."""
    kind = torch.promote_types(q_BgrTd.dtype, torch.float32)
    scores = (q_BgrTd.to(kind) * k_kBgTd.unsqueeze(3).to(kind)).sum(-1) * q_BgrTd.shape[-1] ** -0.5
    return scores, scores.logsumexp(0)


@pointwise
def _add_own(out_BgrTd: Tensor, scores_kBgrT: Tensor, lse_BgrT: Tensor, v_kBgTd: Tensor) -> Tensor:
    weights = torch.exp(scores_kBgrT - lse_BgrT).unsqueeze(-1)
    return out_BgrTd.to(weights.dtype) + (weights * v_kBgTd.unsqueeze(3)).sum(0)


@pointwise
def _own_back(
    grad_BgrTd: Tensor,
    q_BgrTd: Tensor,
    lse_BgrT: Tensor,
    inner_BgrT: Tensor,
    k_kBgTd: Tensor,
    v_kBgTd: Tensor,
    by_q: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = lse_BgrT.dtype
    scale = q_BgrTd.shape[-1] ** -0.5
    q, grad, k, v = q_BgrTd.to(kind), grad_BgrTd.to(kind), k_kBgTd.unsqueeze(3).to(kind), v_kBgTd.unsqueeze(3).to(kind)
    weights = torch.exp((q * k).sum(-1) * scale - lse_BgrT)
    by_scores = (weights * ((grad * v).sum(-1) - inner_BgrT) * scale).unsqueeze(-1)
    by_k = (by_scores * q).sum(3)
    by_v = (weights.unsqueeze(-1) * grad).sum(3)
    return by_q + (by_scores * k).sum(0), by_k.to(k_kBgTd.dtype), by_v.to(v_kBgTd.dtype)


@pointwise
def _inner(grad: Tensor, out: Tensor) -> Tensor:
    kind = torch.promote_types(out.dtype, torch.float32)
    return (grad.to(kind) * out.to(kind)).sum(-1)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BhTd: Tensor, plan: Plan, *flat: Tensor) -> Tensor:
        B, h, T, d = q_BhTd.shape
        k0, v0 = flat[:2]
        g = k0.shape[1]
        r, scale = h // g, d**-0.5
        q = q_BhTd.view(B, g, r, T, d)
        lse = q.new_full((B, g, r, T), NOTHING, dtype=wide(q.dtype))
        own = []
        for k_kBgTd, v_kBgTd in _own(flat):
            scores_kBgrT, own_lse = _own_scores(q, k_kBgTd)
            lse = torch.logaddexp(lse, own_lse)
            own.append((scores_kBgrT, v_kBgTd))
        kind = lse.dtype if own else q.dtype  # the sum over tile and columns is rounded once
        out = q.new_zeros(B, T, h, d, dtype=kind).transpose(1, 2).unflatten(1, (g, r))  # so that heads flatten for free
        for rows, parts in plan.tiles:
            tile: Tensor | None = None
            for keys in parts:
                _, scores = _scores(q, k0, rows, keys)
                n, before = scores.shape[-1], lse[..., rows].contiguous()
                weights, after = _weights(scores.view(B, g, r, -1, n), plan.bias(rows, keys), before, scale)
                part = torch.bmm(weights.view(B * g, -1, n), v0[:, :, keys].flatten(0, 1)).view(B, g, r, -1, d)
                tile, lse[..., rows] = part if tile is None else _merge(tile, before, after, part), after
            if tile is not None:
                out[..., rows, :] = tile
        for scores_kBgrT, v_kBgTd in own:
            out = _add_own(out, scores_kBgrT, lse, v_kBgTd)
        out = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q_BhTd, out, lse, *flat)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BhTd: Tensor) -> tuple[Tensor | None, ...]:
        q_BhTd, out, lse, *flat = ctx.saved_tensors
        B, h, T, d = q_BhTd.shape
        k0, v0 = flat[:2]
        g = k0.shape[1]
        scale = d**-0.5
        q, grad = q_BhTd.view(B, g, h // g, T, d), grad_BhTd.reshape(B, g, h // g, T, d)
        inner = _inner(grad, out.view_as(q))
        by_q, by_k0, by_v0 = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (q, k0, v0))
        for rows, keys in ctx.plan.parts():
            q_t, scores = _scores(q, k0, rows, keys)
            n = scores.shape[-1]
            grad_t = grad[..., rows, :].reshape(B * g, -1, d)
            by_weights = torch.bmm(grad_t, v0[:, :, keys].flatten(0, 1).mT)
            shape = (B, g, h // g, -1, n)
            lse_t, inner_t = lse[..., rows].contiguous(), inner[..., rows].contiguous()
            bias = ctx.plan.bias(rows, keys)
            found = _weights_back(scores.view(shape), bias, lse_t, by_weights.view(shape), inner_t, scale)
            weights, by_scores = (x.view(B * g, -1, n) for x in found)
            by_v0[:, :, keys] += torch.bmm(weights.mT, grad_t).view(B, g, n, d)
            by_k0[:, :, keys] += torch.bmm(by_scores.mT, q_t).view(B, g, n, d)
            by_q[..., rows, :] += torch.bmm(by_scores, k0[:, :, keys].flatten(0, 1)).view(B, g, h // g, -1, d)
        by_own: list[Tensor] = []
        for k_kBgTd, v_kBgTd in _own(flat):
            by_q, by_k, by_v = _own_back(grad, q, lse, inner, k_kBgTd, v_kBgTd, by_q)
            by_own += [x for pair in zip(by_k, by_v, strict=True) for x in pair]
        by_q = by_q.to(q.dtype).view_as(q_BhTd)
        return by_q, None, by_k0.to(k0.dtype), by_v0.to(v0.dtype), *by_own


def _own(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the own columns, (k, B, g, T, d): all at once where that is one pass, else one by one."""
    keys, values = flat[2::2], flat[3::2]
    if keys and compiling():
        return [(torch.stack(list(keys)), torch.stack(list(values)))]
    return [(k[None], v[None]) for k, v in zip(keys, values, strict=True)]


def _scores(q_BgrTd: Tensor, k_BgTd: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """A tile's queries, (B g, r rows, d), and their products with its keys, (B g, r rows, keys)."""
    q = q_BgrTd[..., rows, :].flatten(0, 1).flatten(1, 2)
    return q, torch.bmm(q, k_BgTd[:, :, keys].flatten(0, 1).mT)


class Blocked:
    """The causal block in tiles of nodes, each with the keys that any of its nodes sees, part by part.

    Args:
        rows: nodes of a tile.
        keys: keys of a part.
    """

    def __init__(self, rows: int = ROWS, keys: int = KEYS) -> None:
        self.rows, self.keys = rows, keys
        self._sight: Sight | None = None
        self._plan: Plan

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], sight: Sight) -> Tensor:
        """See :class:`UnrollKernel`."""
        if sight is not self._sight:
            self._sight, self._plan = sight, Plan(sight, self.rows, self.keys)
        return _Blocked.apply(q_BhTd, self._plan, *(x for keys in steps for x in keys))
