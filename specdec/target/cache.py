"""The target's keys, in slots that a draft tree can fill and an acceptance can tidy.

Legend: g key heads, T new nodes, P accepted nodes, S key slots, d head width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.nn.view import View


class TargetCache(Cache):
    """Fixed slots for every layer, sliding ones too: the window is in the mask, so a commit can move any slot.

    Hugging Face's attention layers take it as ``past_key_values``. Buffers are made at a layer's first write,
    since families differ in heads and widths from layer to layer. Batch size 1.

    Args:
        capacity: S, slots per layer.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache needs at least one slot, not {capacity}")
        super().__init__(layers=[])
        self.capacity = capacity
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots_T = torch.empty(0, dtype=torch.int64)
        self._columns = capacity

    def place(self, view: View) -> int:
        """Aim the next forward's keys at ``view.slots_T``; returns how many key columns it has to look at.

        A view sees nothing beyond its last slot, so on the CPU the empty rest is cut off. Elsewhere, knowing the
        last slot would stall the device: all S columns stay, and shapes stay fixed for compilation.

        Raises:
            ValueError: the view was made for another capacity, without slots, or does not fit (CPU).
        """
        if view.slots_T is None or view.mask_B1TS.shape[-1] != self.capacity:
            raise ValueError(
                f"the view has {view.mask_B1TS.shape[-1]} key columns and the cache {self.capacity} slots: "
                "make the view with View.append or View.chain and the cache's capacity"
            )
        self._slots_T = view.slots_T
        self._columns = self.capacity
        if view.slots_T.device.type == "cpu":
            self._columns = int(view.slots_T[-1]) + 1
            if self._columns > self.capacity:
                raise ValueError(f"slot {self._columns - 1} is beyond the cache's {self.capacity} slots")
        return self._columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of T nodes, (1, g, T, d) each; returns the columns to attend to."""
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = (self._empty(key_states), self._empty(value_states))
        keys_1gSd, values_1gSd = self._buffers[layer_idx]
        keys_1gSd.index_copy_(2, self._slots_T, key_states)
        values_1gSd.index_copy_(2, self._slots_T, value_states)
        return keys_1gSd[:, :, : self._columns], values_1gSd[:, :, : self._columns]

    def _empty(self, like_1gTd: Tensor) -> Tensor:
        shape = (*like_1gTd.shape[:2], self.capacity, like_1gTd.shape[3])
        return torch.zeros(shape, dtype=like_1gTd.dtype, device=like_1gTd.device)

    def commit(self, prefix: int | Tensor, path_P: Tensor) -> None:
        """Move slot ``prefix + path_P[j]`` to slot ``prefix + j`` in every layer; what lies beyond is free again.

        Args:
            prefix: number of committed slots before the tree.
            path_P: int64, the accepted nodes from the root on, as indices into the tree.
        """
        order_P = torch.arange(path_P.shape[0], device=path_P.device)
        if path_P.device.type == "cpu" and torch.equal(path_P, order_P):
            return
        from_P, to_P = path_P + prefix, order_P + prefix
        for pair in self._buffers.values():
            for buffer in pair:
                buffer.index_copy_(2, to_P, buffer.index_select(2, from_P))

    def __repr__(self) -> str:
        return f"TargetCache(capacity={self.capacity})"
