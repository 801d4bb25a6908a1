"""Attention of the unroll in tiles: no mask, score or weight of all pairs ever stands in memory.

Two documents of 5 and 4 tokens in a row of 9, in tiles of ROWS = 3 nodes: a tile takes the keys between the first and
the last that any of its nodes sees.

    node   keys 0 1 2 3 4 5 6 7 8
     0          x . . | . . . . . .      tile of nodes 0 to 2: keys 0 to 2; some pairs are masked, so the tile has a
     1          x x . | . . . . . .      bias of 0 and -inf
     2          x x x | . . . . . .
     3        | x x x x . . | . . .      tile of nodes 3 to 5: keys 0 to 5; nodes 3 and 4 see the first document,
     4        | x x x x x . | . . .      node 5 the second
     5        | . . . . . x | . . .
     6          . . . . . | x x . .      tile of nodes 6 to 8: keys 5 to 8; keys 0 to 4 are never multiplied
     7          . . . . . | x x x .
     8          . . . . . | x x x x

The keys of a tile are taken KEYS at a time, as parts. The weights of a part are exp(score - log-sum-exp), as in
FlashAttention (https://arxiv.org/abs/2205.14135), and parts are merged through the log-sum-exp of what came before. A
part that every node of its tile sees whole needs no bias: in long rows most parts are such.

Legend: B batch, h query heads, g key heads, r = h/g, T nodes, S step-0 keys, d head width, n keys of a part, R nodes of
a tile.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.nn.backend import pointwise, wide
from specdec.nn.own_columns import add_own_value, own_gradients, own_scores
from specdec.nn.unroll import Keys
from specdec.nn.view import Spans

NO_KEYS_LSE = -1e30  # the log-sum-exp of no keys: finite, so that its difference to itself is zero
MAX_CACHED_BIAS_BYTES = 2**26  # of a tiling: up to this, biases are kept from their first use on
ROWS = 256  # nodes of a tile
KEYS = 2048  # keys of a part


class Blocked:
    """The causal block in tiles of ``rows`` nodes, each with the keys that any of them sees, ``keys`` at a time."""

    def __init__(self, rows: int = ROWS, keys: int = KEYS) -> None:
        self.rows = rows
        self.keys = keys
        self._spans: Spans | None = None
        self._tiling: Tiling

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        if spans is not self._spans:
            self._tiling = Tiling(spans, self.rows, self.keys)
            self._spans = spans
        keys_and_values = [tensor for step in steps for tensor in step]
        return _Blocked.apply(q_BhTd, self._tiling, *keys_and_values)


def kept_bytes(B: int, T: int) -> int:
    """Return the bytes of biases that a tiling comes to keep, for rows that are one document each."""
    pairs = 0
    for start in range(0, T, ROWS):
        end = min(start + ROWS, T)
        # In a longer tile, the parts before the diagonal are seen whole.
        first = 0 if end <= KEYS else start // KEYS * KEYS
        pairs += (end - start) * (end - first)
    size = B * pairs * torch.bfloat16.itemsize
    return size if size <= MAX_CACHED_BIAS_BYTES else 0


class _Edges(NamedTuple):
    """Which keys the nodes of a tile see."""

    first_seen_by_all: int
    end_seen_by_all: int
    first_seen: int
    end_seen: int


def _edges(spans: Spans, rows: int) -> list[_Edges]:
    """Return the edges of every tile; the device is waited for once."""
    sees_BT = spans.first_BT <= spans.last_BT
    first_BT = spans.first_BT.where(sees_BT, spans.columns)
    end_BT = spans.last_BT.where(sees_BT, -1) + 1
    edges = [
        torch.stack([first_BR.amax(), end_BR.amin(), first_BR.amin(), end_BR.amax()])
        for first_BR, end_BR in zip(first_BT.split(rows, 1), end_BT.split(rows, 1), strict=True)
    ]
    return [_Edges(*numbers) for numbers in torch.stack(edges).tolist()]


def _parts(first: int, end: int, keys: int) -> list[slice]:
    """Cut keys ``first`` to ``end - 1`` into one part, or at every multiple of ``keys`` if they are more than that."""
    if first >= end:
        return []
    cuts = range((first // keys + 1) * keys, end, keys) if end - first > keys else ()
    edges = [first, *cuts, end]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class Tile(NamedTuple):
    """Nodes that are computed together, and the keys that any of them sees, in parts."""

    nodes: slice
    parts: list[slice]


class Tiling:
    """The causal block of one visibility in tiles; see the head of this file.

    Biases take as many numbers as there are pairs: they are kept where they are few, as those of short rows are, and
    else made again at each use.
    """

    def __init__(self, spans: Spans, rows: int = ROWS, keys: int = KEYS) -> None:
        self.spans = spans
        B, T = spans.first_BT.shape
        no_bias = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16, device=spans.first_BT.device)
        self._biases: dict[tuple[int, int], Tensor] = {}
        self.tiles: list[Tile] = []
        all_edges = _edges(spans, rows)
        all_sinks = [None] * len(all_edges) if spans.sinks is None else _edges(spans.sinks, rows)
        biased_pairs = 0
        for number, (edges, sinks) in enumerate(zip(all_edges, all_sinks, strict=True)):
            nodes = slice(number * rows, min((number + 1) * rows, T))
            tile = Tile(nodes, _parts_of_tile(edges, sinks, keys))
            self.tiles.append(tile)
            for part in tile.parts:
                if edges.first_seen_by_all <= part.start and part.stop <= edges.end_seen_by_all:
                    self._biases[nodes.start, part.start] = no_bias
                else:
                    biased_pairs += (nodes.stop - nodes.start) * (part.stop - part.start)
        self._keeps = B * biased_pairs * no_bias.itemsize <= MAX_CACHED_BIAS_BYTES

    def bias(self, nodes: slice, keys: slice) -> Tensor:
        """Return a part's bias, 0 where a node sees the key, else -inf; (B, 1, 1, R, n), or one number for all."""
        place = nodes.start, keys.start
        if place in self._biases:
            return self._biases[place]
        seen_B11Rn = self.spans.part(nodes, keys, slice(None))[:, :, None]
        bias = torch.zeros_like(seen_B11Rn, dtype=torch.bfloat16)  # exact, and half as wide
        bias.masked_fill_(~seen_B11Rn, float("-inf"))
        if self._keeps:
            self._biases[place] = bias
        return bias


