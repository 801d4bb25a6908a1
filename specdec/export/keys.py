"""The keys of a checkpoint's ``config.json``: one table for each method, read in both directions.

A row writes a key from a drafter's config, and reads the fields that the key decides. Rows that decide none are
implied by others; engines need them all the same. The tables are flat: a format may nest them.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen3Config

from specdec.drafter import (
    GQA,
    MLA,
    DrafterConfig,
    MaskConstant,
    PostNorm,
)
from specdec.export.block_keys import MASKS, dflash_config, mask_token, read_block, read_markov
from specdec.export.tensors import Raw
from specdec.nn.rope import rope_parameters
from specdec.utils.numbers import MOST_LAYERS

IDS = "eagle_aux_hidden_state_layer_ids"
# The name of IDS in the DFlash checkpoints of speculators.
AUX = "aux_hidden_state_layer_ids"
FULL = "full_attention"
SLIDING = "sliding_attention"
UNBOUNDED = 2**30  # a window longer than any text; sums of it and positions stay in 32 bits
# vLLM subtracts this from a layer's number before it looks into layer_types.
TARGET_LAYERS = "target_layer_count"
# No engine reads this key of a rope block; it makes the block differ from the target's.
OWNER = "owner"


class KeyRow(NamedTuple):
    """One key: how it is written, and which fields it decides when it is read."""

    key: str
    write: Callable[[DrafterConfig], Any]
    read: Callable[[Raw, Any], Raw] | None = None
    """Return the fields that the file and transformers' config of it decide, those of the norms as ``norms.aux``."""


def _copied(key: str, field: str | None = None) -> KeyRow:
    """Return the row of a number that means the same on both sides. If it is absent, transformers' default is read."""
    field = field or key

    def read(raw: Raw, hf: Any) -> Raw:
        value = getattr(hf, key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{key} is {value!r}, wanted a number above 0")
        return {field: value}

    return KeyRow(key, lambda config: getattr(config, field), read)


def _defaults_to(key: str, other: str) -> KeyRow:
    """Return the row of a number that equals another key's if it is absent."""

    def read(raw: Raw, hf: Any) -> Raw:
        value = getattr(hf, key, None)
        return {key: getattr(hf, other) if value is None else value}

    return _copied(key)._replace(read=read)


def _flag(key: str, field: str, on: Any, *spellings: str) -> KeyRow:
    """Return the row of a flag that is true if the field has the value ``on``. Engines read an absent one as false."""

    def write(config: DrafterConfig) -> bool:
        return bool(operator.attrgetter(field)(config) == on)

    def read(raw: Raw, hf: Any) -> Raw:
        nested = raw.get("eagle_config") or {}
        names = (key, *spellings)
        values = [table[name] for table in (nested, raw) for name in names if name in table]
        if odd := [value for value in values if not isinstance(value, bool | None)]:
            raise ValueError(f"{key} is {odd[0]!r}, wanted true or false")
        return {field: on} if values and values[0] else {}

    return KeyRow(key, write, read)


def _constant(key: str, value: Any) -> KeyRow:
    """Return the row of a key that has one value in all drafters here."""

    def read(raw: Raw, hf: Any) -> Raw:
        if raw.get(key, value) != value:
            raise ValueError(f"{key} is {raw[key]!r}; drafters here have {value!r} only")
        return {}

    return KeyRow(key, lambda config: value, read)


def _attention_bias(raw: Raw, hf: Any) -> Raw:
    """Read ``qkv_bias``, which adds biases to queries, keys and values, and ``attention_bias``, to the output too."""
    flags = {key: raw.get(key) for key in ("attention_bias", "qkv_bias")}
    if odd := [key for key, value in flags.items() if not isinstance(value, bool | None)]:
        raise ValueError(f"{odd[0]} is {flags[odd[0]]!r}, wanted true or false")
    if flags["attention_bias"] and flags["qkv_bias"] is False:
        raise ValueError(
            "attention_bias is true and qkv_bias false; drafters here have no bias on the output alone"
        )
    if flags["attention_bias"]:
        return {"attention_bias": True}
    return {"attention_bias": "qkv" if flags["qkv_bias"] else False}


def _logit_scale(raw: Raw, hf: Any) -> Raw:
    value = raw.get("logit_scale", 1.0)
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"logit_scale is {value!r}, wanted a number above 0")
    return {"logit_scale": float(value)}


