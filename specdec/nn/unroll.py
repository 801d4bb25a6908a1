"""Attention of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840) without its (k+1)T wide mask.

At step k a node attends to the step-0 keys that it sees and to its own keys of steps 1..k: a causal block
and k diagonal columns. After step 0 there may be fewer nodes than step-0 keys. Three ways to the same numbers:

* :class:`Dense`: the oracle; explicit weights over T + k columns, differentiated by autograd.
* :class:`specdec.nn.blocked.Blocked`: the causal block in tiles, merged with each other and with the columns through
  the log-sum-exp; keeps the output and one log-sum-exp a row, and makes the weights anew in the backward pass.
* :class:`Flex`: flex attention for the causal block (CUDA), merged with the columns likewise.

Legend: B batch, h query heads, g key heads, T nodes, S step-0 keys, d head width, k own columns.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.nn.backend import wide
from specdec.nn.blocked import Blocked, Keys
from specdec.nn.view import Visibility


class UnrollKernel(Protocol):
    """Attention of one step's queries to the step-0 keys that they see and to the nodes' own later keys."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], visibility: Visibility) -> Tensor:
        """Output (B, h, T, d); ``steps`` are those of steps 0..k, the present one last."""
        ...


class Dense:
    """Explicit weights over the causal block and the own columns."""

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], visibility: Visibility) -> Tensor:
        """See :class:`UnrollKernel`."""
        B, h, T, d = q_BhTd.shape
        first, own = steps[0], steps[1:]
        g, S = first.k_BgTd.shape[1:3]
        q_BgrTd = q_BhTd.reshape(B, g, h // g, T, d) * d**-0.5
        scores = (q_BgrTd @ first.k_BgTd[:, :, None].mT).masked_fill(~visibility.mask_B1TS[:, :, None], float("-inf"))
        if own:
            keys_BgTkd = torch.stack([keys.k_BgTd for keys in own], dim=3)
            scores = torch.cat([scores, torch.einsum("bgrtd,bgtkd->bgrtk", q_BgrTd, keys_BgTkd)], dim=-1)
        weights = scores.softmax(-1, dtype=wide(scores.dtype)).to(q_BhTd.dtype)
        out = weights[..., :S] @ first.v_BgTd[:, :, None]
        if own:
            values_BgTkd = torch.stack([keys.v_BgTd for keys in own], dim=3)
            out = out + torch.einsum("bgrtk,bgtkd->bgrtd", weights[..., S:], values_BgTkd)
        return out.reshape(B, h, T, d)


class Merged:
    """Any attention with a differentiable log-sum-exp for the causal block, and the columns beside it.

    Args:
        block: output (B, h, T, d) and log-sum-exp (B, h, T) of queries, keys, values and who sees which of them.
    """

    def __init__(self, block: Callable[[Tensor, Tensor, Tensor, Visibility], tuple[Tensor, Tensor]]) -> None:
        self.block = block

    def __call__(self, q_BhTd: Tensor, steps: Sequence[Keys], visibility: Visibility) -> Tensor:
        """See :class:`UnrollKernel`."""
        B, h, T, d = q_BhTd.shape
        first, own = steps[0], steps[1:]
        out, lse = self.block(q_BhTd, first.k_BgTd, first.v_BgTd, visibility)
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


@cache
def _flex() -> tuple[Callable, Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _rule(visibility: Visibility) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What flex attention asks of sequence, head, node and key, whose block mask it makes without one of all pairs."""
    return lambda b, h, t, s: visibility.sees(b, t, s)


class Flex(Merged):
    """:class:`Merged` over flex attention (CUDA); the block mask is made once for every visibility that comes."""

    def __init__(self) -> None:
        super().__init__(self._causal_block)
        self._visibility: Visibility | None = None
        self._block_mask: Any = None

    def _causal_block(
        self, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        attend, create = _flex()
        if visibility is not self._visibility:
            B, T, S = len(q_BhTd), q_BhTd.shape[2], k_BgTd.shape[2]
            self._block_mask = create(_rule(visibility), B, None, T, S, device=str(q_BhTd.device))
            self._visibility = visibility
        out, aux = attend(
            q_BhTd, k_BgTd, v_BgTd, block_mask=self._block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse


def unroll_kernel(name: str, device: torch.device) -> tuple[str, UnrollKernel]:
    """The kernel and its name; ``auto`` is flex on CUDA and blocked elsewhere.

    Raises:
        ValueError: there is no such kernel, or not on this device.
    """
    chosen = ("flex" if device.type == "cuda" else "blocked") if name == "auto" else name
    if chosen == "flex" and device.type != "cuda":
        raise ValueError(
            f"model.attention=flex needs CUDA: torch has no backward pass for it on {device.type}; use auto"
        )
    kernels = {"dense": Dense, "blocked": Blocked, "flex": Flex}
    if chosen not in kernels:
        raise ValueError(f"model.attention must be auto or one of {', '.join(kernels)}, not {name!r}")
    return chosen, kernels[chosen]()


class UnrollCache:
    """Differentiable keys of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840).

    Step 0 attends to what is visible; at every later step, node t attends to the step-0 keys that it sees and to its
    own keys of steps 1..k, and to nobody else's. The (k+1)T wide mask is never built.

    Args:
        kernel: how; all kernels give the same numbers.
    """

    def __init__(self, kernel: UnrollKernel) -> None:
        self.kernel = kernel
        self.layers: list[list[Keys]] = []  # by layer, then by step

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        visibility: Visibility,
        slots_BT: Tensor | None,
    ) -> Tensor:
        """Append this step's keys and attend to the causal block and the node's own diagonal columns."""
        if layer == len(self.layers):
            self.layers.append([])
        self.layers[layer].append(Keys(k_BgTd, v_BgTd))
        return self.kernel(q_BhTd, self.layers[layer], visibility)

    def copy(self) -> "UnrollCache":
        """One with the same keys, which goes on by itself."""
        cache = UnrollCache(self.kernel)
        cache.layers = [list(steps) for steps in self.layers]
        return cache
