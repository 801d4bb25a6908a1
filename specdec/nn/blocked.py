"""The unroll's attention in tiles: see :mod:`specdec.nn.unroll`.

The causal block is cut into tiles of nodes, each with the keys that any of its nodes sees, part by part. The weights
of a part are exp(score - log-sum-exp), as in FlashAttention (https://arxiv.org/abs/2205.14135): parts, and the own
columns beside them, are merged through the log-sum-exp over what came before.

Legend: B batch, h query heads, g key heads, r = h/g, T nodes, S step-0 keys, d head width, n keys of a tile's part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.nn.backend import pointwise, wide
from specdec.nn.view import Spans, Visibility

NOTHING = -1e30  # the log-sum-exp of no keys: finite, so that nothing less nothing is zero


class Keys(NamedTuple):
    """Keys and values of one unroll step, each (B, g, T, d); those of step 0 (B, g, S, d)."""

    k_BgTd: Tensor
    v_BgTd: Tensor


KEPT = 2**26  # bytes of a tiling's biases, up to which they are kept from their first use on
ROWS, KEYS = 256, 2048  # nodes of a tile, keys of a part


def kept_bytes(B: int, T: int) -> int:
    """Bytes of biases that a tiling comes to keep, of rows that are one document each."""
    pairs = 0
    for a in range(0, T, ROWS):
        end = min(a + ROWS, T)
        first = 0 if end <= KEYS else a // KEYS * KEYS  # what comes before is seen whole
        pairs += (end - a) * (end - first)
    size = B * pairs * torch.bfloat16.itemsize
    return size if size <= KEPT else 0


class Tiling:
    """The causal block of one visibility in tiles of nodes, each with the keys that any of them sees in parts.

    A part that every node sees whole needs no bias. The others' are kept where they are few, as those of short rows
    are, and else made anew at each use: to keep them takes as many numbers as there are pairs.

    Args:
        rows: nodes of a tile.
        keys: keys of a part.
    """

    def __init__(self, visibility: Visibility, rows: int = ROWS, keys: int = KEYS) -> None:
        self.visibility = visibility
        spans = visibility.spans()
        B, T = spans.first_BT.shape
        sees_BT = spans.first_BT <= spans.last_BT
        first_BT, end_BT = spans.first_BT.where(sees_BT, spans.columns), spans.last_BT.where(sees_BT, -1) + 1
        # of every tile, where the keys begin and end that all its nodes see, and where those that any sees
        edges = [
            torch.stack([first_BR.amax(), end_BR.amin(), first_BR.amin(), end_BR.amax()])
            for first_BR, end_BR in zip(first_BT.split(rows, 1), end_BT.split(rows, 1), strict=True)
        ]
        self._nothing = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16, device=spans.first_BT.device)
        self._biases: dict[tuple[int, int], Tensor] = {}
        self.tiles: list[tuple[slice, list[slice]]] = []  # nodes, and their keys in parts
        pairs = 0
        for a, (lowest, highest, first, end) in zip(range(0, T, rows), torch.stack(edges).tolist(), strict=True):
            # one part, or one to every multiple of the most keys
            inner = range((first // keys + 1) * keys, end, keys) if end - first > keys else ()
            starts = [first, *inner] if first < end else []
            tile, parts = slice(a, min(a + rows, T)), list(map(slice, starts, [*starts[1:], end]))
            self.tiles.append((tile, parts))
            for part in parts:
                if isinstance(visibility, Spans) and lowest <= part.start and part.stop <= highest:
                    self._biases[a, part.start] = self._nothing
                else:
                    pairs += (tile.stop - a) * (part.stop - part.start)
        self._keeps = B * pairs * self._nothing.itemsize <= KEPT

    def bias(self, rows: slice, keys: slice) -> Tensor:
        """Of a part, (B, 1, 1, rows, keys), or one for all: 0 where a node sees the key, else -inf."""
        place = rows.start, keys.start
        if place in self._biases:
            return self._biases[place]
        seen_B11RK = self.visibility.part(rows, keys)[:, :, None]
        bias = torch.zeros_like(seen_B11RK, dtype=torch.bfloat16)  # exact, and half as wide
        bias.masked_fill_(~seen_B11RK, float("-inf"))
        if self._keeps:
            self._biases[place] = bias
        return bias


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
    kind = wide(scores.dtype)
    weights = torch.exp(torch.add(bias, scores.to(kind), alpha=scale) - lse.unsqueeze(-1))
    by_scores = weights * (by_weights.to(kind) - inner.unsqueeze(-1)) * scale
    return weights.to(scores.dtype), by_scores.to(scores.dtype)


@pointwise
def _own_scores(q_BgrTd: Tensor, k_BgTd: Tensor) -> Tensor:
    """Scores of the nodes' own keys of one step."""
    kind = wide(q_BgrTd.dtype)
    return (q_BgrTd.to(kind) * k_BgTd.unsqueeze(2).to(kind)).sum(-1) * q_BgrTd.shape[-1] ** -0.5


@pointwise
def _add_own(out_BgrTd: Tensor, scores_BgrT: Tensor, lse_BgrT: Tensor, v_BgTd: Tensor) -> Tensor:
    weights = torch.exp(scores_BgrT - lse_BgrT).unsqueeze(-1)
    return out_BgrTd.to(weights.dtype) + weights * v_BgTd.unsqueeze(2)


