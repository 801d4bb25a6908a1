"""A drafter's directory as vLLM 0.32.0 loads it: its ``config.json``, what is assumed for absent keys, its tensors.

Legend: V target vocabulary, D draft vocabulary, H width.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

Raw = Mapping[str, Any]

LLAMA3, QWEN3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}, {"Eagle3Qwen3ForCausalLM"}
CLASSES = {"eagle": {"EagleLlamaForCausalLM"}, "eagle3": LLAMA3 | QWEN3}
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = {
    "vocab_size": "vocab", "hidden_size": "width", "intermediate_size": "inner", "max_position_embeddings": "longest",
    "rms_norm_eps": "eps", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "groups",
}  # fmt: skip
# what a config of the speculators library has at the top and hands on
HANDED_ON = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", IDS)
EMBEDDING, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "d2t"


class Misread(ValueError):  # noqa: N818  a verdict
    """The engine would refuse the directory, or take it for something else without a word."""


class Rotary(NamedTuple):
    """How fast every pair of channels turns."""

    inverse: Tensor  # (rotated width / 2,) float32
    factor: float  # on cosine and sine


class Settings(NamedTuple):
    """What the engine makes of a config."""

    method: str
    vocab: int
    drafts: int
    width: int
    target_width: int
    inner: int
    layers: int
    heads: int
    groups: int
    head: int
    longest: int
    eps: float
    aux_ids: tuple[int, ...]  # id i is the state that enters the target's layer i, ascending; () the last, normed
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    head_norms: bool
    biases: bool
    logit_scale: float
    windows: tuple[int | None, ...]
    rope: Rotary


class ServedDrafter(NamedTuple):
    """A drafter as the engine has it."""

    settings: Settings
    weights: dict[str, Tensor]  # by the file's names; embedding and head are there, whosever they are
    target_ids_D: Tensor  # int64, the target's token for each of the drafter's


def load(directory: Path, method: str, embedding_VH: Tensor, head_VH: Tensor) -> ServedDrafter:
    """Load a directory beside a target, whose embedding has the dtype and device that all weights get.

    Raises:
        Misread: the engine would not load it, or not as what it was.
    """
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Misread("config.json is missing or no JSON") from error
    if not isinstance(raw, dict):
        raise Misread("config.json is no JSON object")
    read = settings(raw, method)
    told = {"vocab_size": read.vocab, "target_hidden_size": read.target_width}
    for (key, size), wanted in zip(told.items(), embedding_VH.shape, strict=True):
        if size != wanted:
            raise Misread(f"config.json: {key} is {size}, the target has {wanted}")
    found = _tensors(directory, read)
    _check(found, read)
    shared = read.width == read.target_width
    if EMBEDDING not in found and not shared:
        raise Misread(f"it lacks {EMBEDDING}, for which the target's is too wide or too narrow")
    if HEAD not in found and not (shared and read.drafts == read.vocab):
        raise Misread(f"it lacks {HEAD}: the engine would take the first {read.drafts} rows of the target's")
    # a draft token's own number plus its offset
    ids_D = torch.arange(read.drafts) + found.pop(MAP, torch.zeros(read.drafts)).to(torch.int64)
    if len(outside := ((ids_D < 0) | (ids_D >= read.vocab)).nonzero()):
        draft = int(outside[0])
        raise Misread(f"d2t: draft token {draft} and its offset make {int(ids_D[draft])}, which is no token")
    weights = {EMBEDDING: embedding_VH, HEAD: head_VH} | {name: x.to(embedding_VH) for name, x in found.items()}
    return ServedDrafter(read, weights, ids_D.to(embedding_VH.device))


def settings(raw: Raw, method: str) -> Settings:
    """Read a config.

    Raises:
        Misread: the engine would not load it so, or two of its releases or runners would read it differently.
    """
    config, found, fused = _flat(raw), _class(raw, method), method == "eagle3"
    for key in SIZES:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise Misread(f"config.json: {key} is {value!r}, no positive number")
    if config.get("hidden_act", "silu") != "silu":
        raise Misread(f"config.json: hidden_act is {config['hidden_act']!r}, the engine's drafters have silu")
    sizes: Raw = {field: config[key] for key, field in SIZES.items()}
    switches: Raw = {key: bool(config.get(key, False)) for key in ("norm_before_residual", "fc_norm", "norm_output")}
    inner, head = config.get("eagle_config") or {}, config.get("head_dim") or sizes["width"] // sizes["heads"]
    return Settings(
        method=method,
        drafts=(fused and config.get("draft_vocab_size")) or sizes["vocab"],
        target_width=(fused and config.get("target_hidden_size")) or sizes["width"],
        head=head,
        aux_ids=_aux_ids(config, inner, found in QWEN3) if fused else (),
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        head_norms=found in QWEN3,
        biases=bool(config.get("attention_bias", False) or config.get("bias", False)),
        logit_scale=config.get("logit_scale", 1.0),
        windows=_windows(config, fused),
        rope=rotary(config, head),
        **sizes,
        **switches,
    )


def _flat(raw: Raw) -> Raw:
    """The keys that the drafter's class sees."""
    if "speculators_config" not in raw:
        if raw.get("model_type") not in ("llama", "qwen3"):
            raise Misread(f"config.json: model_type is {raw.get('model_type')!r}, the engine loads llama or qwen3")
        return raw
    if "model_type" in raw:
        raise Misread("config.json: a speculators config with a model_type at the top is not loaded")
    handed = {key: raw[key] for key in HANDED_ON if key in raw}
    return {**raw["transformer_layer_config"], **handed, "norm_before_residual": raw.get("norm_before_residual", True)}


