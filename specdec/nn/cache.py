"""Where keys and values live, and how queries meet them.

Legend: B batch, h query heads, g key heads, T new nodes, S key slots, d head width.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.few_queries import MOST, additive, attend_few
from specdec.nn.pieces import Cut, attend_pieces, is_long
from specdec.nn.sight import Sight
from specdec.nn.unroll import Keys, UnrollKernel


class KVCache(Protocol):
    """Stores the keys of new nodes and lets their queries attend to all the keys they may see."""

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, sight: Sight, slots_BT: Tensor | None
    ) -> Tensor:
        """Attention output of the new nodes, shape (B, h, T, d)."""
        ...


def attend(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, sight: Sight) -> Tensor:
    """Scaled dot-product attention of what is in sight; grouped query heads."""
    if is_long(sight):
        return attend_pieces(_piece, q_BhTd, k_BgSd, v_BgSd, Cut.of(sight))
    return _piece(q_BhTd, k_BgSd, v_BgSd, sight.mask_B1TS)


def _piece(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    causal = mask_B1TS is None
    return F.scaled_dot_product_attention(
        q_BhTd, k_BgSd, v_BgSd, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=True
    )


def write(buffer_BgSd: Tensor, new_BgTd: Tensor, slots_BT: Tensor) -> None:
    """Put new keys or values into their slots, in place: in compiled code too, which would copy all for a scatter."""
    sequences_B, heads_g = (torch.arange(size, device=buffer_BgSd.device) for size in buffer_BgSd.shape[:2])
    buffer_BgSd.index_put_((sequences_B[:, None, None], heads_g[:, None], slots_BT[:, None]), new_BgTd)


def last_slot(slots_BT: Tensor, columns: int) -> int | None:
    """The last slot that new keys go to; None on other devices than a CPU and in compiled code, which it would stall.

    Raises:
        ValueError: the view has no column for it.
    """
    if slots_BT.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    last = int(slots_BT.max())
    if last >= columns:
        raise ValueError(f"slot {last} is beyond the view's {columns} key columns")
    return last


class StaticCache:
    """Fixed slots, written in place: the cache of decoding.

    Args:
        layers: number of attention layers.
        capacity: S, slots per layer.
        batch: B, sequences side by side.

    Attributes:
        keys_BgSd: of every layer; values_BgSd likewise.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch: int = 1,
    ) -> None:
        self.capacity = capacity
        # a tensor for each layer: compiled code would copy a common one whole at every write
        self.keys_BgSd, self.values_BgSd = (
            [torch.zeros(batch, heads, capacity, head_dim, dtype=dtype, device=device) for _ in range(layers)]
            for _ in range(2)
        )

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps."""
        return [*self.keys_BgSd, *self.values_BgSd]

    def row(self, b: int) -> "StaticCache":
        """The cache of one sequence, in the same memory."""
        if len(self.keys_BgSd[0]) == 1:  # without a slice: compiled code would copy the buffer at every write
            return self
        one = copy.copy(self)
        one.keys_BgSd, one.values_BgSd = (
            [x_BgSd[b : b + 1] for x_BgSd in both] for both in (self.keys_BgSd, self.values_BgSd)
        )
        return one

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, sight: Sight, slots_BT: Tensor | None
    ) -> Tensor:
        """Write the new keys into ``slots_BT`` and attend to every slot in sight.

        Raises:
            ValueError: the sight has no column for a new key (on a CPU; compiled code does not look).
        """
        assert slots_BT is not None, "a static cache needs slots: make the view with View.append"
        keys_BgSd, values_BgSd = self.keys_BgSd[layer], self.values_BgSd[layer]
        last_slot(slots_BT, sight.columns)
        write(keys_BgSd, k_BgTd, slots_BT)
        write(values_BgSd, v_BgTd, slots_BT)
        keys_BgSd, values_BgSd = (x_BgSd.narrow(2, 0, sight.columns) for x_BgSd in (keys_BgSd, values_BgSd))
        if q_BhTd.shape[2] > MOST or q_BhTd.device.type != "cpu":
            return attend(q_BhTd, keys_BgSd, values_BgSd, sight)
        bias_B1TS = additive(sight.mask_B1TS, q_BhTd.dtype)
        return attend_few(q_BhTd, keys_BgSd, values_BgSd, bias_B1TS, q_BhTd.shape[-1] ** -0.5)


class UnrollCache:
    """Differentiable keys of training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840).

    Step 0 attends to what is in sight; at every later step, node t attends to the step-0 keys in its sight and to its
    own keys of steps 1..k, and to nobody else's. The (k+1)T wide mask is never built.

    Args:
        kernel: how; all kernels give the same numbers.
    """

    def __init__(self, kernel: UnrollKernel) -> None:
        self.kernel = kernel
        self._layers: list[list[Keys]] = []  # by layer, then by step

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, sight: Sight, slots_BT: Tensor | None
    ) -> Tensor:
        """Append this step's keys and attend to the causal block and the node's own diagonal columns."""
        if layer == len(self._layers):
            self._layers.append([])
        self._layers[layer].append(Keys(k_BgTd, v_BgTd))
        return self.kernel(q_BhTd, self._layers[layer], sight)

    def flat(self) -> list[Tensor]:
        """Every key and value, step by step, layer by layer."""
        return [x for step in zip(*self._layers, strict=True) for keys in step for x in keys]

    def last(self) -> list[Tensor]:
        """Those of the last step, layer by layer."""
        return [x for steps in self._layers for x in steps[-1]]

    def append(self, flat: Sequence[Tensor]) -> None:
        """Add one step, as :meth:`last` gives it."""
        for layer, keys in enumerate(zip(flat[::2], flat[1::2], strict=True)):
            if layer == len(self._layers):
                self._layers.append([])
            self._layers[layer].append(Keys(*keys))

    def holding(self, flat: Sequence[Tensor]) -> "UnrollCache":
        """A cache of the same shape with the keys of :meth:`flat`."""
        cache, each = UnrollCache(self.kernel), 2 * len(self._layers)
        for start in range(0, len(flat), each or 1):
            cache.append(flat[start : start + each])
        return cache
