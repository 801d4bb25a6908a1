"""The settings that vLLM 0.32.0 reads from a drafter's ``config.json``, after its documented semantics.

Written apart from the drafter; see :mod:`specdec.diagnostics.parity_reference`.

Legend: r rotated width.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Raw = Mapping[str, Any]

LLAMA3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
QWEN3 = {"Eagle3Qwen3ForCausalLM"}
DEEPSEEK = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
DFLASH = {"DFlashDraftModel"}
DSPARK = {"Qwen3DSparkModel"}
CLASSES = {
    "eagle": {"EagleLlamaForCausalLM"},
    "eagle3": LLAMA3 | QWEN3 | DEEPSEEK,
    "dflash": DFLASH,
    "dspark": DSPARK,
}
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
         "num_hidden_layers", "num_attention_heads", "num_key_value_heads")  # fmt: skip
# A config of the speculators library passes these on from its top.
PASSED_ON = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", IDS)
OF_EAGLE3 = ("fc_norm", "norm_output")
OF_DSPARK = ("draft_vocab_size", "target_hidden_size", "mask_token_id", "markov_rank", "markov_head_type", "block_size",
             "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Misread(ValueError):  # noqa: N818  a verdict
    """The engine would refuse the directory, or read it as something else and report nothing."""


class Settings(NamedTuple):
    """The engine's reading of a config; the first eight fields have the config's own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    method: str
    drafts: int
    target_width: int
    head: int
    # Id i is the state that enters the target's layer i, ascending; () is the last state, normed.
    aux_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    head_norms: bool
    biased: str  # the attention's projections that have a bias, of q, k, v and o
    logit_scale: float
    windows: tuple[int | None, ...]
    rope: tuple[Tensor, float]  # see :func:`rotary`
    stretch: float  # factor on DeepSeek's scores, where yarn stretches its rope
    latent: tuple[int, ...]  # sizes of DeepSeek's attention, as in LATENT; () for grouped queries
    mask_token: int | None  # a parallel drafter reads it in place of tokens not known yet
    block_size: int  # nodes of a block drafter's pass, the root and its masks; else 0
    first_draft: int = 1  # the node of a block that makes the first draft
    markov_rank: int = 0  # of DSpark's head that reads the token before a draft
    confidence: bool = False  # whether DSpark's confidence head is there


def read_settings(raw: Raw, method: str) -> Settings:
    """Read a config.

    Raises:
        Misread: the engine would refuse it, or two of its releases or runners would read it differently.
    """
    config = _flat(raw)
    architecture = _architecture(config, method)
    _check_sizes(config)
    fused = method != "eagle"
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    latent: tuple[int, ...] = ()
    stretch = 1.0
    if architecture in DEEPSEEK:
        latent, stretch = _latent(config, architecture)
        head = latent[3]
    inner: Raw = config.get("eagle_config") or {}
    aux_ids: tuple[int, ...] = ()
    block: dict[str, Any] = {}
    if architecture in DFLASH:
        aux_ids = _block_ids(config)
        block = {"block_size": config["block_size"]}
    elif architecture in DSPARK:
        aux_ids, block = _markov_block(config)
    elif fused:
        aux_ids = _aux_ids(config, inner, architecture in QWEN3)
    return Settings(
        **{key: config[key] for key in SIZES},
        **{key: bool(config.get(key)) for key in ("norm_before_residual", *OF_EAGLE3)},
        method=method,
        drafts=(fused and config.get("draft_vocab_size")) or config["vocab_size"],
        target_width=(fused and config.get("target_hidden_size")) or config["hidden_size"],
        head=head,
        aux_ids=aux_ids,
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc"))),
        head_norms=architecture in QWEN3 | DFLASH | DSPARK,
        biased=_biased(config, architecture),
        logit_scale=config.get("logit_scale", 1.0),
        windows=_windows(config, fused),
        rope=rotary(config, head),
        stretch=stretch,
        latent=latent,
        mask_token=_mask_token(config),
        **({"block_size": 0} | block),
    )


def _check_sizes(config: Raw) -> None:
    for key in SIZES:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise Misread(f"config.json: {key} is {value!r}, no positive number")
    if config.get("hidden_act", "silu") != "silu":
        raise Misread(
            f"config.json: hidden_act is {config['hidden_act']!r}, the engine's drafters have silu"
        )
    if config.get("bias"):
        raise Misread(
            "config.json has a key bias, for which the engine leaves the attention's biases uninitialized"
        )


