"""Attention of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840) without its (k+1)T wide mask.

At step k a node attends to the step-0 keys that it sees and to its own keys of steps 1..k: a causal block and k
diagonal columns. After step 0 there may be fewer nodes than step-0 keys. Three kernels give the same numbers:

* :class:`Dense`: the oracle; explicit weights over T + k columns, differentiated by autograd.
* :class:`Blocked`: the causal block in tiles of nodes, each with the keys that any of its nodes sees, part by part. The
  weights of a part are exp(score - log-sum-exp), as in FlashAttention (https://arxiv.org/abs/2205.14135): parts, and
  the own columns beside them, are merged through the log-sum-exp over what came before. It keeps the output and one
  log-sum-exp a node, and makes the weights anew in the backward pass.
* :class:`Flex`: flex attention for the causal block (CUDA), merged with the columns likewise.

Legend: B batch, h query heads, g key heads, r = h/g, T nodes, S step-0 keys, d head width, k own columns, n keys of a
tile's part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from specdec.nn.backend import pointwise, wide
from specdec.nn.view import Spans, Visibility


class Keys(NamedTuple):
    """Keys and values of one unroll step, each (B, g, T, d); those of step 0 (B, g, S, d)."""

    k_BgTd: Tensor
    v_BgTd: Tensor


class UnrollKernel(Protocol):
    """Attention of one step's queries to the step-0 keys that they see and to the nodes' own later keys."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        """Output (B, h, T, d); ``steps`` are those of steps 0..k, the present one last."""
        ...


@dataclass
class UnrollCache:
    """Differentiable keys of the unroll; see the head of this file for who attends to which."""

    kernel: UnrollKernel
    layers: list[list[Keys]] = field(default_factory=list)  # by layer, then by step

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        visible: Visibility,
        slots_BT: Tensor | None,
    ) -> Tensor:
        """Append this step's keys and attend to the causal block and the node's own diagonal columns."""
        assert isinstance(visible, Spans)
        if layer == len(self.layers):
            self.layers.append([])
        self.layers[layer].append(Keys(k_BgTd, v_BgTd))
        return self.kernel(q_BhTd, self.layers[layer], visible)

    def narrow(self, nodes_BM: Tensor) -> None:
        """Go on with these of the nodes: of the others' later keys none is needed any more."""
        index = nodes_BM[:, None, :, None]
        self.layers = [
            [first, *(Keys(*(x.take_along_dim(index, 2) for x in own)) for own in later)]
            for first, *later in self.layers
        ]

    def copy(self) -> Self:
        """One with the same keys, which goes on by itself."""
        return replace(self, layers=[list(steps) for steps in self.layers])


