"""The attention of targets that run with ``sdpa``: PyTorch's own, except where a CPU meets few queries.

Legend: B batch, h query heads, g key heads, T queries, S keys, d head width.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdec.nn.few_queries import MOST, attend_few

NAME = "specdec"  # what the model's config then says in place of sdpa


def use_few_queries(model: PreTrainedModel) -> None:
    """Let a model whose decoder runs with ``sdpa`` attend as this file has it; others are left alone.

    Verification asks for few queries under a mask of its own, where PyTorch's kernel is slow in bfloat16 on a CPU.
    """
    if model.get_decoder().config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(B, h, T, d), twice (B, g, S, d) and an additive (B, 1, T, S), to (B, T, h, d)."""
    few = query.shape[2] <= MOST and query.device.type == "cpu" and not query.requires_grad
    if few and attention_mask is not None and attention_mask.is_floating_point():
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_few(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
