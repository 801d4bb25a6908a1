"""The keys of a checkpoint's ``config.json``: one table for each method, read in both directions.

A row writes a key from a drafter's config, and reads the fields that the key decides. Rows that decide none are
implied by others; engines want them all the same. The tables are flat: a format may nest them.

The target's states are numbered in two ways. Ours, b, counts layers applied; vLLM's top-level ids are the same.
SGLang's ids in ``eagle_config`` are of layers' outputs, b - 1, and so are those of most trainers.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen3Config

from specdec.drafter import GQA, MLA, Concat, DrafterConfig, MaskBlock, MaskConstant, PostNorm
from specdec.nn.rope import rope_parameters
from specdec.utils.numbers import MOST_LAYERS

log = logging.getLogger(__name__)

# the second of speculators' DFlash
IDS = "eagle_aux_hidden_state_layer_ids"
AUX = "aux_hidden_state_layer_ids"
FULL = "full_attention"
SLIDING = "sliding_attention"
UNBOUNDED = 2**30  # a window longer than any text; sums of it and positions stay in 32 bits
# what vLLM takes from a layer's number before it looks into layer_types
TARGET_LAYERS = "target_layer_count"
# in a rope block, a word that no engine reads, for a block that is not the target's
OWNER = "owner"
Raw = Mapping[str, Any]


class KeyRow(NamedTuple):
    """One key."""

    key: str
    write: Callable[[DrafterConfig], Any]
    read: Callable[[Raw, Any], dict[str, Any]] | None = None
    """Fields of the drafter's config, those of the norms as ``norms.aux``, from the file and transformers' reading."""


def _same(key: str, field: str | None = None) -> KeyRow:
    """A number that both call by one meaning; an absent one is what transformers takes it for."""
    field = field or key

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        value = getattr(hf, key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{key} is {value!r}, wanted a number above 0")
        return {field: value}

    return KeyRow(key, lambda config: getattr(config, field), read)


def _or(key: str, other: str) -> KeyRow:
    """As :func:`_same`; an absent one equals another."""
    return _same(key)._replace(
        read=lambda raw, hf: {key: getattr(hf, other if getattr(hf, key, None) is None else key)}
    )


def _flag(key: str, field: str, on: Any, *spellings: str) -> KeyRow:
    """True where the field has the value ``on``; absent is false, as engines read it."""

    def write(config: DrafterConfig) -> bool:
        owner, _, name = field.rpartition(".")
        return bool(getattr(config.norms if owner else config, name) == on)

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        nested = raw.get("eagle_config") or {}
        values = [
            holder[name] for holder in (nested, raw) for name in (key, *spellings) if name in holder
        ]
        if odd := [value for value in values if not isinstance(value, bool | None)]:
            raise ValueError(f"{key} is {odd[0]!r}, wanted true or false")
        return {field: on} if values and values[0] else {}

    return KeyRow(key, write, read)


def _fixed(key: str, value: Any) -> KeyRow:
    """What no drafter here has otherwise."""

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        if raw.get(key, value) != value:
            raise ValueError(f"{key} is {raw[key]!r}; drafters here have {value!r} only")
        return {}

    return KeyRow(key, lambda config: value, read)


def _attention_bias(raw: Raw, hf: Any) -> dict[str, Any]:
    """``qkv_bias``, where it is there, decides on queries, keys and values, and ``attention_bias`` on all four."""
    flags = {key: raw.get(key) for key in ("attention_bias", "qkv_bias")}
    if odd := [key for key, value in flags.items() if not isinstance(value, bool | None)]:
        raise ValueError(f"{odd[0]} is {flags[odd[0]]!r}, wanted true or false")
    if flags["attention_bias"] and flags["qkv_bias"] is False:
        raise ValueError(
            "attention_bias is true and qkv_bias false; drafters here have no bias on the output alone"
        )
    return {
        "attention_bias": True if flags["attention_bias"] else "qkv" if flags["qkv_bias"] else False
    }


def _logit_scale(raw: Raw, hf: Any) -> dict[str, Any]:
    value = raw.get("logit_scale", 1.0)
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"logit_scale is {value!r}, wanted a number above 0")
    return {"logit_scale": float(value)}


def _window(raw: Raw, hf: Any) -> dict[str, Any]:
    kinds = set(raw.get("layer_types") or [FULL])
    if kinds == {FULL}:
        return {"attention_window": "full"}
    if kinds != {SLIDING}:
        raise ValueError(
            f"layer_types are {sorted(kinds)}; drafters here have one kind for all layers"
        )
    window = raw.get("sliding_window")
    return {"attention_window": "full" if window == UNBOUNDED else window}


def _rope(raw: Raw, hf: Any) -> dict[str, Any]:
    return {"rope": {key: value for key, value in rope_parameters(hf).items() if key != OWNER}}


# as vLLM looks for them
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def _mask_token(raw: Raw) -> int | None:
    named = [(raw.get("dflash_config") or {}).get(MASKS[0]), *map(raw.get, MASKS)]
    token = next((one for one in named if one is not None), None)
    if token is not None and type(token) is not int:
        raise ValueError(f"mask_token_id is {token!r}, wanted a whole number")
    return token


def _mask(raw: Raw, hf: Any) -> dict[str, Any]:
    return {} if (token := _mask_token(raw)) is None else {"recurrence": MaskConstant(token)}


def _dflash_config(config: DrafterConfig) -> dict[str, Any]:
    """What DFlash adds to Qwen3's config; ids are of layers' outputs."""
    token = config.recurrence.mask_token_id  # type: ignore[attr-defined]
    return {
        "mask_token_id": token,
        "target_layer_ids": [b - 1 for b in config.aux_layers],
        "causal": False,
    }


def _block(raw: Raw, hf: Any) -> dict[str, Any]:
    """ValueError for what a published block drafter may have and drafters here have not."""
    inner = raw.get("dflash_config") or {}
    odd = [
        key
        for key in ("causal", "use_swa", "sample_from_anchor", "attention_sink_bias")
        if inner.get(key)
    ]
    if odd or raw.get("is_causal"):
        raise ValueError(
            f"dflash_config: {(odd or ['is_causal'])[0]} is on; block drafters here have no such thing"
        )
    if raw.get("is_neox_style", True) is not True:
        raise ValueError("is_neox_style is not the default; block drafters here have no such thing")
    if (
        inner.get("attention_value_scale", 1.0) not in (1.0, None)
        or inner.get("use_aux_hidden_state", True) is False
    ):
        raise ValueError(
            "dflash_config: attention_value_scale or use_aux_hidden_state is not the default"
        )
    if (token := _mask_token(raw)) is None:
        raise ValueError(
            "a block drafter (DFlash) has a mask: it lacks dflash_config.mask_token_id"
        )
    size = raw.get("block_size")
    if type(size) is not int or size < 2:
        raise ValueError(
            f"block_size is {size!r:.60}, wanted the nodes of a block, a whole number above 1"
        )
    return {"recurrence": MaskBlock(token, masks=size - 1)}


def _eagle_config(config: DrafterConfig) -> dict[str, Any]:
    """The embeddings, boundary 0, are no layer's output; a drafter that reads the last state names none."""
    if not config.fusion.mixes:
        return {"use_aux_hidden_state": False}
    ids = {IDS: [b - 1 for b in config.aux_layers]} if config.aux_layers[0] else {}
    return {"use_aux_hidden_state": True, **ids}