@pointwise
def _own_back(
    grad_BgrTd: Tensor, q_BgrTd: Tensor, lse_BgrT: Tensor, inner_BgrT: Tensor, k_BgTd: Tensor, v_BgTd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kind = lse_BgrT.dtype
    scale = q_BgrTd.shape[-1] ** -0.5
    q, grad, k, v = q_BgrTd.to(kind), grad_BgrTd.to(kind), k_BgTd.unsqueeze(2).to(kind), v_BgTd.unsqueeze(2).to(kind)
    weights = torch.exp((q * k).sum(-1) * scale - lse_BgrT)
    by_scores = (weights * ((grad * v).sum(-1) - inner_BgrT) * scale).unsqueeze(-1)
    by_k, by_v = (by_scores * q).sum(2), (weights.unsqueeze(-1) * grad).sum(2)
    return by_scores * k, by_k.to(k_BgTd.dtype), by_v.to(v_BgTd.dtype)


@pointwise
def _inner(grad: Tensor, out: Tensor) -> Tensor:
    kind = wide(out.dtype)
    return (grad.to(kind) * out.to(kind)).sum(-1)


class _Blocked(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one log-sum-exp a node; the weights are made again."""

    @staticmethod
    def forward(ctx: Any, q_BhTd: Tensor, tiling: Tiling, *flat: Tensor) -> Tensor:
        B, h, T, d = q_BhTd.shape
        k0, v0 = flat[:2]
        g = k0.shape[1]
        r, scale = h // g, d**-0.5
        q = q_BhTd.view(B, g, r, T, d)
        # lse: of every node, the log-sum-exp of all scores so far; it starts with those of the node's own later keys
        lse = q.new_full((B, g, r, T), NOTHING, dtype=wide(q.dtype))
        own = [_own_scores(q, k_BgTd) for k_BgTd in flat[2::2]]
        for scores_BgrT in own:
            lse = torch.logaddexp(lse, scores_BgrT)
        kind = lse.dtype if own else q.dtype  # the sum over tile and columns is rounded once
        out = q.new_zeros(B, T, h, d, dtype=kind).transpose(1, 2).unflatten(1, (g, r))  # so that heads flatten for free
        for rows, parts in tiling.tiles:
            tile: Tensor | None = None
            for keys in parts:
                _, scores = _scores(q, k0, rows, keys)
                n, before = scores.shape[-1], lse[..., rows].contiguous()
                # normalised together with all that came before; _merge rescales the earlier parts of the tile
                weights, after = _weights(scores.view(B, g, r, -1, n), tiling.bias(rows, keys), before, scale)
                part = torch.bmm(weights.view(B * g, -1, n), v0[:, :, keys].flatten(0, 1)).view(B, g, r, -1, d)
                tile, lse[..., rows] = part if tile is None else _merge(tile, before, after, part), after
            if tile is not None:
                out[..., rows, :] = tile
        # the first part of a tile was weighed with the own columns in its sum: their values are all that is missing
        for scores_BgrT, v_BgTd in zip(own, flat[3::2], strict=True):
            out = _add_own(out, scores_BgrT, lse, v_BgTd)
        out = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q_BhTd, out, lse, *flat)
        ctx.tiling = tiling
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
        inner = _inner(grad, out.view_as(q))  # sum of weight times its gradient, of every node: grad . out
        by_q, by_k0, by_v0 = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (q, k0, v0))
        for rows, keys in ((rows, keys) for rows, parts in ctx.tiling.tiles for keys in parts):
            q_t, scores = _scores(q, k0, rows, keys)
            n = scores.shape[-1]
            grad_t = grad[..., rows, :].reshape(B * g, -1, d)
            by_weights = torch.bmm(grad_t, v0[:, :, keys].flatten(0, 1).mT)
            shape = (B, g, h // g, -1, n)
            lse_t, inner_t = lse[..., rows].contiguous(), inner[..., rows].contiguous()
            bias = ctx.tiling.bias(rows, keys)
            found = _weights_back(scores.view(shape), bias, lse_t, by_weights.view(shape), inner_t, scale)
            weights, by_scores = (x.view(B * g, -1, n) for x in found)  # softmax: weight * (its gradient - inner)
            by_v0[:, :, keys] += torch.bmm(weights.mT, grad_t).view(B, g, n, d)
            by_k0[:, :, keys] += torch.bmm(by_scores.mT, q_t).view(B, g, n, d)
            by_q[..., rows, :] += torch.bmm(by_scores, k0[:, :, keys].flatten(0, 1)).view(B, g, h // g, -1, d)
        by_own: list[Tensor] = []
        for k_BgTd, v_BgTd in zip(flat[2::2], flat[3::2], strict=True):
            more_q, by_k, by_v = _own_back(grad, q, lse, inner, k_BgTd, v_BgTd)
            by_q = by_q + more_q
            by_own += [by_k, by_v]
        by_q = by_q.to(q.dtype).view_as(q_BhTd)
        return by_q, None, by_k0.to(k0.dtype), by_v0.to(v0.dtype), *by_own


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
        self._visibility: Visibility | None = None
        self._tiling: Tiling

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], visibility: Visibility) -> Tensor:
        """See :class:`specdec.nn.unroll.UnrollKernel`."""
        if visibility is not self._visibility:
            self._visibility, self._tiling = visibility, Tiling(visibility, self.rows, self.keys)
        return _Blocked.apply(q_BhTd, self._tiling, *(x for keys in steps for x in keys))
