"""Which rotary positions engines turn as we do."""

from specdec.drafter import DrafterConfig

# by rope_type, why vLLM and why SGLang do not honour it; nothing if they do
KINDS = {
    "default": ("", ""),
    "linear": ("", ""),
    "llama3": ("", ""),
    "yarn": ("", ""),
    "dynamic": ("", "its frequencies are not known to be ours"),
    "longrope": (
        "the short or long factors are chosen by the server's max_model_len",
        "its frequencies are not known to be ours",
    ),
}
_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor"}
_MORE = {
    "llama3": {"low_freq_factor", "high_freq_factor"},
    "yarn": {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
    "longrope": {"short_factor", "long_factor", "attention_factor"},
}


def yarn_without_original(config: DrafterConfig) -> bool:
    """Whether the length that yarn stretches is left to a default."""
    return config.rope["rope_type"] == "yarn" and "original_max_position_embeddings" not in config.rope


def yarn_with_attention_factor(config: DrafterConfig) -> bool:
    """Whether the factor on cosine and sine is written instead of worked out."""
    return config.rope["rope_type"] == "yarn" and "attention_factor" in config.rope


def unknown_keys(config: DrafterConfig) -> bool:
    """Whether the block says something whose reading was not compared."""
    kind = config.rope["rope_type"]
    return kind in KINDS and not set(config.rope) <= _KEYS | _MORE.get(kind, set())
