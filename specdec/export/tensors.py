"""Tensors as papers and other repositories have them: their layout, one matrix for each projection, and their names.

Here queries, keys and values are one matrix, gate and up another, and the embedding's half of what reads embedding and
feature stands apart. Elsewhere each projection is one matrix and the embedding's half comes first in it. Both tables,
of blocks and of names, are read in both directions. So a tensor has three names: ours, of the drafter's state; the
published, of one matrix for each projection under our modules; and the checkpoint's, of the file.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafter import Concat, DrafterConfig, KVInjection

ALL = slice(None)
Raw = dict[str, Any]  # a table of JSON
Weights = dict[str, Tensor]
FIRST_ATTENTION = "layers.layers.0.attention"


class TensorBlock(NamedTuple):
    """``published[..., columns]`` and ``ours[rows]`` are the same numbers."""

    ours: str
    published: str
    rows: slice = ALL
    columns: slice = ALL


def to_published(ours: Weights, config: DrafterConfig) -> Weights:
    """Return one matrix for each projection, from a drafter's parameters or state; gradients flow back."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for block in blocks(ours, config):
        parts[block.published].append(ours[block.ours][block.rows])
    return _concatenated(parts, dim=-1)


def from_published(names: Iterable[str], weights: Weights, config: DrafterConfig) -> Weights:
    """Return a drafter's tensors ``names`` from published weights; the inverse of :func:`to_published`.

    Raises:
        ValueError: a weight is missing.
    """
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for block in blocks(names, config):
        if block.published not in weights:
            raise ValueError(f"the weights lack {block.published}")
        parts[block.ours].append(weights[block.published][..., block.columns])
    return _concatenated(parts, dim=0)


def _concatenated(parts: Mapping[str, list[Tensor]], dim: int) -> Weights:
    return {
        name: tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
        for name, tensors in parts.items()
    }


def blocks(names: Iterable[str], config: DrafterConfig) -> Iterator[TensorBlock]:
    """Yield the table's rows for the drafter's tensors ``names``.

    Blocks of one matrix come in the order of its rows or columns, the embedding's half before the feature's.
    """
    H = config.hidden_size
    # A matrix that reads [embedding, feature] is two matrices in the drafter.
    half = {
        "token_qkv_proj": slice(0, H),
        "qkv_proj": slice(H, 2 * H),
        "token_fc": slice(0, H),
        "feature_fc": slice(H, 2 * H),
    }
    projections = config.attention.projections(config)
    names = list(names)
    wide = "entry.token_qkv_proj.weight" in names
    # The embedding's half comes first, and so opens every matrix that it goes into.
    for name in sorted(names, key=lambda name: not name.startswith("entry.token_")):
        module, _, suffix = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in ("token_qkv_proj", "qkv_proj"):
            place = FIRST_ATTENTION if leaf == "token_qkv_proj" else parent
            is_half = wide and place == FIRST_ATTENTION and suffix == "weight"
            columns = half[leaf] if is_half else ALL
            for part, rows in _stacked(projections):
                yield TensorBlock(name, f"{place}.{part}.{suffix}", rows, columns)
        elif leaf == "gate_up_proj":
            for part, rows in _stacked(
                {"gate": config.intermediate_size, "up": config.intermediate_size}
            ):
                yield TensorBlock(name, f"{parent}.{part}_proj.weight", rows)
        elif leaf in ("token_fc", "feature_fc") and suffix == "weight":
            yield TensorBlock(name, f"{parent}.fc.weight", columns=half[leaf])
        else:
            place = name.replace("feature_fc.bias", "fc.bias").replace(
                ".attention.norm.", ".attention."
            )
            yield TensorBlock(name, place)


