"""Attention of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840) without its (k+1)T wide mask.

At step k a node attends to the step-0 keys that it sees and to its own keys of steps 1..k: a causal block and k
diagonal columns. After step 0 there may be fewer nodes than step-0 keys. Three kernels give the same numbers:

* :class:`Dense`: the one that the others are compared with: explicit weights over T + k columns, differentiated by
  autograd.
* :class:`specdec.nn.blocked.Blocked`: the causal block in tiles of nodes; the weights are made again in the backward.
* :class:`specdec.nn.merged.Flex`: flex attention for the causal block (CUDA), merged with the columns.

Legend: B batch, h query heads, g key heads, r = h/g, T nodes, S step-0 keys, d head width, k own columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from specdec.nn.backend import wide
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
        """Keep these nodes: the later keys of the others are no longer needed."""
        index = nodes_BM[:, None, :, None]
        self.layers = [
            [first, *(Keys(*(x.take_along_dim(index, 2) for x in keys)) for keys in later)]
            for first, *later in self.layers
        ]

    def copy(self) -> Self:
        """Return a cache with the same keys, to which further keys are added independently."""
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


class Dense:
    """Explicit weights over the causal block and the own columns."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], spans: Spans) -> Tensor:
        B, h, T, d = q_BhTd.shape
        first = steps[0]
        later = steps[1:]
        g, S = first.k_BgTd.shape[1:3]
        q_BgrTd = q_BhTd.reshape(B, g, h // g, T, d) * d**-0.5
        scores = (q_BgrTd @ first.k_BgTd[:, :, None].mT).masked_fill(
            ~spans.mask_B1TS[:, :, None], float("-inf")
        )
        if later:
            keys_BgTkd = torch.stack([keys.k_BgTd for keys in later], dim=3)
            scores = torch.cat(
                [scores, torch.einsum("bgrtd,bgtkd->bgrtk", q_BgrTd, keys_BgTkd)], dim=-1
            )
        weights = scores.softmax(-1, dtype=wide(scores.dtype)).to(q_BhTd.dtype)
        out = weights[..., :S] @ first.v_BgTd[:, :, None]
        if later:
            values_BgTkd = torch.stack([keys.v_BgTd for keys in later], dim=3)
            out = out + torch.einsum("bgrtk,bgtkd->bgrtd", weights[..., S:], values_BgTkd)
        return out.reshape(B, h, T, d)


DENSE = Dense()
"""The kernel that the others are compared with."""
