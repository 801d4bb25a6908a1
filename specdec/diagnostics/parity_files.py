"""The tensors that vLLM 0.32.0 reads from a drafter's directory, after its documented semantics; of a GGUF file, those
that llama.cpp does.

Written apart from the drafter; see :mod:`specdec.diagnostics.parity_reference`.

Legend: H width, V target vocabulary, D draft vocabulary.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.diagnostics import parity_gguf
from specdec.diagnostics.parity_quantized import read_quantized
from specdec.diagnostics.parity_settings import Misread, Settings, read_settings

MASK = "mask_hidden"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
MARKOV_1 = "markov_head.markov_w1.weight"
MARKOV_2 = "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj"
MAP = "d2t"
# The engine drops these tensors and reports nothing.
UNREAD = re.compile(r"t2d|rotary_emb\.inv_freq|\.bias$")
# A directory's config.json, and its tensors by name.
Files = tuple[dict[str, Any], dict[str, Tensor]]
Shape = tuple[int, ...]


class ServedDrafter(NamedTuple):
    """A drafter as the engine has it."""

    settings: Settings
    # by the file's names, with the target's embedding and head if need be
    weights: dict[str, Tensor]
    target_ids_D: Tensor  # int64, the target's token for each of the drafter's
    # the dtype to which the engine rounds what a module reads, token by token; empty without quantization
    rounded: Mapping[str, torch.dtype] = {}
    # the share by which activations are moved before they are rounded, to measure what that changes
    nudge: float = 0.0


def read_files(directory: Path) -> Files:
    """Read a directory without checking its contents; :class:`Misread` if it cannot be read."""
    if (directory / parity_gguf.FILE).is_file():
        return parity_gguf.gguf_files(directory / parity_gguf.FILE)
    try:
        raw = dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise Misread("config.json is missing or no JSON object") from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise Misread(f"{file.name} is damaged or cut off ({error})") from error
    if not tensors:
        raise Misread("there is no .safetensors file in it")
    return raw, tensors


def interpret(
    files: Files, method: str, embedding_VH: Tensor, head_VH: Tensor, layers: int
) -> ServedDrafter:
    """Return the drafter that an engine makes of a config and tensors with a target of this many layers.

    All weights get the dtype and device of the target's embedding.

    Raises:
        Misread: the engine would not load it, or not as what it was.
    """
    raw, stored = files
    settings = read_settings(raw, method)
    tensors, rounded = read_quantized(raw, stored, layers)
    sizes = {"vocab_size": settings.vocab_size, "target_hidden_size": settings.target_width}
    for (key, size), wanted in zip(sizes.items(), embedding_VH.shape, strict=True):
        if size != wanted:
            raise Misread(f"config.json: {key} is {size}, the target has {wanted}")
    ids = settings.aux_ids
    if ids and not 0 <= ids[0] <= ids[-1] <= layers:
        raise Misread(f"config.json names states {list(ids)} of a target with 0 to {layers}")
    weights = _checked_tensors(tensors, settings)
    shared = settings.hidden_size == settings.target_width
    if EMBEDDING not in weights and not shared:
        raise Misread(f"it lacks {EMBEDDING}, for which the target's is too wide or too narrow")
    drafts = settings.drafts
    if HEAD not in weights and not (shared and drafts == settings.vocab_size):
        raise Misread(
            f"it lacks {HEAD}: the engine would take the first {drafts} rows of the target's"
        )
    # d2t holds offsets from draft ids to target ids.
    ids_D = torch.arange(drafts) + weights.pop(MAP, torch.zeros(drafts)).long()
    outside = ((ids_D < 0) | (ids_D >= settings.vocab_size)).nonzero()
    if len(outside):
        draft = int(outside[0])
        raise Misread(
            f"d2t: draft token {draft} and its offset make {int(ids_D[draft])}, which is no token"
        )
    weights = {name: value.to(embedding_VH) for name, value in weights.items()}
    weights = {EMBEDDING: embedding_VH, HEAD: head_VH} | weights
    modules = {name.replace("midlayer.", "layers.0."): dtype for name, dtype in rounded.items()}
    return ServedDrafter(settings, weights, ids_D.to(embedding_VH.device), modules)


def _checked_tensors(tensors: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Return all tensors that the config needs and no other; the engine itself does not miss one."""
    wanted = _wanted_shapes(settings)
    # The target's embedding and head may stand in for these, and nothing reads the norms.
    H = settings.hidden_size
    optional: dict[str, Shape] = {EMBEDDING: (settings.vocab_size, H)}
    if settings.method != "eagle":
        optional[HEAD] = (settings.drafts, H)
        for i in range(1, settings.num_hidden_layers):
            optional[f"layers.{i}.hidden_norm.weight"] = (H,)
    checked = {}
    for stored_name, value in tensors.items():
        name = stored_name.replace("midlayer.", "layers.0.")
        if name not in wanted and UNREAD.search(name):
            continue
        if name == MASK:
            value = value.flatten()  # stored in any shape
        shape = (wanted | optional).get(name)
        if shape is None:
            raise Misread(f"{name}: the engine has no such tensor for this config and fails")
        if tuple(value.shape) != shape:
            raise Misread(f"{name} is {list(value.shape)}, the config says {list(shape)}")
        if not value.isfinite().all():
            raise Misread(f"{name} holds NaN or infinities")
        checked[name] = value
    if missing := next((name for name in wanted if name not in checked), None):
        left = "at ones" if "norm" in missing else "uninitialized"
        if missing == MAP:
            left = "at the first tokens"
        raise Misread(f"it lacks {missing}, which the engine leaves {left} without a word")
    return checked