# of MLA
RANKS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _latent(raw: Raw, hf: Any) -> dict[str, Any]:
    """MLA's sizes, of which only the first may be nothing."""
    if raw.get("kv_lora_rank") is None:
        return {"attention": GQA()}
    sizes = {key: raw.get(key) or 0 for key in RANKS}
    if odd := [key for key, size in sizes.items() if type(size) is not int]:
        raise ValueError(f"{odd[0]} is {sizes[odd[0]]!r}, wanted a whole number")
    kind = MLA(**sizes)
    return {"attention": kind, **kind.heads(hf)._asdict()}


COMMON = (
    KeyRow("model_type", lambda c: "qwen3" if c.norms.query_key else "llama"),
    _same("vocab_size"),
    _same("hidden_size"),
    _same("intermediate_size"),
    _same("num_hidden_layers", "num_layers"),
    _same("num_attention_heads"),
    _same("num_key_value_heads"),
    KeyRow("head_dim", lambda c: c.head_dim,
           lambda raw, hf: {"head_dim": raw.get("head_dim") or hf.hidden_size // hf.num_attention_heads}),
    _fixed("hidden_act", "silu"),
    _same("rms_norm_eps"),
    KeyRow("rope_parameters", lambda c: dict(c.rope), _rope),
    KeyRow("rope_theta", lambda c: c.rope["rope_theta"]),
    _same("max_position_embeddings"),
    KeyRow("tie_word_embeddings", lambda c: False),
    KeyRow("attention_bias", lambda c: bool(c.attention_bias), _attention_bias),
    KeyRow("logit_scale", lambda c: c.logit_scale, _logit_scale),
    _fixed("mlp_bias", False),
)  # fmt: skip

LATENT = (  # of MLA alone, whose class engines find by the first of these
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

EAGLE3 = (
    *COMMON,
    _or("draft_vocab_size", "vocab_size"),
    _or("target_hidden_size", "hidden_size"),
    KeyRow("eagle_config", _eagle_config),
    _flag("norm_before_residual", "norms.residual", "normed"),
    _flag("norm_before_fc", "norms.aux", "concat"),
    _flag("fc_norm", "norms.aux", "each", "use_aux_norm"),
    _flag("norm_output", "recurrence", PostNorm()),
    KeyRow("use_sliding_window", lambda c: False),
    KeyRow("sliding_window", lambda c: None),
    KeyRow("layer_types", lambda c: [FULL] * c.num_layers, _window),
)  # fmt: skip

FUSED = (  # of drafters that read several states, or one through fc
    KeyRow("num_aux_hidden_states", lambda c: len(c.aux_layers)),
    KeyRow("num_aux_layers", lambda c: len(c.aux_layers)),  # as vLLM's Qwen3 class calls it
    KeyRow(IDS, lambda c: list(c.aux_layers)),
)

PARALLEL = (KeyRow(MASKS[0], lambda c: c.recurrence.mask_token_id, _mask),)  # type: ignore[attr-defined]  # of P-EAGLE

DFLASH = (
    *COMMON,
    _or("draft_vocab_size", "vocab_size"),
    _or("target_hidden_size", "hidden_size"),
    KeyRow("num_target_layers", lambda c: c.num_target_layers),
    KeyRow("dflash_config", _dflash_config, _block),
    KeyRow("block_size", lambda c: 1 + c.drafting.fixed_drafts),
    KeyRow("layer_types", lambda c: [FULL] * c.num_layers, _window),
)

TABLES = {"eagle": EAGLE, "eagle3": EAGLE3, "dflash": DFLASH}


def write(
    config: DrafterConfig, method: str, *, unbounded: bool = False, own_rope: bool = False
) -> dict[str, Any]:
    """Every key but ``architectures``.

    Args:
        unbounded: say that all is seen by a window longer than any text, for an engine that would take the target's.
        own_rope: write the rope so that an engine does not find it equal to the target's and share its module.
    """
    rows = TABLES[method]
    rows += FUSED if method == "eagle3" and config.fusion.mixes else ()
    rows += QKV_BIAS if method == "eagle" and config.attention_bias == "qkv" else ()
    rows += LATENT if type(config.attention) is MLA else ()
    rows += PARALLEL if type(config.recurrence) is MaskConstant else ()
    written = {row.key: row.write(config) for row in rows}
    window = UNBOUNDED if unbounded else config.attention_window
    if window != "full":
        kinds = [SLIDING] * config.num_layers
        written |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
        written |= {TARGET_LAYERS: config.num_target_layers} if method == "eagle" else {}
    if own_rope:
        written["rope_parameters"] |= {OWNER: "drafter"}
    return written


def read(raw: Raw, method: str) -> dict[str, Any]:
    """Fields of the drafter's config that a flat ``config.json`` decides; absent keys are what engines take them for.

    ValueError if a value is not one that a drafter here can have.
    """
    if raw.get("fc_norm", raw.get("use_aux_norm")) and raw.get("norm_before_fc"):
        raise ValueError("fc_norm and norm_before_fc are both on; drafters here have one of them")
    plain = {
        key: _in_a_text(value) for key, value in raw.items() if key in _READ and value is not None
    }
    # of which transformers makes a list
    layers = plain.get("num_hidden_layers")
    most = MOST_LAYERS
    if isinstance(layers, int) and layers > most:
        raise ValueError(f"num_hidden_layers is {layers}; drafters here have at most {most:,}")
    found: dict[str, Any] = {"attention_window": "full", "attention_sinks": 0}
    try:
        # the width that is rotated, and as many keys as queries
        if raw.get("kv_lora_rank") is not None:
            plain |= {
                "head_dim": raw.get("qk_rope_head_dim"),
                "num_key_value_heads": plain.get("num_attention_heads"),
            }
        hf = (Qwen3Config if raw.get("model_type") == "qwen3" else LlamaConfig)(**plain)
        for row in TABLES[method] + LATENT + (PARALLEL if method == "eagle3" else ()):
            if row.read is not None:
                found |= row.read(raw, hf)
        # else vLLM's class fails, and others read no windows
        if method == "eagle" and TARGET_LAYERS in raw:
            found |= _window(raw, hf)
    except (StrictDataclassError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"config.json is not one that transformers reads: {reason:.300}"
        ) from error
    norms = {
        name.partition(".")[2]: found.pop(name) for name in list(found) if name.startswith("norms.")
    }
    return found | {"norms": norms}


def _in_a_text(value: Any) -> Any:
    """A value of config.json; of a rope block of type ``mrope``, whose positions are equal in a text, the default."""
    mrope = isinstance(value, Mapping) and "mrope" in (value.get("type"), value.get("rope_type"))
    return {**value, "type": "default", "rope_type": "default"} if mrope else value


def reads_last_state(raw: Raw) -> bool:
    """Whether a flat ``config.json`` says that the drafter has no ``fc`` and reads the target's last state, normed
    (NVIDIA's ``use_aux_hidden_state``); ValueError if it says so in no way that can be read."""
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"eagle_config is {inner!r:.60}, wanted a table")
    value = inner.get("use_aux_hidden_state", True)
    if not isinstance(value, bool):
        raise ValueError(
            f"eagle_config.use_aux_hidden_state is {value!r:.60}, wanted true or false"
        )
    return not value


def depends_on_length(rope: Raw) -> bool:
    """Whether a rope block rotates otherwise where ``max_position_embeddings`` is another."""
    scaled = rope["rope_type"] in ("llama3", "yarn") and {
        "original_max_position_embeddings",
        "factor",
    } <= set(rope)
    return rope["rope_type"] not in ("default", "linear") and not scaled


def reaching(config: DrafterConfig, positions: int) -> DrafterConfig:
    """The config with ``max_position_embeddings`` raised to a target's ``positions``, as engines raise it to theirs;
    as it is where that would change its rope."""
    if config.max_position_embeddings >= positions or depends_on_length(config.rope):
        return config
    return dataclasses.replace(config, max_position_embeddings=positions)


# what transformers is to read: nothing that it would act on beyond dimensions and rope
_READ = {row.key for table in TABLES.values() for row in table if row.read is not None} | {
    "rope_theta",
    "rope_scaling",
}
_READ -= {"hidden_act", "layer_types", "dflash_config"} | {
    row.key for row in EAGLE3 if row.key.startswith(("norm_", "fc_norm"))
}


def block_boundaries(raw: Raw) -> tuple[int, ...]:
    """Those of a block drafter's flat ``config.json``, which names outputs of layers; or boundaries, in speculators."""
    inner = raw.get("dflash_config") or {}
    outputs = inner.get("target_layer_ids")
    ids = raw.get(AUX)
    found = ids if outputs is None else outputs
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise ValueError(
            f"dflash_config.target_layer_ids is {found!r}, wanted a list of whole numbers"
        )
    return tuple(found if outputs is None else [i + 1 for i in found])


def boundaries(
    raw: Mapping[str, Any], num_target_layers: int, numbered: bool = False
) -> tuple[int, ...]:
    """The boundaries that a flat ``config.json`` names, ascending, as engines concatenate them; by default EAGLE-3's.

    Args:
        numbered: whether the layout has one numbering, so that a list means what its place says.

    ValueError if its lists contradict each other, or ids repeat or do not exist.
    """
    inner = raw.get("eagle_config") or {}
    # the third is vLLM's second place, in its own numbering
    top = raw.get(IDS)
    outputs = inner.get(IDS)
    layer_ids = inner.get("layer_ids")
    for ids in (top, outputs, layer_ids):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError(f"{IDS} or layer_ids is {ids!r}, wanted a list of whole numbers")
    # an output of the last layer shows that boundaries were meant, as NVIDIA writes them
    meant = max(outputs or [0]) == num_target_layers
    ours = [i + (not meant) for i in outputs or ()]
    named = [sorted(ids) for ids in (top, layer_ids, ours) if ids]
    # a target of six layers or fewer has no usual ones
    usual = (
        list(Concat().default_layers(num_target_layers))
        if num_target_layers > 6 or not named
        else []
    )
    found = named[0] if named else usual
    where = "say which boundaries were trained with --aux_layers"
    if any(ids != found for ids in named):
        raise ValueError(
            f"{IDS} is {top} at the top and {outputs} in eagle_config: the second should be one less everywhere; "
            f"{where}"
        )
    # a list of one kind alone is taken for what its place says, unless it is EAGLE-3's own in the other's numbering
    alone = outputs if outputs and not top and not layer_ids else None
    shifted = (top and not outputs and [i + 1 for i in found] == usual) or (
        alone and sorted(alone) == usual
    )
    if shifted and not numbered:
        raise ValueError(
            f"{IDS} is {top or outputs} {'at the top' if top else 'in eagle_config'}: EAGLE-3's {usual}, if it were "
            f"numbered as in the other of the two places: {where}"
        )
    if alone and not meant:
        log.warning(
            "%s stands in eagle_config alone: read as outputs of layers, as SGLang does; vLLM reads it as boundaries "
            "or not at all; --aux_layers says otherwise",
            IDS,
        )
    if len(set(found)) < len(found) or found[0] < 0 or found[-1] > num_target_layers:
        raise ValueError(
            f"{IDS} names boundaries {found}: each must be named once, in 0..{num_target_layers}"
        )
    return tuple(found)
