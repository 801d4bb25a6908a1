"""What the target's layers get and give: a mask each, an attention that can do without, and the states kept of them.

Layers attend as the family has it, except where a CPU meets few queries (``sdpa``), and by pieces where there are too
many pairs of queries and keys for a mask. Boundary ``b`` is the residual stream after ``b`` layers: 0 the embeddings,
L the last layer's output *before* the final norm. It is Hugging Face's index into ``hidden_states``, except that theirs
is already normed at L.

Legend: B batch, h query heads, g key heads, T new nodes, S key columns, H hidden, d head width.
"""

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from specdec.nn.cache import FEW, Pieces, additive, attend_few, attend_pieces
from specdec.nn.view import View
from specdec.target.model_parts import OURS, OURS_EAGER, ModelParts

Mask = Tensor | Pieces | None
"""What a layer gets for a mask."""


def layer_masks(
    view: View, columns: int, windows: Sequence[int | None], dtype: torch.dtype, in_pieces: bool = False
) -> list[Mask]:
    """One additive (B, 1, T, S) mask per layer, over the first ``columns`` keys; equal windows share theirs.

    Additive, because PyTorch would turn a boolean mask into this one again in every layer. None where a single
    node sees every key (CPU): Hugging Face then takes its faster path, as it does in its own decoding.

    Args:
        in_pieces: the layers take a cut in place of a mask that would be too large.
    """
    near = view._replace(visibility=view.visibility.cut(columns), key_positions_BS=view.key_positions_BS[:, :columns])
    made: dict[int | None, Mask] = {}
    masks = []
    for window in windows:
        reaching = window if window is not None and window < columns else None
        if reaching not in made:
            seen = (near if reaching is None else near.within(reaching)).visibility
            made[reaching] = Pieces.of(seen) if in_pieces else None
            if made[reaching] is None:
                allowed_B1TS = seen.mask_B1TS
                one = allowed_B1TS.shape[0] == allowed_B1TS.shape[2] == 1 and allowed_B1TS.device.type == "cpu"
                if not (one and not torch.compiler.is_compiling() and bool(allowed_B1TS.all())):
                    made[reaching] = additive(allowed_B1TS, dtype)
        masks.append(made[reaching])
    return masks


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model whose decoder runs with ``sdpa`` or ``eager`` attend as this file has it; others are left alone.

    Verification asks for few queries under a mask of its own, where PyTorch's kernel is slow in bfloat16 on a CPU.
    Long rows and prompts come in pieces in place of the mask.
    """
    decoder = model.get_decoder()
    config = decoder.config
    if config._attn_implementation == "sdpa":
        AttentionInterface.register(OURS, _attention)
        AttentionMaskInterface.register(OURS, sdpa_mask)
        model.set_attn_implementation(OURS)
    upcast = getattr(config, "reorder_and_upcast_attn", False)  # GPT-2 does that for the name eager alone
    family = sys.modules[type(decoder).__module__]
    if config._attn_implementation == "eager" and not upcast and hasattr(family, "eager_attention_forward"):
        AttentionInterface.register(OURS_EAGER, _eager)
        AttentionMaskInterface.register(OURS_EAGER, eager_mask)
        model.set_attn_implementation(OURS_EAGER)


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The family's own, which weighs all pairs of queries and keys that it is given."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    if not isinstance(attention_mask, Pieces):
        return own(module, query, key, value, attention_mask, **kwargs)

    def one(q_1hRd: Tensor, k_1gKd: Tensor, v_1gKd: Tensor, mask_11RK: Tensor | None) -> Tensor:
        assert mask_11RK is not None
        return own(module, q_1hRd, k_1gKd, v_1gKd, additive(mask_11RK, q_1hRd.dtype), **kwargs)[0].transpose(1, 2)

    out = attend_pieces(one, query, key, value, Pieces.cut(attention_mask.spans, causal=False))
    return out.transpose(1, 2).contiguous(), None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, h, T, d), twice (B, g, S, d) and an additive (B, 1, T, S) or pieces, to (B, T, h, d)."""
    if isinstance(attention_mask, Pieces):

        def one(q_1hRd: Tensor, k_1gKd: Tensor, v_1gKd: Tensor, mask_11RK: Tensor | None) -> Tensor:
            bias_11RK = None if mask_11RK is None else additive(mask_11RK, q_1hRd.dtype)
            own = {**kwargs, "scaling": scaling, "is_causal": mask_11RK is None}
            return sdpa_attention_forward(module, q_1hRd, k_1gKd, v_1gKd, bias_11RK, **own)[0].transpose(1, 2)

        return attend_pieces(one, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    few = query.shape[2] <= FEW and query.device.type == "cpu" and not query.requires_grad
    if few and attention_mask is not None and attention_mask.is_floating_point():
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_few(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


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
            layer.register_forward_pre_hook(partial(self._enter_layer, i, parts.mask_argument), with_kwargs=True)
        parts.final_norm.register_forward_pre_hook(partial(self._enter_norm, len(parts.layers)))

    @contextlib.contextmanager
    def running(self, masks: Sequence[Mask], boundaries: Collection[int]) -> Iterator[dict[int, Tensor]]:
        """While the block runs, hand out ``masks`` and fill the yielded mapping with the states at ``boundaries``."""
        self._masks, self._boundaries, self._states = masks, boundaries, {}
        try:
            yield self._states
        finally:
            self._masks, self._boundaries, self._states = (), (), {}

    def _enter_layer(
        self, boundary: int, mask_argument: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._masks:
            return None
        if boundary in self._boundaries:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]
        mask = self._masks[boundary]
        if len(args) > mask_argument:
            return (*args[:mask_argument], mask, *args[mask_argument + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": mask}

    def _enter_norm(self, boundary: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if boundary in self._boundaries:  # a family that also norms its embeddings comes by twice: the last counts
            self._states[boundary] = args[0]
