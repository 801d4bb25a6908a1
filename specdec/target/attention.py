"""The attention of targets: their own, except where a CPU meets few queries (``sdpa``), and by pieces where there are
too many pairs of queries and keys for a mask.

Legend: B batch, h query heads, g key heads, T queries, S keys, d head width.
"""

import sys
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from specdec.nn.few_queries import MOST, additive, attend_few
from specdec.nn.pieces import Cut, attend_pieces

NAME, EAGER = "specdec", "specdec_eager"  # what the model's config then says in place of sdpa and eager


def use_own_attention(model: PreTrainedModel) -> None:
    """Let a model whose decoder runs with ``sdpa`` or ``eager`` attend as this file has it; others are left alone.

    Verification asks for few queries under a mask of its own, where PyTorch's kernel is slow in bfloat16 on a CPU.
    Long rows and prompts come with a cut in place of the mask.
    """
    decoder = model.get_decoder()
    config = decoder.config
    if config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    upcast = getattr(config, "reorder_and_upcast_attn", False)  # GPT-2 does that for the name eager alone
    if config._attn_implementation == "eager" and not upcast and hasattr(_family(decoder), "eager_attention_forward"):
        AttentionInterface.register(EAGER, _eager)
        AttentionMaskInterface.register(EAGER, eager_mask)
        model.set_attn_implementation(EAGER)


def attends_in_pieces(model: PreTrainedModel) -> bool:
    """Whether its layers take a cut in place of a mask."""
    return model.get_decoder().config._attn_implementation in (NAME, EAGER)


def _family(module: nn.Module) -> ModuleType:
    return sys.modules[type(module).__module__]


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Cut | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The family's own, which weighs all pairs of queries and keys that it is given."""
    own = _family(module).eager_attention_forward
    if not isinstance(attention_mask, Cut):
        return own(module, query, key, value, attention_mask, **kwargs)

    def one(q_1hRd: Tensor, k_1gKd: Tensor, v_1gKd: Tensor, mask_11RK: Tensor | None) -> Tensor:
        assert mask_11RK is not None
        return own(module, q_1hRd, k_1gKd, v_1gKd, additive(mask_11RK, q_1hRd.dtype), **kwargs)[0].transpose(1, 2)

    return attend_pieces(one, query, key, value, attention_mask.tiled()).transpose(1, 2).contiguous(), None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Cut | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, h, T, d), twice (B, g, S, d) and an additive (B, 1, T, S) or a cut, to (B, T, h, d)."""
    if isinstance(attention_mask, Cut):

        def one(q_1hRd: Tensor, k_1gKd: Tensor, v_1gKd: Tensor, mask_11RK: Tensor | None) -> Tensor:
            bias_11RK = None if mask_11RK is None else additive(mask_11RK, q_1hRd.dtype)
            own = {**kwargs, "scaling": scaling, "is_causal": mask_11RK is None}
            return sdpa_attention_forward(module, q_1hRd, k_1gKd, v_1gKd, bias_11RK, **own)[0].transpose(1, 2)

        return attend_pieces(one, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    few = query.shape[2] <= MOST and query.device.type == "cpu" and not query.requires_grad
    if few and attention_mask is not None and attention_mask.is_floating_point():
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_few(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