def _latent(config: Raw, architecture: str) -> tuple[tuple[int, ...], float]:
    """Return the sizes of DeepSeek's attention, and its factor on the scores.

    Raises:
        Misread: the config has what this class does not know.
    """
    latent = tuple(int(config.get(key) or 0) for key in LATENT)
    if not latent[0]:
        raise Misread(
            "config.json: q_lora_rank is nothing, and the engine looks for the queries' latent"
        )
    rope = _rope_block(config)
    yarn = rope["rope_type"] == "yarn"
    known = yarn or rope["rope_type"] == "default"
    if not known or not {"attention_factor", "truncate"}.isdisjoint(rope):
        raise Misread(f"config.json: the rope {rope}, of which this class makes DeepSeek's yarn")
    for key in ("norm_before_fc", "attention_bias", *MASK_IDS):
        if config.get(key):
            raise Misread(
                f"config.json: {key} is {config[key]!r}, which the class {architecture} does not know"
            )
    share = 0.1 * float((yarn and rope.get("mscale_all_dim")) or 0)
    return latent, (share * math.log(max(float(rope.get("factor") or 1), 1)) + 1) ** 2


def _flat(raw: Raw) -> Raw:
    """Return the keys that the drafter's class sees."""
    if "speculators_config" not in raw:
        if raw.get("model_type") not in ("llama", "qwen3", "kimi_k2", "deepseek_v2"):
            kinds = "llama, qwen3, kimi_k2 or deepseek_v2"
            raise Misread(
                f"config.json: model_type is {raw.get('model_type')!r}, the engine loads {kinds}"
            )
        return raw
    if "model_type" in raw:
        raise Misread(
            "config.json: a speculators config with a model_type at the top is not loaded"
        )
    layer = raw["transformer_layer_config"]
    kind = raw.get("speculators_model_type")
    if kind == "dspark":
        top = {key: raw[key] for key in OF_DSPARK if key in raw}
        top["sample_from_anchor"] = raw.get("sample_from_anchor", False)
        top["target_layer_ids"] = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
        return {**layer, **top, "architectures": ["Qwen3DSparkModel"]}
    if kind == "dflash":
        block = {
            "mask_token_id": raw["mask_token_id"],
            "causal": not raw.get("sliding_window_non_causal", True),
            "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
            "sample_from_anchor": raw.get("sample_from_anchor", False),
        }
        top = {
            key: raw.get(key) for key in ("draft_vocab_size", "target_hidden_size", "block_size")
        }
        return {**layer, **top, "dflash_config": block, "architectures": ["DFlashDraftModel"]}
    parallel = kind == "peagle"
    keys = PASSED_ON if parallel else PASSED_ON + OF_EAGLE3
    top = {key: raw[key] for key in keys if key in raw}
    if parallel:
        top["pard_token"] = raw["mask_token_id"]
    top["norm_before_residual"] = raw.get("norm_before_residual", not parallel)
    qwen3 = layer["model_type"] == "qwen3"
    return {**layer, **top, "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"]}


def _mask_token(config: Raw) -> int | None:
    """Return the first mask token that is there, in the order in which the engine looks for them."""
    inner = config.get("dflash_config") or {}
    if MASK_IDS[0] in inner:
        return int(inner[MASK_IDS[0]])
    return next((int(config[key]) for key in MASK_IDS if key in config), None)


def _architecture(config: Raw, method: str) -> str:
    """Return the first of the architectures that there is a class for, after the engine has rewritten the names."""
    names = config.get("architectures") or []
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3"}.get(method, "")
    for name in names:
        whole = name.startswith(prefix) or (method == "eagle3" and name.endswith(prefix))
        rewritten: str = name if whole else prefix + name
        if rewritten in CLASSES[method]:
            return rewritten
    raise Misread(
        f"config.json: architectures {names} name no class that the engine has for method {method}"
    )


def _biased(config: Raw, name: str) -> str:
    """Return the projections that the class of this name builds a bias for; EAGLE-1's alone reads ``qkv_bias``."""
    attention_bias = bool(config.get("attention_bias"))
    if name in QWEN3:
        return "qkv" * attention_bias
    if name in CLASSES["eagle"]:
        return "qkv" * bool(config.get("qkv_bias", attention_bias)) + "o" * attention_bias
    return "qkvo" * attention_bias