def _class(raw: Raw, method: str) -> str:
    """The first of the architectures that there is a class for, after the engine has rewritten the names."""
    named = raw.get("architectures") or []
    if "speculators_config" in raw:
        named = ["Qwen3ForCausalLM" if raw["transformer_layer_config"]["model_type"] == "qwen3" else "LlamaForCausalLM"]
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3"}[method]
    for name in named:
        whole = name.startswith(prefix) or (method == "eagle3" and name.endswith(prefix))
        if (known := name if whole else prefix + name) in CLASSES[method]:
            return known
    raise Misread(f"config.json: architectures {named} name no class that the engine has for method {method}")


def _aux_ids(config: Raw, inner: Raw, qwen3: bool) -> tuple[int, ...]:
    if not inner.get("use_aux_hidden_state", True):
        raise Misread("config.json: eagle_config.use_aux_hidden_state is false, which is not compared here")
    named = config.get(IDS)
    if not isinstance(named, list) or not named or not all(isinstance(i, int) for i in named):
        raise Misread(f"config.json: {IDS} is {named!r}: the engine's two runners would take different states")
    ids = tuple(sorted(set(named)))
    told = config.get("num_aux_hidden_states") or len(inner.get(IDS) or ()) or 3
    if qwen3:
        told = config.get("num_aux_layers") or len(named)
    if told != len(ids):
        raise Misread(f"config.json: {IDS} names {len(ids)} states and fc is made for {told} (num_aux_hidden_states)")
    return ids