class BlockCache(NamedTuple):
    """Keys of context nodes and of blocks behind some of them: a block's nodes see its context, and all of the block.

    The drafted nodes are the blocks' firsts, then their seconds, and so on.
    """

    kernel: UnrollKernel
    spans: Spans  # of the context, which keys each block sees
    context: int  # how many of the nodes are context

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        visible: Visibility,
        slots_BT: Tensor | None,
    ) -> Tensor:
        """Output of the drafted nodes, level by level, each of which attends as a step of the unroll does."""
        M = self.spans.first_BT.shape[1]
        sizes = [self.context, *[M] * (q_BhTd.shape[2] // M)]
        keys = [
            Keys(*both) for both in zip(k_BgTd.split(sizes, 2), v_BgTd.split(sizes, 2), strict=True)
        ]
        return torch.cat(
            [self.kernel(q_BhMd, keys, self.spans) for q_BhMd in q_BhTd.split(M, 2)], 2
        )


def unroll_kernel(name: str, device: torch.device) -> tuple[str, UnrollKernel]:
    """The kernel and its name; ``auto`` is flex on CUDA and blocked elsewhere.

    Raises:
        ValueError: there is no such kernel, or not on this device.
    """
    kernels = {"dense": Dense, "blocked": Blocked, "flex": Flex}
    cuda = device.type == "cuda"
    chosen = ("flex" if cuda else "blocked") if name == "auto" else name
    if chosen not in kernels:
        raise ValueError(
            f"model.attention must be auto or one of {', '.join(kernels)}, not {name!r}"
        )
    if chosen == "flex" and not cuda:
        raise ValueError(
            f"model.attention=flex needs CUDA: torch has no backward pass for it on {device.type}; use auto"
        )
    return chosen, kernels[chosen]()


class Dense:
    """Explicit weights over the causal block and the own columns."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        B, h, T, d = q_BhTd.shape
        first = steps[0]
        own = steps[1:]
        g, S = first.k_BgTd.shape[1:3]
        q_BgrTd = q_BhTd.reshape(B, g, h // g, T, d) * d**-0.5
        scores = (q_BgrTd @ first.k_BgTd[:, :, None].mT).masked_fill(
            ~spans.mask_B1TS[:, :, None], float("-inf")
        )
        if own:
            keys_BgTkd = torch.stack([keys.k_BgTd for keys in own], dim=3)
            scores = torch.cat(
                [scores, torch.einsum("bgrtd,bgtkd->bgrtk", q_BgrTd, keys_BgTkd)], dim=-1
            )
        weights = scores.softmax(-1, dtype=wide(scores.dtype)).to(q_BhTd.dtype)
        out = weights[..., :S] @ first.v_BgTd[:, :, None]
        if own:
            values_BgTkd = torch.stack([keys.v_BgTd for keys in own], dim=3)
            out = out + torch.einsum("bgrtk,bgtkd->bgrtd", weights[..., S:], values_BgTkd)
        return out.reshape(B, h, T, d)


DENSE = Dense()
"""The kernel that the others are compared with."""


class Merged:
    """Any attention with a differentiable log-sum-exp for the causal block, and the columns beside it."""

    def __init__(
        self, block: Callable[[Tensor, Tensor, Tensor, Spans], tuple[Tensor, Tensor]]
    ) -> None:
        # output (B, h, T, d) and log-sum-exp (B, h, T) of queries, keys, values and who sees which
        self.block = block

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        first = steps[0]
        own = steps[1:]
        out, lse = self.block(q_BhTd, first.k_BgTd, first.v_BgTd, spans)
        return _Merged.apply(q_BhTd, out, lse, *(x for keys in own for x in keys)) if own else out


class _Merged(torch.autograd.Function):
    """Output and log-sum-exp of the causal block, and own columns; no score is kept, and nothing wider than ``q``."""

    @staticmethod
    def forward(
        ctx: Any, q_BhTd: Tensor, out_BhTd: Tensor, lse_BhT: Tensor, *own: Tensor
    ) -> Tensor:
        B, h, T, d = q_BhTd.shape
        g = own[0].shape[1]
        q = q_BhTd.view(B, g, h // g, T, d)
        lse = lse_BhT.to(wide(q.dtype)).view(q.shape[:-1])
        total = lse
        scores = [_own_scores(q, k_BgTd) for k_BgTd in own[0::2]]
        for scores_BgrT in scores:
            total = torch.logaddexp(total, scores_BgrT)
        merged = out_BhTd.view_as(q) * torch.exp(lse - total).unsqueeze(-1)
        for scores_BgrT, v_BgTd in zip(scores, own[1::2], strict=True):
            merged = _add_own(merged, scores_BgrT, total, v_BgTd)
        merged = merged.to(q.dtype).view_as(q_BhTd)
        ctx.save_for_backward(q_BhTd, out_BhTd, lse, total, merged, *own)
        return merged

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BhTd: Tensor) -> tuple[Tensor, ...]:
        q_BhTd, out_BhTd, lse, total, merged_BhTd, *own = ctx.saved_tensors
        q = q_BhTd.view(*total.shape, -1)
        grad = grad_BhTd.reshape(q.shape)
        out = out_BhTd.view_as(q)
        inner = (grad.to(total.dtype) * merged_BhTd.view_as(q)).sum(-1)
        share = torch.exp(lse - total)  # of the causal block
        by_out = (grad * share.unsqueeze(-1)).to(out.dtype).view_as(out_BhTd)
        by_lse = (share * ((grad.to(total.dtype) * out).sum(-1) - inner)).view(q_BhTd.shape[:-1])
        by_q = torch.zeros_like(q, dtype=total.dtype)
        by_own = list[Tensor]()
        for k_BgTd, v_BgTd in zip(own[0::2], own[1::2], strict=True):
            more_q, by_k, by_v = _own_back(grad, q, total, inner, k_BgTd, v_BgTd)
            by_q += more_q
            by_own += [by_k, by_v]
        return by_q.to(q.dtype).view_as(q_BhTd), by_out, by_lse, *by_own


def contiguous(spans: Spans) -> Spans:
    """The same, not expanded."""
    sinks = None if spans.sinks is None else contiguous(spans.sinks)
    return spans._replace(
        first_BT=spans.first_BT.contiguous(), last_BT=spans.last_BT.contiguous(), sinks=sinks
    )


def _rule(spans: Spans) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What flex attention asks of sequence, head, node and key, whose block mask it makes without one of all pairs."""
    if (sinks := spans.sinks) is None:
        return lambda b, h, t, s: (s >= spans.first_BT[b, t]) & (s <= spans.last_BT[b, t])
    run = _rule(spans._replace(sinks=None))
    sunk = _rule(sinks)
    return lambda b, h, t, s: run(b, h, t, s) | sunk(b, h, t, s)


class Flex(Merged):
    """:class:`Merged` over flex attention (CUDA); the block mask is made once for every visibility that comes."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        super().__init__(self._causal_block)
        # for sequences of any number and length: a graph of each would soon be one too many, and what torch then runs
        # instead keeps all scores; fullgraph makes that an error
        compiled = partial(torch.compile, dynamic=True, fullgraph=True, isolate_recompiles=True)
        self._attend = compiled(flex_attention)
        self._create = compiled(create_block_mask)
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
        out, found = self._attend(
            q_BhTd, k_BgTd, v_BgTd, block_mask=mask, enable_gqa=True, return_aux=aux
        )
        return out, found.lse


NOTHING = -1e30  # the log-sum-exp of no keys: finite, so that nothing less nothing is zero
KEPT = 2**26  # bytes of a tiling's biases, up to which they are kept from their first use on
# nodes of a tile, keys of a part
ROWS = 256
KEYS = 2048


class Blocked:
    """The causal block in tiles of ``rows`` nodes, each with the keys that any of them sees, ``keys`` at a time."""

    def __init__(self, rows: int = ROWS, keys: int = KEYS) -> None:
        self.rows = rows
        self.keys = keys
        self._spans: Spans | None = None
        self._tiling: Tiling

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        if spans is not self._spans:
            self._spans, self._tiling = spans, Tiling(spans, self.rows, self.keys)
        return _Blocked.apply(q_BhTd, self._tiling, *(x for keys in steps for x in keys))


def kept_bytes(B: int, T: int) -> int:
    """Bytes of biases that a tiling comes to keep, of rows that are one document each."""
    pairs = 0
    for a in range(0, T, ROWS):
        end = min(a + ROWS, T)
        first = 0 if end <= KEYS else a // KEYS * KEYS  # what comes before is seen whole
        pairs += (end - a) * (end - first)
    size = B * pairs * torch.bfloat16.itemsize
    return size if size <= KEPT else 0


def _edges(spans: Spans, rows: int) -> list[list[int]]:
    """Of every tile, where the keys begin and end that all its nodes see, and where those that any sees."""
    sees_BT = spans.first_BT <= spans.last_BT
    first_BT = spans.first_BT.where(sees_BT, spans.columns)
    end_BT = spans.last_BT.where(sees_BT, -1) + 1
    edges = [
        torch.stack([first_BR.amax(), end_BR.amin(), first_BR.amin(), end_BR.amax()])
        for first_BR, end_BR in zip(first_BT.split(rows, 1), end_BT.split(rows, 1), strict=True)
    ]
    return torch.stack(edges).tolist()


def _parts(first: int, end: int, keys: int) -> list[slice]:
    """One part, or one to every multiple of the most keys; none where there are no keys."""
    inner = range((first // keys + 1) * keys, end, keys) if end - first > keys else ()
    starts = [first, *inner] if first < end else []
    return list(map(slice, starts, [*starts[1:], end]))


class Tiling:
    """The causal block of one visibility in tiles of nodes, each with the keys that any of them sees in parts.

    A part that every node sees whole needs no bias. The others' take as many numbers as there are pairs: they are kept
    where they are few, as those of short rows are, and else made anew at each use.
    """

    def __init__(self, spans: Spans, rows: int = ROWS, keys: int = KEYS) -> None:
        self.spans = spans
        B, T = spans.first_BT.shape
        edges = _edges(spans, rows)
        sunk = [[0] * 4] * len(edges) if spans.sinks is None else _edges(spans.sinks, rows)
        nothing = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16, device=spans.first_BT.device)
        self._biases: dict[tuple[int, int], Tensor] = {}
        self.tiles: list[tuple[slice, list[slice]]] = []  # nodes, and their keys in parts
        pairs = 0
        for a, (lowest, highest, first, end), (*_, sink, sink_end) in zip(
            range(0, T, rows), edges, sunk, strict=True
        ):
            before = _parts(sink, sink_end, keys)
            if before and sink_end > first:  # sinks of some nodes lie in the run of others
                before = []
                first = min(sink, first)
                end = max(sink_end, end)
            tile = slice(a, min(a + rows, T))
            parts = before + _parts(first, end, keys)
            self.tiles.append((tile, parts))
            for part in parts:
                if lowest <= part.start and part.stop <= highest:
                    self._biases[a, part.start] = nothing
                else:
                    pairs += (tile.stop - a) * (part.stop - part.start)
        self._keeps = B * pairs * nothing.itemsize <= KEPT

    def bias(self, rows: slice, keys: slice) -> Tensor:
        """Of a part, (B, 1, 1, rows, keys), or one for all: 0 where a node sees the key, else -inf."""
        place = rows.start, keys.start
        if place in self._biases:
            return self._biases[place]
        seen_B11RK = self.spans.part(rows, keys)[:, :, None]
        bias = torch.zeros_like(seen_B11RK, dtype=torch.bfloat16)  # exact, and half as wide
        bias.masked_fill_(~seen_B11RK, float("-inf"))
        if self._keeps:
            self._biases[place] = bias
        return bias


class _Blocked(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one log-sum-exp a node; the weights are made again."""

    @staticmethod
    def forward(ctx: Any, q_BhTd: Tensor, tiling: Tiling, *flat: Tensor) -> Tensor:
        B, h, T, d = q_BhTd.shape
        k0, v0 = flat[:2]
        g = k0.shape[1]
        r = h // g
        scale = d**-0.5
        q = q_BhTd.view(B, g, r, T, d)
        # lse: of every node, the log-sum-exp of all scores so far; it starts with those of the node's own later keys
        lse = q.new_full((B, g, r, T), NOTHING, dtype=wide(q.dtype))
        own = [_own_scores(q, k_BgTd) for k_BgTd in flat[2::2]]
        for scores_BgrT in own:
            lse = torch.logaddexp(lse, scores_BgrT)
        kind = lse.dtype if own else q.dtype  # the sum over tile and columns is rounded once
        # so that heads flatten for free
        out = q.new_zeros(B, T, h, d, dtype=kind).transpose(1, 2).unflatten(1, (g, r))
        for rows, parts in tiling.tiles:
            q_t = q[..., rows, :].flatten(0, 1).flatten(1, 2)  # (B g, r rows, d)
            tile: Tensor | None = None
            for keys in parts:
                scores = torch.bmm(q_t, k0[:, :, keys].flatten(0, 1).mT)
                n = scores.shape[-1]
                before = lse[..., rows].contiguous()
                # normalised together with all that came before; _merge rescales the earlier parts of the tile
                weights, after = _weights(
                    scores.view(B, g, r, -1, n), tiling.bias(rows, keys), before, scale
                )
                part = torch.bmm(weights.view(B * g, -1, n), v0[:, :, keys].flatten(0, 1)).view(
                    B, g, r, -1, d
                )
                tile, lse[..., rows] = (
                    part if tile is None else _merge(tile, before, after, part),
                    after,
                )
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
        kind = lse.dtype
        r = h // g
        scale = d**-0.5
        q = q_BhTd.view(B, g, r, T, d)
        grad = grad_BhTd.reshape(B, g, r, T, d)
        # sum of weight times its gradient, of every node: grad . out
        inner = (grad.to(kind) * out.view_as(q).to(kind)).sum(-1)
        by_q, by_k0, by_v0 = (x.new_zeros(x.shape, dtype=kind) for x in (q, k0, v0))
        for rows, parts in ctx.tiling.tiles:
            q_t = q[..., rows, :].flatten(0, 1).flatten(1, 2)
            grad_t = grad[..., rows, :].reshape(B * g, -1, d)
            lse_t = lse[..., rows].contiguous()
            inner_t = inner[..., rows].contiguous()
            for keys in parts:
                k_t = k0[:, :, keys].flatten(0, 1)
                v_t = v0[:, :, keys].flatten(0, 1)
                shape = (B, g, r, -1, k_t.shape[1])
                scores = torch.bmm(q_t, k_t.mT).view(shape)
                by_weights = torch.bmm(grad_t, v_t.mT).view(shape)
                found = _weights_back(
                    scores, ctx.tiling.bias(rows, keys), lse_t, by_weights, inner_t, scale
                )
                weights, by_scores = (x.view(B * g, -1, k_t.shape[1]) for x in found)
                by_v0[:, :, keys] += torch.bmm(weights.mT, grad_t).view(B, g, -1, d)
                by_k0[:, :, keys] += torch.bmm(by_scores.mT, q_t).view(B, g, -1, d)
                by_q[..., rows, :] += torch.bmm(by_scores, k_t).view(B, g, r, -1, d)
        by_own: list[Tensor] = []
        for k_BgTd, v_BgTd in zip(flat[2::2], flat[3::2], strict=True):
            more_q, by_k, by_v = _own_back(grad, q, lse, inner, k_BgTd, v_BgTd)
            by_q = by_q + more_q
            by_own += [by_k, by_v]
        by_q = by_q.to(q.dtype).view_as(q_BhTd)
        return by_q, None, by_k0.to(k0.dtype), by_v0.to(v0.dtype), *by_own


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
    """Weights again, and the gradient by the products of queries and keys: weight * (its gradient - inner)."""
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
    grad_BgrTd: Tensor,
    q_BgrTd: Tensor,
    lse_BgrT: Tensor,
    inner_BgrT: Tensor,
    k_BgTd: Tensor,
    v_BgTd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = lse_BgrT.dtype
    scale = q_BgrTd.shape[-1] ** -0.5
    q = q_BgrTd.to(kind)
    grad = grad_BgrTd.to(kind)
    k = k_BgTd.unsqueeze(2).to(kind)
    v = v_BgTd.unsqueeze(2).to(kind)
    weights = torch.exp((q * k).sum(-1) * scale - lse_BgrT)
    by_scores = (weights * ((grad * v).sum(-1) - inner_BgrT) * scale).unsqueeze(-1)
    by_k = (by_scores * q).sum(2)
    by_v = (weights.unsqueeze(-1) * grad).sum(2)
    return by_scores * k, by_k.to(k_BgTd.dtype), by_v.to(v_BgTd.dtype)