def _window(raw: Raw, hf: Any) -> Raw:
    kinds = set(raw.get("layer_types") or [FULL])
    if kinds == {FULL}:
        return {"attention_window": "full"}
    if kinds != {SLIDING}:
        raise ValueError(
            f"layer_types are {sorted(kinds)}; drafters here have one kind for all layers"
        )
    window = raw.get("sliding_window")
    return {"attention_window": "full" if window == UNBOUNDED else window}


def _mask(raw: Raw, hf: Any) -> Raw:
    token = mask_token(raw)
    return {} if token is None else {"recurrence": MaskConstant(token)}


def _eagle_config(config: DrafterConfig) -> Raw:
    """Return EAGLE-3's block. It names no ids if the drafter reads the last state or the embeddings, boundary 0, which
    are no layer's output."""
    if not config.fusion.mixes:
        return {"use_aux_hidden_state": False}
    ids = {IDS: [b - 1 for b in config.aux_layers]} if config.aux_layers[0] else {}
    return {"use_aux_hidden_state": True, **ids}


# The sizes of MLA.
RANKS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _latent(raw: Raw, hf: Any) -> Raw:
    """Read MLA's sizes, of which the first may be null."""
    if raw.get("kv_lora_rank") is None:
        return {"attention": GQA()}
    sizes = {key: raw.get(key) or 0 for key in RANKS}
    if odd := [key for key, size in sizes.items() if type(size) is not int]:
        raise ValueError(f"{odd[0]} is {sizes[odd[0]]!r}, wanted a whole number")
    attention = MLA(**sizes)
    return {"attention": attention, **attention.heads(hf)._asdict()}