def _windows(config: Raw, fused: bool) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise Misread(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    if "sliding_attention" in kinds and not fused:
        raise Misread("config.json: method eagle reads layer_types of the target's first layers and fails")
    return tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def rotary(config: Raw, head_dim: int) -> Rotary:
    """The rope that a config names; where both spellings stand, ``rope_parameters`` wins.

    Raises:
        Misread: it names no ``rope_theta``, or a scaling that transformers, whose formulas engines follow, has not.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    old = config.get("rope_scaling") or {}
    block = dict(config.get("rope_parameters") or {"rope_type": old.get("type", "default"), **old})
    theta = block.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise Misread("config.json lacks rope_theta")
    if block.get("rope_type", "default") == "default":
        share = float(block.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
        width = int(head_dim * share)
        return Rotary(1.0 / (float(theta) ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0)
    block["rope_theta"], longest = float(theta), config["max_position_embeddings"]
    sizes = {"hidden_size": head_dim, "head_dim": head_dim, "num_attention_heads": 1}
    try:
        scaled = LlamaConfig(**sizes, max_position_embeddings=longest, rope_parameters=block)
        inverse, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](scaled, torch.device("cpu"), seq_len=longest)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Misread(f"config.json: no frequencies can be made of the rope {block}: {error!r}") from error
    return Rotary(inverse, float(factor))


def _tensors(directory: Path, read: Settings) -> dict[str, Tensor]:
    """What the engine looks for a place for; the names left out here it drops without a word."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            found |= load_file(file)
        except SafetensorError as error:
            raise Misread(f"{file.name} is damaged or cut off ({error})") from error
    if not found:
        raise Misread("there is no .safetensors file in it")
    unread = re.compile(r"t2d|rotary_emb\.inv_freq" + ("" if read.biases else r"|\.bias$"))
    return {name.replace("midlayer.", "layers.0."): x for name, x in found.items() if not unread.search(name)}


def _check(found: Mapping[str, Tensor], read: Settings) -> None:
    """Check that a file has all tensors of its config and no other.

    The engine itself does not miss a tensor: a norm stays at ones, a matrix is whatever lay in memory, and without
    ``d2t`` the draft tokens are the first of the vocabulary.
    """
    wanted = dict(_wanted(read))
    # the target's stand in for these, or nothing reads them
    optional: dict[str, tuple[int, ...]] = {EMBEDDING: (read.vocab, read.width)}
    if read.method == "eagle3":
        optional |= {HEAD: (read.drafts, read.width)}
        optional |= {f"layers.{i}.hidden_norm.weight": (read.width,) for i in range(1, read.layers)}
    for name, value in found.items():
        if (shape := (wanted | optional).get(name)) is None:
            raise Misread(f"{name}: the engine has no such tensor for this config and fails")
        if tuple(value.shape) != shape:
            raise Misread(f"{name} is {list(value.shape)}, the config says {list(shape)}")
        if not bool(value.isfinite().all()):
            raise Misread(f"{name} holds NaN or infinities")
    for name in (name for name in wanted if name not in found):
        left = "at the first tokens" if name == MAP else "at ones" if "norm" in name else "uninitialised"
        raise Misread(f"it lacks {name}, which the engine leaves {left} without a word")


def _wanted(read: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, n, fused = read.width, len(read.aux_ids), read.method == "eagle3"
    queries, keys = read.heads * read.head, read.groups * read.head
    for i in range(read.layers):
        at, into = f"layers.{i}.", 2 * H if fused and i == 0 else H
        for name, shape in {"q": (queries, into), "k": (keys, into), "v": (keys, into), "o": (H, queries)}.items():
            yield f"{at}self_attn.{name}_proj.weight", shape
            if read.biases:
                yield f"{at}self_attn.{name}_proj.bias", shape[:1]
        if read.head_norms:
            yield from ((f"{at}self_attn.{name}_norm.weight", (read.head,)) for name in "qk")
        for name, shape in {"gate": (read.inner, H), "up": (read.inner, H), "down": (H, read.inner)}.items():
            yield f"{at}mlp.{name}_proj.weight", shape
        yield f"{at}post_attention_layernorm.weight", (H,)
        if i or fused:
            yield f"{at}input_layernorm.weight", (H,)
    yield "fc.weight", (H, n * read.target_width if fused else 2 * H)
    if not fused:
        return
    yield from (("layers.0.hidden_norm.weight", (H,)), ("norm.weight", (H,)))
    if read.fc_norm:
        yield from ((f"fc_norm.{index}.weight", (read.target_width,)) for index in range(n))
    if read.norm_before_fc:
        yield "input_norm.weight", (n * read.target_width,)
    if read.drafts != read.vocab:
        yield MAP, (read.drafts,)
