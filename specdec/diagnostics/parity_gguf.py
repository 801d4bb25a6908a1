"""What llama.cpp reads from an exported GGUF file, as the settings and tensors of vLLM's layout.

Written apart from the exporter, after llama.cpp's ``src/models/eagle3.cpp`` and ``dflash.cpp``; see
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
}
OF_EAGLE3 = ("target_hidden_size", "norm_before_residual", "norm_before_fc")
PARTS = (
    (r"^blk\.(\d+)\.attn_norm\.", r"layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.attn_norm_2\.", r"layers.\1.hidden_norm."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.attn_output\.", r"layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.attn_([qk])_norm\.", r"layers.\1.self_attn.\2_norm."),
    (r"^blk\.(\d+)\.attn_([qkv])\.", r"layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"layers.\1.mlp.\2_proj."),
    (r"^output_norm\.", "norm."),
    (r"^output\.", "lm_head."),
    (r"^token_embd\.", "embed_tokens."),
    (r"^markov_w([12])\.", r"markov_head.markov_w\1."),
    (r"^conf_proj\.", "confidence_head.proj."),
)
ENCODER_NORM = "enc.output_norm.weight"  # EAGLE-3's before fc, DFlash's behind it


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
    kind = fields.get("general.architecture")
    if kind not in ("eagle3", "dflash"):
        raise Misread(f"{file}: its architecture is {kind!r}")
    raw: dict[str, Any] = {}
    switches = {key: key for key in OF_EAGLE3} if kind == "eagle3" else {}
    for key, name in (SIZES | switches).items():
        if f"{kind}.{name}" not in fields:
            raise Misread(f"{file} lacks {kind}.{name}")
        raw[key] = fields[f"{kind}.{name}"]
    stored = dict(stored)
    norm = stored.pop(ENCODER_NORM, None)
    if kind == "dflash":
        raw |= _block_keys(fields, stored)
        norm_name = "hidden_norm.weight"
    else:
        raw |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        raw[IDS] = fields["eagle3.target_layers"]
        norm_name = "input_norm.weight"
    rope = {"rope_type": "default", "rope_theta": fields[f"{kind}.rope.freq_base"]}
    raw["rope_stretch"] = fields.get(f"{kind}.rope.scaling.attn_factor", 1.0)
    rotated = fields[f"{kind}.rope.dimension_count"]
    if rotated != raw["head_dim"]:
        rope["partial_rotary_factor"] = rotated / raw["head_dim"]
    raw["rope_parameters"] = rope
    tensors: dict[str, Tensor] = {} if norm is None else {norm_name: norm}
    for name, value in stored.items():
        for pattern, replacement in PARTS:
            name = re.sub(pattern, replacement, name)
        if kind == "eagle3" and name.endswith((".q_proj.weight", ".k_proj.weight")):
            value = halves_apart(value, raw["head_dim"], rotated)
        tensors[name] = value
    if (factors_r := tensors.pop("rope_freqs.weight", None)) is not None:
        raw["rope_factors"] = factors_r.tolist()
    if "d2t" in tensors:  # here absolute ids, there offsets
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
        raw["draft_vocab_size"] = len(tensors["d2t"])
    return raw, tensors


def _block_keys(fields: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, Any]:
    """Return the keys of DFlash's block, or of DSpark's with its heads, which the file's tensors tell apart."""
    mask = fields["tokenizer.ggml.mask_token_id"]
    outputs = [boundary - 1 for boundary in fields["dflash.target_layers"]]
    keys = {"model_type": "qwen3", "block_size": fields["dflash.block_size"]}
    if "markov_w1.weight" not in stored:
        causal = fields["dflash.attention.causal"]
        block = {"mask_token_id": mask, "target_layer_ids": outputs, "causal": causal}
        return keys | {"architectures": ["DFlashDraftModel"], "dflash_config": block}
    confidence = fields["dflash.has_confidence_head"]
    return keys | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": mask,
        "target_layer_ids": outputs,
        "markov_rank": stored["markov_w1.weight"].shape[1],
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence,
        "sample_from_anchor": fields["dflash.sample_from_anchor"],
        "is_causal": fields.get("dflash.attention.causal", False),
    }


def halves_apart(weight: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Return the rows in which neighbors are rotated together as rows that lie r / 2 apart, (heads * d, width)."""
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
