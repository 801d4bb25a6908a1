"""The target's keys, in slots that a draft tree can fill and an acceptance can tidy.

Legend: B sequences, g key heads, T new nodes, P path nodes, S key slots, d head width.
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.nn.cache import last_slot, write
from specdec.nn.view import View


class TargetCache(Cache):
    """Fixed slots for every layer, sliding ones too: the window is in the mask, so a commit can move any slot.

    Hugging Face's attention layers take it as ``past_key_values``. Buffers are made at a layer's first write,
    since families differ in heads and widths from layer to layer.

    Args:
        capacity: S, slots per layer.
        batch: B, sequences side by side.
    """

    def __init__(self, capacity: int, batch: int = 1) -> None:
        if min(capacity, batch) < 1:
            raise ValueError(f"a cache needs at least one slot and one sequence, not {capacity} and {batch}")
        super().__init__(layers=[])
        self.capacity, self.batch = capacity, batch
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # of all sequences, also in a row of the cache
        self._rows: slice | None = None  # all
        self._slots_BT = torch.empty(0, dtype=torch.int64)
        self._columns = capacity

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps, of all sequences; nothing before the first write."""
        return [buffer for pair in self._buffers.values() for buffer in pair]

    def row(self, b: int) -> Self:
        """The cache of one sequence, in the same memory."""
        if self.batch == 1:  # without a slice: compiled code would copy the buffer at every write
            return self
        one = copy.copy(self)
        one._rows = slice(b, b + 1)
        return one

    def place(self, view: View) -> int:
        """Aim the next forward's keys at ``view.slots_BT``; returns how many key columns it has to look at.

        A view sees nothing beyond its last slot, so on the CPU the empty rest is cut off. Elsewhere, and in compiled
        code, knowing the last slot would stall the device: all columns of the view stay.

        Raises:
            ValueError: the view was made for a larger cache, without slots, or has no column for one of them (CPU).
        """
        columns = view.visibility.columns
        if view.slots_BT is None or columns > self.capacity:
            raise ValueError(
                f"the view has {columns} key columns and the cache {self.capacity} slots: "
                "make the view with View.append or View.chain and the cache's capacity, or less"
            )
        self._slots_BT = view.slots_BT
        last = last_slot(view.slots_BT, columns)
        self._columns = columns if last is None else last + 1
        return self._columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of T nodes, (B, g, T, d) each; returns the columns to attend to."""
        if layer_idx not in self._buffers:
            keys_BgSd, values_BgSd = (
                x.new_zeros(self.batch, x.shape[1], self.capacity, x.shape[3]) for x in (key_states, value_states)
            )
            self._buffers[layer_idx] = keys_BgSd, values_BgSd
        slots_BT = self._slots_BT.to(key_states.device)  # a layer may lie on another device
        keys_BgSd, values_BgSd = self._buffers[layer_idx]
        if self._rows is not None:
            keys_BgSd, values_BgSd = keys_BgSd[self._rows], values_BgSd[self._rows]
        write(keys_BgSd, key_states, slots_BT)
        write(values_BgSd, value_states, slots_BT)
        return keys_BgSd.narrow(2, 0, self._columns), values_BgSd.narrow(2, 0, self._columns)

    def commit(self, prefix_B: Tensor, path_BP: Tensor) -> None:
        """Move slot ``prefix + path[j]`` to slot ``prefix + j`` in every layer; what lies beyond is free again.

        Args:
            prefix_B: int64, number of committed slots before the tree.
            path_BP: int64, the accepted nodes from the root on, as indices into the tree; any node where the path has
                ended, best ``j`` at ``j``.
        """
        order_P = torch.arange(path_BP.shape[1], device=path_BP.device)
        if path_BP.device.type == "cpu" and not torch.compiler.is_compiling() and bool((path_BP == order_P).all()):
            return
        from_BP, to_BP = path_BP + prefix_B[:, None], order_P + prefix_B[:, None]
        for whole in self.tensors:
            buffer = whole if self._rows is None else whole[self._rows]
            here_BP, there_BP = from_BP.to(buffer.device), to_BP.to(buffer.device)
            write(buffer, buffer.take_along_dim(here_BP[:, None, :, None], dim=2), there_BP)