COMMON = (
    KeyRow("model_type", lambda c: "qwen3" if c.norms.query_key else "llama"),
    _copied("vocab_size"),
    _copied("hidden_size"),
    _copied("intermediate_size"),
    _copied("num_hidden_layers", "num_layers"),
    _copied("num_attention_heads"),
    _copied("num_key_value_heads"),
    KeyRow("head_dim", lambda c: c.head_dim,
           lambda raw, hf: {"head_dim": raw.get("head_dim") or hf.hidden_size // hf.num_attention_heads}),
    _constant("hidden_act", "silu"),
    _copied("rms_norm_eps"),
    KeyRow("rope_parameters", lambda c: dict(c.rope),
           lambda raw, hf: {"rope": {key: value for key, value in rope_parameters(hf).items() if key != OWNER}}),
    KeyRow("rope_theta", lambda c: c.rope["rope_theta"]),
    _copied("max_position_embeddings"),
    KeyRow("tie_word_embeddings", lambda c: False),
    KeyRow("attention_bias", lambda c: bool(c.attention_bias), _attention_bias),
    KeyRow("logit_scale", lambda c: c.logit_scale, _logit_scale),
    _constant("mlp_bias", False),
)  # fmt: skip

LATENT_ROWS = (  # of MLA alone, whose class engines find by the first of these
    KeyRow("model_type", lambda c: "kimi_k2"),
    KeyRow("head_dim", lambda c: c.attention.qk_rope_head_dim),  # type: ignore[attr-defined]  # as DeepSeek calls it
    *(KeyRow(key, lambda c, key=key: getattr(c.attention, key) or None) for key in RANKS[1:]),  # type: ignore[misc]
    KeyRow(RANKS[0], lambda c: getattr(c.attention, RANKS[0]) or None, _latent),
)

QKV_BIAS = (  # of EAGLE-1 alone; other classes of engines go by attention_bias
    KeyRow("attention_bias", lambda c: False),
    KeyRow("qkv_bias", lambda c: True),
)

EAGLE = (
    *COMMON,
    KeyRow("draft_vocab_size", lambda c: c.draft_vocab_size),
    KeyRow("target_hidden_size", lambda c: c.target_hidden_size),
)

SIZES = (
    _defaults_to("draft_vocab_size", "vocab_size"),
    _defaults_to("target_hidden_size", "hidden_size"),
)
LAYER_TYPES = KeyRow("layer_types", lambda c: [FULL] * c.num_layers, _window)

EAGLE3 = (
    *COMMON,
    *SIZES,
    KeyRow("eagle_config", _eagle_config),
    _flag("norm_before_residual", "norms.residual", "normed"),
    _flag("norm_before_fc", "norms.aux", "concat"),
    _flag("fc_norm", "norms.aux", "each", "use_aux_norm"),
    _flag("norm_output", "recurrence", PostNorm()),
    KeyRow("use_sliding_window", lambda c: False),
    KeyRow("sliding_window", lambda c: None),
    LAYER_TYPES,
)  # fmt: skip

FUSED = (  # of drafters that read several states, or one through fc
    KeyRow("num_aux_hidden_states", lambda c: len(c.aux_layers)),
    KeyRow("num_aux_layers", lambda c: len(c.aux_layers)),  # as vLLM's Qwen3 class calls it
    KeyRow(IDS, lambda c: list(c.aux_layers)),
)

PARALLEL = (KeyRow(MASKS[0], lambda c: c.recurrence.mask_token_id, _mask),)  # type: ignore[attr-defined]  # of P-EAGLE

DFLASH = (
    *COMMON,
    *SIZES,
    KeyRow("num_target_layers", lambda c: c.num_target_layers),
    KeyRow("dflash_config", dflash_config, read_block),
    KeyRow("block_size", lambda c: 1 + c.drafting.fixed_drafts),
    LAYER_TYPES,
)

DSPARK = (  # https://github.com/deepseek-ai/DeepSpec
    *COMMON,
    *SIZES,
    KeyRow("num_target_layers", lambda c: c.num_target_layers),
    KeyRow(MASKS[0], lambda c: c.recurrence.mask_token_id),  # type: ignore[attr-defined]
    KeyRow("target_layer_ids", lambda c: [b - 1 for b in c.aux_layers]),  # of layers' outputs
    KeyRow("block_size", lambda c: 1 + c.drafting.masks, read_markov),  # type: ignore[attr-defined]
    KeyRow("markov_rank", lambda c: c.recurrence.rank),  # type: ignore[attr-defined]
    KeyRow("markov_head_type", lambda c: "vanilla"),
    KeyRow("enable_confidence_head", lambda c: c.drafting.has_confidence),
    KeyRow("confidence_head_with_markov", lambda c: c.drafting.has_confidence),
    KeyRow("sample_from_anchor", lambda c: c.recurrence.root_drafts),  # type: ignore[attr-defined]
    KeyRow("is_causal", lambda c: False),  # else vLLM takes sliding layers for causal ones
    KeyRow("num_anchors", lambda c: 512),  # of training; the authors' class asks for it
    LAYER_TYPES,
)

TABLES = {"eagle": EAGLE, "eagle3": EAGLE3, "dflash": DFLASH, "dspark": DSPARK}


def config_to_keys(
    config: DrafterConfig, method: str, *, unbounded: bool = False, own_rope: bool = False
) -> Raw:
    """Return every key of a ``config.json`` but ``architectures``, flat.

    Args:
        method: the engines' name of the drafter's kind.
        unbounded: write a window longer than any text for a drafter that sees everything, because the engine would
            give it the target's window.
        own_rope: write the rope so that an engine does not find it equal to the target's and share its module.
    """
    rows = TABLES[method]
    if method == "eagle3" and config.fusion.mixes:
        rows += FUSED
    if method == "eagle" and config.attention_bias == "qkv":
        rows += QKV_BIAS
    if type(config.attention) is MLA:
        rows += LATENT_ROWS
    if type(config.recurrence) is MaskConstant:
        rows += PARALLEL
    # a later row of a key replaces an earlier one
    written = {row.key: row.write(config) for row in rows}
    window = UNBOUNDED if unbounded else config.attention_window
    if window != "full":
        written["use_sliding_window"] = True
        written["sliding_window"] = window
        written["layer_types"] = [SLIDING] * config.num_layers
        if method == "eagle":
            written[TARGET_LAYERS] = config.num_target_layers
    if own_rope:
        written["rope_parameters"][OWNER] = "drafter"
    return written


def keys_to_fields(raw: Raw, method: str) -> Raw:
    """Return the fields of the drafter's config that a flat ``config.json`` decides, with the norms' under ``norms``.

    Absent keys are read as engines read them.

    Raises:
        ValueError: a value is not one that a drafter here can have.
    """
    if raw.get("fc_norm", raw.get("use_aux_norm")) and raw.get("norm_before_fc"):
        raise ValueError("fc_norm and norm_before_fc are both on; drafters here have one of them")
    fields: Raw = {"attention_window": "full", "attention_sinks": 0}
    hf_keys = _keys_for_transformers(raw)
    hf_class = Qwen3Config if raw.get("model_type") == "qwen3" else LlamaConfig
    try:
        hf = hf_class(**hf_keys)
        for row in TABLES[method] + LATENT_ROWS + (PARALLEL if method == "eagle3" else ()):
            if row.read is not None:
                fields |= row.read(raw, hf)
        # Without this key vLLM's class of EAGLE-1 fails on windows, and other engines ignore them.
        if method == "eagle" and TARGET_LAYERS in raw:
            fields |= _window(raw, hf)
    except (StrictDataclassError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"config.json is not one that transformers reads: {reason:.300}"
        ) from error
    names = [name for name in fields if name.startswith("norms.")]
    norms = {name.removeprefix("norms."): fields.pop(name) for name in names}
    return fields | {"norms": norms}


def _keys_for_transformers(raw: Raw) -> Raw:
    """Return the keys that transformers is to read; ValueError for more layers than it should make lists of."""
    plain = {
        key: _without_mrope(value)
        for key, value in raw.items()
        if key in _READ and value is not None
    }
    layers = plain.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers is {layers}; drafters here have at most {MOST_LAYERS:,}"
        )
    if raw.get("kv_lora_rank") is not None:
        # MLA rotates this width, and has as many keys as queries.
        plain["head_dim"] = raw.get("qk_rope_head_dim")
        plain["num_key_value_heads"] = plain.get("num_attention_heads")
    return plain


def _without_mrope(value: Any) -> Any:
    """Return a value of config.json, with the default type in a rope block of type ``mrope``, as its positions are
    equal in a text."""
    mrope = isinstance(value, Mapping) and "mrope" in (value.get("type"), value.get("rope_type"))
    return {**value, "type": "default", "rope_type": "default"} if mrope else value


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Return whether a rope block rotates differently if ``max_position_embeddings`` is changed."""
    if rope["rope_type"] in ("llama3", "yarn"):
        return not {"original_max_position_embeddings", "factor"} <= set(rope)
    return rope["rope_type"] not in ("default", "linear")


def reaching(config: DrafterConfig, positions: int) -> DrafterConfig:
    """Return the config with ``max_position_embeddings`` raised to a target's ``positions``, as engines raise it.

    It is returned as it is where that would change its rope.
    """
    if config.max_position_embeddings >= positions or depends_on_length(config.rope):
        return config
    return dataclasses.replace(config, max_position_embeddings=positions)


# The keys that transformers reads: dimensions and rope, and nothing that it would act on beyond these.
_READ = {row.key for table in TABLES.values() for row in table if row.read is not None}
_READ |= {"rope_theta", "rope_scaling"}
_READ -= {"hidden_act", "layer_types", "dflash_config", "block_size"}
_READ -= {row.key for row in EAGLE3 if row.key.startswith(("norm_", "fc_norm"))}