def _stacked(sizes: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    start = 0
    for part, size in sizes.items():
        yield part, slice(start, start + size)
        start += size


MASK = "mask_hidden.weight"  # P-EAGLE's learned state, whose published name has no second half
# FP8 dtypes, and the names that safetensors has for them.
FP8 = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
MAPS = DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"

# The parts of a layer, after `layers.layers.{i}.` and `layers.{i}.`.
ATTENTION = [
    "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
    "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
]  # fmt: skip
LAYER = {
    **{f"attention.{part}": f"self_attn.{part}" for part in ATTENTION},
    "post_attention_norm": "post_attention_layernorm",
    **{f"mlp.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
ELSEWHERE = {
    "embed_tokens": "embed_tokens",
    "norms.aux": "input_norm",
    "norms.embed": "layers.0.input_layernorm",
    "norms.hidden": "layers.0.hidden_norm",
    "norms.output": "norm",
    "lm_head": "lm_head",
    "recurrence.hidden": "mask_hidden",
    "recurrence.previous": "markov_head.markov_w1",
    "recurrence.transition": "markov_head.markov_w2",
    "recurrence.confidence": "confidence_head.proj",
}

# Spellings of others for the same names.
SPELLINGS = (
    (r"^(model\.)+", ""),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),  # NVIDIA's of several layers
    (r"^midlayer\.", "layers.0."),
    (r"^mask_hidden$", MASK),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)


def name_table(config: DrafterConfig) -> dict[str, str]:
    """Return the checkpoint's name by published name (see :func:`to_published`), for every module that may be there."""
    fc = "fusion.fc" if isinstance(config.fusion, Concat) else "entry.fc"
    rows = ELSEWHERE | {fc: "fc"}
    rows |= {f"norms.aux.{n}": f"fc_norm.{n}" for n in range(len(config.aux_layers))}
    rows |= {"norms.hidden": "hidden_norm"} if isinstance(config.entry, KVInjection) else {}
    # The number of the first layer whose input norm is its own.
    first = 0 if isinstance(config.entry, KVInjection) else 1
    for i in range(config.num_layers):
        for module, checkpoint_module in LAYER.items():
            rows[f"layers.layers.{i}.{module}"] = f"layers.{i}.{checkpoint_module}"
        if i >= first:
            rows[f"layers.input_norms.{i - first}"] = f"layers.{i}.input_layernorm"
    return rows


def translate(name: str, names: Mapping[str, str]) -> str | None:
    """Return a tensor's name by the table or its inverse; None if it has none."""
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}" if module in names else None


def fp8_block(raw: Raw) -> tuple[int, int]:
    """Return the rows and columns that share a scale by a ``config.json``, DeepSeek's 128 by 128 if it has none.

    Raises:
        ValueError: it names no two whole numbers.
    """
    quantization = _mapping(raw.get("quantization_config"))
    block = quantization.get("weight_block_size")
    for group in _mapping(quantization.get("config_groups")).values():  # compressed-tensors
        block = block or _mapping(_mapping(group).get("weights")).get("block_structure")
    block = block or [128, 128]
    whole = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not whole or len(block) != 2:
        raise ValueError(
            f"quantization_config: a block is {block!r:.60}, wanted two whole numbers above 0"
        )
    return block[0], block[1]


def _mapping(value: Any) -> Raw:
    return value if isinstance(value, dict) else {}


def dequantized(tensors: Weights, block: tuple[int, int] = (128, 128)) -> Weights:
    """Return weights of eight bits times their scales, and the other tensors as they are.

    Scales are those of DeepSeek (https://arxiv.org/abs/2412.19437), one for each block, ``weight_scale_inv``, whose
    products are bfloat16; or of compressed-tensors, one for each row or for all, ``weight_scale``, whose products have
    the scale's dtype, as that library makes them. Int8 weights have scales of the second kind, and no zero points.

    Args:
        block: rows and columns of a block.

    Raises:
        ValueError: a weight's scales are missing, or do not fit its shape.
    """
    # Scales of activations have no use here.
    plain = {name: value for name, value in tensors.items() if not name.endswith(".input_scale")}
    for name in in_eight_bits(plain):
        weight = plain[name]
        of_blocks = plain.pop(f"{name}_scale_inv", None)
        scale = plain.pop(f"{name}_scale", None) if of_blocks is None else of_blocks
        if scale is None or weight.ndim != 2:
            kind = str(weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is {kind} of shape {list(weight.shape)}, without {name}_scale_inv or {name}_scale"
            )
        dtype = torch.bfloat16 if of_blocks is not None else scale.dtype
        try:
            scale = _spread_scale(scale.float(), weight, block)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        plain[name] = (weight.float() * scale).to(dtype)
    return plain


def in_eight_bits(tensors: Weights) -> list[str]:
    """Return the names of the matrices that stand for numbers by a scale; a vocabulary map of int8 is none of them."""
    return [
        name
        for name, value in tensors.items()
        if value.dtype in FP8 or (value.dtype == torch.int8 and name.endswith(".weight"))
    ]


def _spread_scale(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the scales of a weight's blocks, of its rows or of all of it, in a shape that multiplies the weight."""
    rows, columns = weight.shape
    block_rows, block_columns = block
    if list(scale.shape) == [-(-rows // block_rows), -(-columns // block_columns)]:
        scale = scale.repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)
        return scale[:rows, :columns]
    if list(scale.shape) in ([rows], [rows, 1]):
        return scale.reshape(-1, 1)
    if scale.numel() > 1:
        raise ValueError(
            f"scales of shape {list(scale.shape)} fit neither its rows nor its blocks of {block}"
        )
    return scale


def normalize_name(name: str) -> str | None:
    """Return a checkpoint's name in the spelling of the table; None for a tensor without information."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return name