def _wanted_shapes(settings: Settings) -> dict[str, Shape]:
    """Return every tensor's name and shape."""
    H = settings.hidden_size
    fused = settings.method != "eagle"
    block = settings.block_size > 0
    wanted: dict[str, Shape] = {}
    for i in range(settings.num_hidden_layers):
        layer = _layer_shapes(settings, 2 * H if fused and i == 0 and not block else H)
        if i or fused:
            layer["input_layernorm.weight"] = (H,)
        wanted |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not fused:
        return wanted | {"fc.weight": (H, 2 * H)}
    wanted |= {"norm.weight": (H,), f"{'' if block else 'layers.0.'}hidden_norm.weight": (H,)}
    width = settings.target_width
    states = len(settings.aux_ids)
    side_by_side = (states * width,)
    if states:
        wanted["fc.weight"] = (H, *side_by_side)
    if settings.fc_norm:
        wanted |= {f"fc_norm.{n}.weight": (width,) for n in range(states)}
    if settings.norm_before_fc:
        wanted["input_norm.weight"] = side_by_side
    if settings.mask_token is not None and not block:
        wanted[MASK] = side_by_side
    rank = settings.markov_rank
    if rank:
        wanted |= {MARKOV_1: (settings.vocab_size, rank), MARKOV_2: (settings.drafts, rank)}
    if settings.confidence:
        wanted |= {f"{CONFIDENCE}.weight": (1, H + rank), f"{CONFIDENCE}.bias": (1,)}
    if settings.drafts != settings.vocab_size:
        wanted[MAP] = (settings.drafts,)
    return wanted


def _layer_shapes(settings: Settings, input_size: int) -> dict[str, Shape]:
    """Return the names and shapes of one layer except its input norm."""
    H = settings.hidden_size
    inner = settings.intermediate_size
    queries = settings.num_attention_heads * settings.head
    keys = settings.num_key_value_heads * settings.head
    shapes: dict[str, Shape] = {
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
        "post_attention_layernorm.weight": (H,),
    }
    attention: dict[str, Shape] = {
        "q_proj": (queries, input_size),
        "k_proj": (keys, input_size),
        "v_proj": (keys, input_size),
        "o_proj": (H, queries),
    }
    if settings.latent:
        attention = _latent_shapes(settings, input_size)
    if settings.head_norms:
        attention |= {"q_norm": (settings.head,), "k_norm": (settings.head,)}
    for name, shape in attention.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if name[0] in settings.biased and name.endswith("_proj"):
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    return shapes


def _latent_shapes(settings: Settings, input_size: int) -> dict[str, Shape]:
    """Return the tensors of DeepSeek's attention."""
    q_rank, kv_rank, plain, turned, values = settings.latent
    h = settings.num_attention_heads
    return {
        "q_a_proj": (q_rank, input_size), "q_a_layernorm": (q_rank,), "q_b_proj": (h * (plain + turned), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + turned, input_size), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (h * (plain + values), kv_rank), "o_proj": (settings.hidden_size, h * values),
    }  # fmt: skip
