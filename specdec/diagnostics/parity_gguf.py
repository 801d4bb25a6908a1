"""What llama.cpp reads from an exported GGUF file, as the settings and tensors of vLLM's layout.

Written apart from the exporter, after llama.cpp's ``src/models/eagle3.cpp``; see
:mod:`specdec.diagnostics.parity_reference`.

Legend: r rotated width of a head.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.diagnostics.parity_settings import IDS, Misread
from specdec.utils.extras import require

FILE = "drafter.gguf"
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}
PARTS = (
    (r"^blk\.0\.attn_norm\.", "layers.0.input_layernorm."),
    (r"^blk\.0\.attn_norm_2\.", "layers.0.hidden_norm."),
    (r"^blk\.0\.ffn_norm\.", "layers.0.post_attention_layernorm."),
    (r"^blk\.0\.attn_output\.", "layers.0.self_attn.o_proj."),
    (r"^blk\.0\.attn_([qkv])\.", r"layers.0.self_attn.\1_proj."),
    (r"^blk\.0\.ffn_(gate|up|down)\.", r"layers.0.mlp.\1_proj."),
    (r"^output_norm\.", "norm."),
    (r"^output\.", "lm_head."),
    (r"^token_embd\.", "embed_tokens."),
    (r"^enc\.output_norm\.", "input_norm."),
)


def gguf_files(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a config.json's keys and the tensors by vLLM's names; Misread if llama.cpp would not load the file."""
    require("gguf", "llama", f"{path.name}: a GGUF file")
    try:
        fields, stored = _contents(path)
        return _as_vllm(path.name, fields, stored)
    except Misread:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())
        raise Misread(f"{path.name}: not a GGUF file as llama.cpp reads it: {reason}") from error


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's fields and tensors by llama.cpp's names."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors: dict[str, Tensor] = {}
    for stored in reader.tensors:
        value = torch.from_numpy(stored.data.copy())
        if stored.tensor_type == gguf.GGMLQuantizationType.BF16:
            value = value.view(torch.bfloat16)
        tensors[stored.name] = value
    return fields, tensors


def _as_vllm(
    file: str, fields: dict[str, Any], stored: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return fields as a config.json's keys, and tensors by vLLM's names."""
    if fields.get("general.architecture") != "eagle3":
        raise Misread(f"{file}: its architecture is {fields.get('general.architecture')!r}")
    raw: dict[str, Any] = {}
    for key, name in SIZES.items():
        if f"eagle3.{name}" not in fields:
            raise Misread(f"{file} lacks eagle3.{name}")
        raw[key] = fields[f"eagle3.{name}"]
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    raw[IDS] = fields["eagle3.target_layers"]
    rope = {"rope_type": "default", "rope_theta": fields["eagle3.rope.freq_base"]}
    raw["rope_stretch"] = fields.get("eagle3.rope.scaling.attn_factor", 1.0)
    rotated = fields["eagle3.rope.dimension_count"]
    if rotated != raw["head_dim"]:
        rope["partial_rotary_factor"] = rotated / raw["head_dim"]
    raw["rope_parameters"] = rope
    tensors: dict[str, Tensor] = {}
    for name, value in stored.items():
        for pattern, replacement in PARTS:
            name = re.sub(pattern, replacement, name)
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            value = halves_apart(value, raw["head_dim"], rotated)
        tensors[name] = value
    if (factors_r := tensors.pop("rope_freqs.weight", None)) is not None:
        raw["rope_factors"] = factors_r.tolist()
    if "d2t" in tensors:  # here absolute ids, there offsets
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
        raw["draft_vocab_size"] = len(tensors["d2t"])
    return raw, tensors


def halves_apart(weight: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Return the rows in which neighbors are rotated together as rows that lie r / 2 apart, (heads * d, width)."""
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
