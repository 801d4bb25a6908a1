"""A drafter's ``config.json`` as vLLM 0.32.0 takes it: the keys it looks at, and what it assumes for absent ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.parity.reference.misread import Misread
from specdec.parity.reference.rotary import Rotary, rotary

Raw = Mapping[str, Any]

LLAMA3, QWEN3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}, {"Eagle3Qwen3ForCausalLM"}
CLASSES = {"eagle": {"EagleLlamaForCausalLM"}, "eagle3": LLAMA3 | QWEN3}
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps")
COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# what a config of the speculators library has at the top and hands on
HANDED_ON = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", IDS)


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
    eps: float
    aux_ids: tuple[int, ...]
    """States of the target, id i being the residual stream that enters layer i, ascending whatever the file says; the
    empty tuple is the state after the final norm."""
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    head_norms: bool
    biases: bool
    logit_scale: float
    windows: tuple[int | None, ...]
    rope: Rotary


def settings(raw: Raw, method: str) -> Settings:
    """Read a config.

    Args:
        method: ``eagle`` or ``eagle3``, as the command line says; the file does not.

    Raises:
        Misread: the engine would not load it so, or two of its releases or runners would read it differently.
    """
    config, found = _flat(raw), _class(raw, method)
    for key in (*SIZES, *COUNTS):
        if key not in config:
            raise Misread(f"config.json lacks {key}")
        if isinstance(config[key], bool) or not isinstance(config[key], int | float) or config[key] <= 0:
            raise Misread(f"config.json: {key} is {config[key]!r}, no positive number")
    return _settings(config, method, found)


def _settings(config: Raw, method: str, found: str) -> Settings:
    fused, width, heads = method == "eagle3", config["hidden_size"], config["num_attention_heads"]
    inner, head = config.get("eagle_config") or {}, config.get("head_dim") or width // heads
    if config.get("hidden_act", "silu") != "silu":
        raise Misread(f"config.json: hidden_act is {config['hidden_act']!r}, the engine's drafters have silu")
    vocab = config["vocab_size"]
    return Settings(
        method=method,
        vocab=vocab,
        drafts=(config.get("draft_vocab_size") or vocab) if fused else vocab,
        width=width,
        target_width=(config.get("target_hidden_size") or width) if fused else width,
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        groups=config["num_key_value_heads"],
        head=head,
        eps=config["rms_norm_eps"],
        aux_ids=_aux_ids(config, inner, found in QWEN3) if fused else (),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        head_norms=found in QWEN3,
        biases=bool(config.get("attention_bias", False) or config.get("bias", False)),
        logit_scale=config.get("logit_scale", 1.0),
        windows=_windows(config, fused),
        rope=rotary(config, head),
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
        known = name if whole else prefix + name
        if known in CLASSES[method]:
            return known
    raise Misread(f"config.json: architectures {named} name no class that the engine has for method {method}")


def _aux_ids(config: Raw, inner: Raw, qwen3: bool) -> tuple[int, ...]:
    if not inner.get("use_aux_hidden_state", True):
        raise Misread("config.json: eagle_config.use_aux_hidden_state is false, which is not compared here")
    named = config.get(IDS)
    if not named:
        raise Misread(f"config.json lacks {IDS} at the top: the engine's two runners would take different states")
    if not isinstance(named, list) or not all(isinstance(i, int) for i in named):
        raise Misread(f"config.json: {IDS} is {named!r}, no list of layers")
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
