"""What the target's layers get and give: a mask each, an attention that can do without, their states and their keys.

Layers attend as the family has it, except where queries are few (``sdpa``), and by pieces where there are too
many pairs of queries and keys for a mask. Boundary ``b`` is the residual stream after ``b`` layers: 0 the embeddings,
L the last layer's output *before* the final norm. It is Hugging Face's index into ``hidden_states``, except that theirs
is already normed at L.

Legend: B batch, h query heads, g key heads, T new nodes, P path nodes, S key slots or columns, H hidden, d head width.
"""

import contextlib
import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from specdec.nn.cache import FEW_QUERIES, Pieces, additive, attend_few, attend_pieces, write
from specdec.nn.view import View
from specdec.target.model_parts import OURS, OURS_EAGER, ModelParts
from specdec.target.recurrence import RecurrentLayer

Mask = Tensor | Pieces | None
"""What a layer gets for a mask."""


def layer_masks(
    view: View,
    columns: int,
    windows: Sequence[int | None],
    dtype: torch.dtype,
    in_pieces: bool = False,
) -> list[Mask]:
    """One additive (B, 1, T, S) mask per layer, over the first ``columns`` keys; equal windows share theirs.

    Additive, because PyTorch would turn a boolean mask into this one again in every layer. None where a single
    node sees every key (CPU): Hugging Face then takes its faster path, as it does in its own decoding.

    Args:
        in_pieces: the layers take a cut in place of a mask that would be too large.
    """
    near = view._replace(
        visibility=view.visibility.cut(columns), key_positions_BS=view.key_positions_BS[:, :columns]
    )
    mask_by_window: dict[int | None, Mask] = {}
    masks = []
    for window in windows:
        # a window wider than the cache cuts nothing
        cut = window if window is not None and window < columns else None
        if cut not in mask_by_window:
            seen = (near if cut is None else near.within(cut)).visibility
            mask_by_window[cut] = Pieces.of(seen) if in_pieces else None
            if mask_by_window[cut] is None:
                allowed_B1TS = seen.mask_B1TS
                if not _sees_everything(allowed_B1TS):
                    mask_by_window[cut] = additive(allowed_B1TS, dtype)
        masks.append(mask_by_window[cut])
    return masks


def _sees_everything(allowed_B1TS: Tensor) -> bool:
    """Whether one node on a CPU sees every key, and needs no mask; no device is waited for, and no graph broken."""
    one_node = allowed_B1TS.shape[0] == allowed_B1TS.shape[2] == 1
    if not one_node or allowed_B1TS.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool(allowed_B1TS.all())


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model whose decoder runs with ``sdpa`` or ``eager`` attend as this file has it; others are left alone.

    Verification asks for few queries under a separate mask, where PyTorch's kernels are slow.
    Long rows and prompts come in pieces in place of the mask.
    """
    decoder = model.get_decoder()
    attention = decoder.config._attn_implementation
    family = sys.modules[type(decoder).__module__]
    # GPT-2 does that for the name eager alone
    upcast = getattr(decoder.config, "reorder_and_upcast_attn", False)
    if attention == "sdpa":
        ours = OURS
        mask = sdpa_mask
    elif attention == "eager" and not upcast and hasattr(family, "eager_attention_forward"):
        ours = OURS_EAGER
        mask = eager_mask
    else:
        return
    AttentionInterface.register(ours, _attention)
    AttentionMaskInterface.register(ours, mask)
    model.set_attn_implementation(ours)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, h, T, d), twice (B, g, S, d) and an additive (B, 1, T, S) or pieces, to (B, T, h, d)."""
    config: Any = module.config
    eager = config._attn_implementation == OURS_EAGER
    family_attention = sdpa_attention_forward
    if eager:
        family_attention = sys.modules[type(module).__module__].eager_attention_forward
    if isinstance(attention_mask, Pieces):

        def attend_piece(
            q_1hRd: Tensor, k_1gKd: Tensor, v_1gKd: Tensor, mask_11RK: Tensor | None
        ) -> Tensor:
            bias_11RK = None if mask_11RK is None else additive(mask_11RK, q_1hRd.dtype)
            options = kwargs if eager else {**kwargs, "is_causal": mask_11RK is None}
            output = family_attention(module, q_1hRd, k_1gKd, v_1gKd, bias_11RK, **options)
            return output[0].transpose(1, 2)

        # eager attention weighs all pairs that it is given: no document goes to it as a whole
        pieces = Pieces.cut(attention_mask.spans, causal=False) if eager else attention_mask
        return attend_pieces(attend_piece, query, key, value, pieces).transpose(
            1, 2
        ).contiguous(), None
    few = query.shape[2] <= FEW_QUERIES and not query.requires_grad
    if few and not eager and attention_mask is not None and attention_mask.is_floating_point():
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attend_few(query, key, value, attention_mask, scale).transpose(
            1, 2
        ).contiguous(), None
    return family_attention(module, query, key, value, attention_mask, **kwargs)


