"""What a GGUF file of a drafter holds for llama.cpp, by the kind of drafter: fields and names of tensors.

Fields and tensors are those that llama.cpp's ``src/models/eagle3.cpp`` and ``dflash.cpp`` read
(https://github.com/ggml-org/llama.cpp); DSpark is a DFlash file with two more heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.drafter import DrafterConfig

Fields = dict[str, Any]


class GgufLayout(NamedTuple):
    """One kind of drafter."""

    architecture: str  # prefix of its fields
    neighbors: bool  # whether rope turns neighboring channels; else those half a head apart
    fields: Callable[[DrafterConfig], Fields]  # beyond the sizes, without the prefix
    # llama.cpp's name of each tensor of vLLM's format
    names: Callable[[DrafterConfig], dict[str, str]]


LAYER = {
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
EVERYWHERE = {
    "fc.weight": "fc.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _eagle3_fields(config: DrafterConfig) -> Fields:
    return {
        "target_layers": list(config.aux_layers),
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norms.residual == "normed",
        "norm_before_fc": config.norms.aux == "concat",
    }


def _eagle3_names(config: DrafterConfig) -> dict[str, str]:
    layer = {f"midlayer.{name}": f"blk.0.{stored}" for name, stored in LAYER.items()}
    return EVERYWHERE | layer | {
        "input_norm.weight": "enc.output_norm.weight",
        "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }  # fmt: skip


def _block_fields(config: DrafterConfig) -> Fields:
    """Return the fields of DFlash."""
    return {
        "target_layers": list(config.aux_layers),
        "block_size": 1 + config.drafting.masks,  # type: ignore[attr-defined]  # the root and its masks
        "attention.causal": False,
    }


def _markov_fields(config: DrafterConfig) -> Fields:
    """Return the fields of DSpark."""
    return _block_fields(config) | {
        "sample_from_anchor": config.recurrence.root_drafts,  # type: ignore[attr-defined]
        "has_confidence_head": config.drafting.has_confidence,
    }


def _block_names(config: DrafterConfig) -> dict[str, str]:
    names = EVERYWHERE | {
        "hidden_norm.weight": "enc.output_norm.weight",
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "conf_proj.weight",
        "confidence_head.proj.bias": "conf_proj.bias",
    }
    of_layer = LAYER | {
        "input_layernorm.weight": "attn_norm.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
    }
    for i in range(config.num_layers):
        names |= {f"layers.{i}.{name}": f"blk.{i}.{stored}" for name, stored in of_layer.items()}
    return names


LAYOUTS = {  # by the engines' name of the drafter's kind
    "eagle3": GgufLayout("eagle3", True, _eagle3_fields, _eagle3_names),
    "dflash": GgufLayout("dflash", False, _block_fields, _block_names),
    "dspark": GgufLayout("dflash", False, _markov_fields, _block_names),
}
ARCHITECTURES = {layout.architecture for layout in LAYOUTS.values()}


def layout_of(config: DrafterConfig) -> GgufLayout:
    """Return the layout of a drafter that llama.cpp serves."""
    return LAYOUTS[config.drafting.engine_method or "eagle3"]
