"""The keys of a checkpoint's ``config.json``: one table for each method, read in both directions.

A row writes a key from a drafter's config, and reads the fields that the key decides. Rows that decide none are
implied by others; engines want them all the same. The tables are flat: a format may nest them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen3Config

from specdec.drafter import DrafterConfig, Norms, PostNorm
from specdec.export import layers
from specdec.nn.rope import rope_parameters

Raw = Mapping[str, Any]


class Row(NamedTuple):
    """One key."""

    key: str
    write: Callable[[DrafterConfig], Any]
    read: Callable[[Raw, Any], dict[str, Any]] | None = None
    """Fields of the drafter's config, those of the norms as ``norms.aux``, from the file and transformers' reading."""


def _same(key: str, field: str | None = None) -> Row:
    """A number that both call by one meaning; an absent one is what transformers takes it for."""
    field = field or key

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        value = getattr(hf, key, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {value!r}, wanted a number")
        if value <= 0:
            raise ValueError(f"{key} is {value!r}, wanted one above 0")
        return {field: value}

    return Row(key, lambda config: getattr(config, field), read)


def _or(key: str, other: str) -> Row:
    """As :func:`_same`; an absent one equals another."""
    return Row(
        key, lambda config: getattr(config, key), lambda raw, hf: {key: getattr(hf, key, None) or getattr(hf, other)}
    )


def _flag(key: str, field: str, on: Any, *spellings: str) -> Row:
    """True where the field has the value ``on``; absent is false, as engines read it."""

    def write(config: DrafterConfig) -> bool:
        owner, _, name = field.rpartition(".")
        return bool(getattr(config.norms if owner else config, name) == on)

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        nested = raw.get("eagle_config") or {}
        values = [holder[name] for holder in (nested, raw) for name in (key, *spellings) if name in holder]
        if odd := [value for value in values if not isinstance(value, bool | None)]:
            raise ValueError(f"{key} is {odd[0]!r}, wanted true or false")
        return {field: on} if values and values[0] else {}

    return Row(key, write, read)


def _fixed(key: str, value: Any) -> Row:
    """What no drafter here has otherwise."""

    def read(raw: Raw, hf: Any) -> dict[str, Any]:
        if raw.get(key, value) != value:
            raise ValueError(f"{key} is {raw[key]!r}; drafters here have {value!r} only")
        return {}

    return Row(key, lambda config: value, read)


def _told(key: str, write: Callable[[DrafterConfig], Any]) -> Row:
    return Row(key, write)


def _window(raw: Raw, hf: Any) -> dict[str, Any]:
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return {"attention_window": "full"}
    if kinds != {"sliding_attention"}:
        raise ValueError(f"layer_types are {sorted(kinds)}; drafters here have one kind for all layers")
    return {"attention_window": raw.get("sliding_window")}


def _sliding(config: DrafterConfig) -> bool:
    return config.attention_window != "full"


COMMON = (
    _told("model_type", lambda config: "qwen3" if config.norms.query_key else "llama"),
    _same("vocab_size"),
    _same("hidden_size"),
    _same("intermediate_size"),
    _same("num_hidden_layers", "num_layers"),
    _same("num_attention_heads"),
    _same("num_key_value_heads"),
    Row(
        "head_dim",
        lambda config: config.head_dim,
        lambda raw, hf: {"head_dim": raw.get("head_dim") or hf.hidden_size // hf.num_attention_heads},
    ),
    _fixed("hidden_act", "silu"),
    _same("rms_norm_eps"),
    Row("rope_parameters", lambda config: dict(config.rope), lambda raw, hf: {"rope": rope_parameters(hf)}),
    _told("rope_theta", lambda config: config.rope["rope_theta"]),
    _same("max_position_embeddings"),
    _told("tie_word_embeddings", lambda config: False),
    _fixed("attention_bias", False),
    _fixed("mlp_bias", False),
)

EAGLE = (
    *COMMON,
    _told("draft_vocab_size", lambda config: config.draft_vocab_size),
    _told("target_hidden_size", lambda config: config.target_hidden_size),
)

EAGLE3 = (
    *COMMON,
    _or("draft_vocab_size", "vocab_size"),
    _or("target_hidden_size", "hidden_size"),
    _told("num_aux_hidden_states", lambda config: len(config.aux_layers)),
    _told("num_aux_layers", lambda config: len(config.aux_layers)),  # as vLLM's Qwen3 class calls it
    _told("eagle_aux_hidden_state_layer_ids", lambda config: list(config.aux_layers)),
    _told("eagle_config", layers.nested),
    _flag("norm_before_residual", "norms.residual", "normed"),
    _flag("norm_before_fc", "norms.aux", "concat"),
    _flag("fc_norm", "norms.aux", "each", "use_aux_norm"),
    _flag("norm_output", "recurrence", PostNorm()),
    _told("use_sliding_window", _sliding),
    _told("sliding_window", lambda config: config.attention_window if _sliding(config) else None),
    Row(
        "layer_types",
        lambda config: ["sliding_attention" if _sliding(config) else "full_attention"] * config.num_layers,
        _window,
    ),
)

TABLES = {"eagle": EAGLE, "eagle3": EAGLE3}


def write(config: DrafterConfig, method: str) -> dict[str, Any]:
    """Every key but ``architectures``."""
    return {row.key: row.write(config) for row in TABLES[method]}


def read(raw: Raw, method: str) -> dict[str, Any]:
    """Fields of the drafter's config that a flat ``config.json`` decides; absent keys are what engines take them for.

    Raises:
        ValueError: a value is not one that a drafter here can have.
    """
    if not isinstance(raw.get("eagle_config") or {}, Mapping):
        raise ValueError(f"eagle_config is {raw['eagle_config']!r}, wanted a table")
    if raw.get("fc_norm", raw.get("use_aux_norm")) and raw.get("norm_before_fc"):
        raise ValueError("fc_norm and norm_before_fc are both on; drafters here have one of them")
    try:
        hf = (Qwen3Config if raw.get("model_type") == "qwen3" else LlamaConfig)(**_plain(raw))
    except (StrictDataclassError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"config.json is not one that transformers reads: {' '.join(str(error).split())}") from error
    found: dict[str, Any] = {"attention_window": "full"}
    for row in TABLES[method]:
        if row.read is not None:
            found |= row.read(raw, hf)
    norms = {name.partition(".")[2]: found.pop(name) for name in list(found) if name.startswith("norms.")}
    return found | {"norms": norms}


def norms(changes: Mapping[str, Any], base: Norms) -> Norms:
    """The norms that :func:`read` found, on top of a method's own."""
    return Norms(**{**base.__dict__, **changes})


def _plain(raw: Raw) -> dict[str, Any]:
    """What transformers is to read: nothing that it would act on beyond dimensions and rope."""
    return {key: value for key, value in raw.items() if key in _READ and value is not None}


_READ = {row.key for table in TABLES.values() for row in table if row.read is not None} | {"rope_theta", "rope_scaling"}
_READ -= {"hidden_act", "layer_types"} | {row.key for row in EAGLE3 if row.key.startswith(("norm_", "fc_norm"))}