class Tape:
    """What one forward hands to the layers and keeps of them; between forwards the hooks do nothing.

    The hooks stay on the model, since ``torch.compile`` cannot follow hooks that come and go; whoever else uses the
    model, another tape included, does not notice them.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._masks: Sequence[Mask] = ()
        self._boundaries: Collection[int] = ()
        self._states: dict[int, Tensor] = {}
        for i, layer in enumerate(parts.layers):
            layer.register_forward_pre_hook(
                partial(self._enter, i, parts.mask_argument), with_kwargs=True
            )
        parts.final_norm.register_forward_pre_hook(
            partial(self._enter, len(parts.layers), None), with_kwargs=True
        )

    @contextlib.contextmanager
    def running(
        self, masks: Sequence[Mask], boundaries: Collection[int]
    ) -> Iterator[dict[int, Tensor]]:
        """While the block runs, hand out ``masks`` and fill the yielded mapping with the states at ``boundaries``."""
        self._masks = masks
        self._boundaries = boundaries
        self._states = {}
        try:
            yield self._states
        finally:
            self._masks = ()
            self._boundaries = ()
            self._states = {}

    def _enter(
        self,
        boundary: int,
        place: int | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep the state that comes in, and put the layer's mask at its place; the final norm (None) takes none."""
        # a family that norms its embeddings too comes to the norm twice: the last counts
        if boundary in self._boundaries:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]
        if place is None or not self._masks:
            return None
        mask = self._masks[boundary]
        if len(args) > place:
            return (*args[:place], mask, *args[place + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": mask}


class TargetCache(Cache):
    """Fixed slots for every layer, sliding ones too: the window is in the mask, so a commit can move any slot.

    Hugging Face's attention layers take it as ``cache``, or ``past_key_values`` before transformers 5.24. Buffers are
    made at a layer's first write, since families differ in heads and widths from layer to layer.

    Args:
        capacity: S, slots per layer.
        batch: B, sequences side by side.
        recurrent: of each layer, whether it carries a state, of which :mod:`specdec.target.recurrence` takes care;
            empty if none does.
        nodes: tokens of a verification at most, that recurrent layers can go back in (:meth:`rewind`).
    """

    def __init__(
        self, capacity: int, batch: int = 1, recurrent: Sequence[bool] = (), nodes: int = 1
    ) -> None:
        if min(capacity, batch) < 1:
            raise ValueError(
                f"a cache needs at least one slot and one sequence, not {capacity} and {batch}"
            )
        super().__init__(
            layers=[RecurrentLayer(nodes) if carries else DynamicLayer() for carries in recurrent]
        )
        self.capacity = capacity
        self.batch = batch
        # of all sequences, also in a row of the cache
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: slice | None = None  # all
        self._slots_BT = torch.empty(0, dtype=torch.int64)
        self._columns = capacity

    @contextlib.contextmanager
    def begin(self, b: int) -> Iterator[Self]:
        """The cache of sequence ``b`` alone, where a text begins: its keys stand in the same memory, its recurrent
        states are no earlier text's and come to this cache when the block ends."""
        text = copy.copy(self)
        text._rows = slice(b, b + 1)
        text.layers = [type(layer)() for layer in self.layers]
        yield text
        for layer, layer_of_text in zip(self.layers, text.layers, strict=True):
            if isinstance(layer, RecurrentLayer):
                layer.begin(b, self.batch, layer_of_text)

    def grow(self, capacity: int) -> None:
        """Have this many slots, no fewer than before; what is in them stays."""
        more = capacity - self.capacity
        self.capacity = capacity
        for layer, buffers in self._buffers.items():
            keys_BgSd, values_BgSd = (F.pad(buffer, (0, 0, 0, more)) for buffer in buffers)
            self._buffers[layer] = keys_BgSd, values_BgSd

    def rewind(self, count_B: Tensor) -> None:
        """Let recurrent states be those after the first ``count_B`` tokens of the last verification, of each sequence
        its own number, int64, at least one. What is in slots needs nothing: the next tokens are written over it."""
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.rewind(count_B)

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
        self._columns = columns
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.forget()
        if view.slots_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            self._columns = int(view.slots_BT.max()) + 1
            if self._columns > columns:
                raise ValueError(
                    f"slot {self._columns - 1} is beyond the view's {columns} key columns"
                )
        return self._columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of T nodes, (B, g, T, d) each; returns the columns to attend to."""
        if layer_idx not in self._buffers:
            keys_BgSd, values_BgSd = (
                x.new_zeros(self.batch, x.shape[1], self.capacity, x.shape[3])
                for x in (key_states, value_states)
            )
            self._buffers[layer_idx] = keys_BgSd, values_BgSd
        slots_BT = self._slots_BT.to(key_states.device)  # a layer may lie on another device
        keys_BgSd, values_BgSd = self._buffers[layer_idx]
        if self._rows is not None:
            keys_BgSd = keys_BgSd[self._rows]
            values_BgSd = values_BgSd[self._rows]
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
        if (
            path_BP.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and bool((path_BP == order_P).all())
        ):
            return
        from_BP = path_BP + prefix_B[:, None]
        to_BP = order_P + prefix_B[:, None]
        for whole in (x for pair in self._buffers.values() for x in pair):
            buffer = whole if self._rows is None else whole[self._rows]
            here_BP = from_BP.to(buffer.device)
            there_BP = to_BP.to(buffer.device)
            write(buffer, buffer.take_along_dim(here_BP[:, None, :, None], dim=2), there_BP)