def _block_ids(config: Raw) -> tuple[int, ...]:
    """Return the ids of a block drafter, whose config counts layers' outputs; :class:`Misread` for another block."""
    inner: Raw = config.get("dflash_config") or {}
    others = [inner.get(key) for key in ("causal", "use_swa", "sample_from_anchor")]
    if any(others) or config.get("is_causal"):
        raise Misread(
            f"config.json: dflash_config {dict(inner)} is of a block that is not compared here"
        )
    if inner.get("mask_token_id") is None or not inner.get("target_layer_ids"):
        raise Misread("config.json: dflash_config lacks mask_token_id or target_layer_ids")
    if not isinstance(config.get("block_size"), int):
        raise Misread("config.json lacks block_size, the nodes that a pass was trained with")
    return tuple(i + 1 for i in inner["target_layer_ids"])


def _markov_block(config: Raw) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the ids of DSpark's block, whose config counts layers' outputs, and the settings of its block and heads.

    Raises:
        Misread: the engine's class would miss a key, or has no such head.
    """
    wanted = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank")
    if lacking := [key for key in wanted if config.get(key) is None]:
        raise Misread(f"config.json lacks {lacking[0]}, which the engine's class of DSpark reads")
    if config.get("markov_head_type", "vanilla") != "vanilla":
        raise Misread(
            f"config.json: markov_head_type is {config['markov_head_type']!r}, the engine runs the vanilla one"
        )
    if _is_causal(config) or config.get("is_neox_style", True) is not True:
        raise Misread("config.json: the engine would let a block's nodes see no later ones")
    confidence = bool(config.get("enable_confidence_head"))
    if confidence and not config.get("confidence_head_with_markov"):
        raise Misread(
            "config.json: the confidence head without the token before is not compared here"
        )
    settings = {
        "block_size": config["block_size"],
        "first_draft": 0 if config.get("sample_from_anchor", True) else 1,
        "markov_rank": config["markov_rank"],
        "confidence": confidence,
    }
    return tuple(i + 1 for i in config["target_layer_ids"]), settings


def _is_causal(config: Raw) -> bool:
    """Whether the engine lets no node of a block see later ones: by the config's word, or in a sliding layer."""
    says = config.get("is_causal")
    if says is None:
        says = (config.get("dflash_config") or {}).get("causal")
    if says is None:
        return "sliding_attention" in (config.get("layer_types") or [])
    return bool(says)


def _aux_ids(config: Raw, inner: Raw, qwen3: bool) -> tuple[int, ...]:
    if not inner.get("use_aux_hidden_state", True):
        return ()  # it reads the target's final state, as EAGLE-1 does
    ids = config.get(IDS)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise Misread(
            f"config.json: {IDS} is {ids!r}: the engine's two runners would take different states"
        )
    states = tuple(sorted(set(ids)))
    count = config.get("num_aux_hidden_states") or len(inner.get(IDS) or ()) or 3
    if qwen3:
        count = config.get("num_aux_layers") or len(ids)
    if count != len(states):
        raise Misread(
            f"config.json: {IDS} names {len(states)} states and fc is made for {count} (num_aux_hidden_states)"
        )
    return states


def _windows(config: Raw, fused: bool) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise Misread(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    if "sliding_attention" in kinds and not fused and "target_layer_count" not in config:
        raise Misread(
            "config.json: method eagle reads layer_types of the target's first layers and fails"
        )
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds
    )


def _rope_block(config: Raw) -> dict[str, Any]:
    """Return the rope's keys with its type; if a config has both spellings, ``rope_parameters`` wins."""
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_type": block.get("type", "default"), **block}


def rotary(config: Raw, head_dim: int) -> tuple[Tensor, float]:
    """Return the rope that a config names: inverse frequencies, (r / 2,) float32, and the factor on cosine and sine.

    The formulas are transformers'.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    block = _rope_block(config)
    theta = block.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise Misread("config.json lacks rope_theta")
    if block["rope_type"] == "default":
        share = float(
            block.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        )
        width = int(head_dim * share)
        steps_r = torch.arange(0, width, 2, dtype=torch.float32) / width
        # a GGUF file has these for every scaling
        factors_r = torch.tensor(config.get("rope_factors", 1.0))
        stretch = float(config.get("rope_stretch", 1.0))
        return 1.0 / (float(theta) ** steps_r * factors_r), stretch
    block["rope_theta"] = float(theta)
    longest = config["max_position_embeddings"]
    sizes = {"hidden_size": head_dim, "head_dim": head_dim, "num_attention_heads": 1}
    try:
        scaled = LlamaConfig(**sizes, max_position_embeddings=longest, rope_parameters=block)
        inverse, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](
            scaled, torch.device("cpu"), seq_len=longest
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Misread(
            f"config.json: no frequencies can be made of the rope {block}: {error!r}"
        ) from error
    return inverse, float(factor)