def _parts_of_tile(edges: _Edges, sinks: _Edges | None, keys: int) -> list[slice]:
    """Return the parts of a tile's keys: its attention sinks, where it has any, and its run."""
    first = edges.first_seen
    end = edges.end_seen
    sink_parts = [] if sinks is None else _parts(sinks.first_seen, sinks.end_seen, keys)
    if sinks is not None and sink_parts and sinks.end_seen > first:
        # The sinks of some nodes lie in the run of others: one run for both.
        return _parts(min(sinks.first_seen, first), max(sinks.end_seen, end), keys)
    return sink_parts + _parts(first, end, keys)


class _Blocked(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one log-sum-exp a node; weights are made again in the backward."""

    @staticmethod
    def forward(ctx: Any, q_BhTd: Tensor, tiling: Tiling, *keys_and_values: Tensor) -> Tensor:
        B, h, T, d = q_BhTd.shape
        k0_BgSd, v0_BgSd, *later = keys_and_values
        g = k0_BgSd.shape[1]
        r = h // g
        scale = d**-0.5
        q_BgrTd = q_BhTd.view(B, g, r, T, d)
        # The log-sum-exp of each node's scores so far; it starts with those of the node's own later keys.
        lse_BgrT = q_BgrTd.new_full((B, g, r, T), NO_KEYS_LSE, dtype=wide(q_BgrTd.dtype))
        all_own_scores = [own_scores(q_BgrTd, k_BgTd) for k_BgTd in later[0::2]]
        for scores_BgrT in all_own_scores:
            lse_BgrT = torch.logaddexp(lse_BgrT, scores_BgrT)
        # With own columns, the sum over tile and columns is rounded once.
        kind = lse_BgrT.dtype if later else q_BgrTd.dtype
        # Nodes before heads in memory, so that heads flatten for free.
        out_BThd = q_BgrTd.new_zeros(B, T, h, d, dtype=kind)
        out = out_BThd.transpose(1, 2).unflatten(1, (g, r))
        for nodes, parts in tiling.tiles:
            q_tile = q_BgrTd[..., nodes, :].flatten(0, 1).flatten(1, 2)  # (B g, r R, d)
            tile_out: Tensor | None = None
            for keys in parts:
                scores = torch.bmm(q_tile, k0_BgSd[:, :, keys].flatten(0, 1).mT)
                n = scores.shape[-1]
                # Weights are normalized together with all that came before; earlier parts are scaled down to that.
                lse_before = lse_BgrT[..., nodes].contiguous()
                weights, lse_after = _part_weights(
                    scores.view(B, g, r, -1, n), tiling.bias(nodes, keys), lse_before, scale
                )
                part_out = torch.bmm(
                    weights.view(B * g, -1, n), v0_BgSd[:, :, keys].flatten(0, 1)
                ).view(B, g, r, -1, d)
                if tile_out is None:
                    tile_out = part_out
                else:
                    tile_out = _merge(tile_out, lse_before, lse_after, part_out)
                lse_BgrT[..., nodes] = lse_after
            if tile_out is not None:
                out[..., nodes, :] = tile_out
        # The weights of every part had the own columns in their sum: only their values are missing.
        for scores_BgrT, v_BgTd in zip(all_own_scores, later[1::2], strict=True):
            out = add_own_value(out, scores_BgrT, lse_BgrT, v_BgTd)
        out_BhTd = out.flatten(1, 2).to(q_BgrTd.dtype)
        ctx.save_for_backward(q_BhTd, out_BhTd, lse_BgrT, *keys_and_values)
        ctx.tiling = tiling
        return out_BhTd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BhTd: Tensor) -> tuple[Tensor | None, ...]:
        q_BhTd, out_BhTd, lse_BgrT, k0_BgSd, v0_BgSd, *later = ctx.saved_tensors
        B, h, T, d = q_BhTd.shape
        g = k0_BgSd.shape[1]
        r = h // g
        scale = d**-0.5
        kind = lse_BgrT.dtype
        q = q_BhTd.view(B, g, r, T, d)
        grad = grad_BhTd.reshape(B, g, r, T, d)
        # grad . out of every node, which is the sum of each weight times its gradient.
        inner_BgrT = (grad.to(kind) * out_BhTd.view_as(q).to(kind)).sum(-1)
        by_q = torch.zeros_like(q, dtype=kind)
        by_k0 = torch.zeros_like(k0_BgSd, dtype=kind)
        by_v0 = torch.zeros_like(v0_BgSd, dtype=kind)
        for nodes, parts in ctx.tiling.tiles:
            q_tile = q[..., nodes, :].flatten(0, 1).flatten(1, 2)
            grad_tile = grad[..., nodes, :].reshape(B * g, -1, d)
            lse_tile = lse_BgrT[..., nodes].contiguous()
            inner_tile = inner_BgrT[..., nodes].contiguous()
            for keys in parts:
                k_part = k0_BgSd[:, :, keys].flatten(0, 1)
                v_part = v0_BgSd[:, :, keys].flatten(0, 1)
                n = k_part.shape[1]
                weights, by_scores = _weights_and_gradient(
                    torch.bmm(q_tile, k_part.mT).view(B, g, r, -1, n),
                    ctx.tiling.bias(nodes, keys),
                    lse_tile,
                    torch.bmm(grad_tile, v_part.mT).view(B, g, r, -1, n),
                    inner_tile,
                    scale,
                )
                weights = weights.view(B * g, -1, n)
                by_scores = by_scores.view(B * g, -1, n)
                by_v0[:, :, keys] += torch.bmm(weights.mT, grad_tile).view(B, g, -1, d)
                by_k0[:, :, keys] += torch.bmm(by_scores.mT, q_tile).view(B, g, -1, d)
                by_q[..., nodes, :] += torch.bmm(by_scores, k_part).view(B, g, r, -1, d)
        by_own: list[Tensor] = []
        for k_BgTd, v_BgTd in zip(later[0::2], later[1::2], strict=True):
            by_q_own, by_k, by_v = own_gradients(grad, q, lse_BgrT, inner_BgrT, k_BgTd, v_BgTd)
            by_q = by_q + by_q_own
            by_own += [by_k, by_v]
        by_q_BhTd = by_q.to(q.dtype).view_as(q_BhTd)
        return by_q_BhTd, None, by_k0.to(k0_BgSd.dtype), by_v0.to(v0_BgSd.dtype), *by_own


@pointwise
def _part_weights(
    scores: Tensor, bias: Tensor, lse_before: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of a part's keys, and the log-sum-exp over these and all that came before."""
    kind = lse_before.dtype
    biased = torch.add(bias, scores.to(kind), alpha=scale)
    greatest = torch.maximum(biased.amax(-1, keepdim=True), lse_before.unsqueeze(-1))
    exponentials = torch.exp(biased - greatest)
    total = exponentials.sum(-1, keepdim=True) + torch.exp(lse_before.unsqueeze(-1) - greatest)
    weights = (exponentials / total).to(scores.dtype)
    return weights, (greatest + total.log()).squeeze(-1)


@pointwise
def _merge(tile_out: Tensor, lse_before: Tensor, lse_after: Tensor, part_out: Tensor) -> Tensor:
    """Return a tile's output with a further part of its keys, under the log-sum-exp of both."""
    return tile_out.to(lse_after.dtype) * torch.exp(lse_before - lse_after).unsqueeze(-1) + part_out


@pointwise
def _weights_and_gradient(
    scores: Tensor, bias: Tensor, lse: Tensor, by_weights: Tensor, inner: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the weights again, and the gradient by the scores: weight * (its gradient - inner)."""
    kind = wide(scores.dtype)
    biased = torch.add(bias, scores.to(kind), alpha=scale)
    weights = torch.exp(biased - lse.unsqueeze(-1))
    by_scores = weights * (by_weights.to(kind) - inner.unsqueeze(-1)) * scale
    return weights.to(scores.dtype), by_scores.to(scores.dtype)
