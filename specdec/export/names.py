"""The names of tensors here and in checkpoints: one table, read in both directions."""

import re
from collections.abc import Iterator

from specdec.drafter import Concat, DrafterConfig

MAPS = DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"

# of a layer, after `layers.layers.{i}.` and `layers.{i}.`
LAYER = {
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
ELSEWHERE = {
    "embed_tokens": "embed_tokens",
    "norms.aux": "input_norm",
    "norms.embed": "layers.0.input_layernorm",
    "norms.hidden": "layers.0.hidden_norm",
    "norms.output": "norm",
    "lm_head": "lm_head",
}

# what others write for the same
SPELLINGS = (
    (r"^(model\.)+", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)


def table(config: DrafterConfig) -> dict[str, str]:
    """Published name (see :mod:`specdec.export.blocks`) to the checkpoint's, for every module that may be there."""
    return dict(_rows(config))


def _rows(config: DrafterConfig) -> Iterator[tuple[str, str]]:
    yield from ELSEWHERE.items()
    yield ("fusion.fc" if isinstance(config.fusion, Concat) else "entry.fc"), "fc"
    for n in range(len(config.aux_layers)):
        yield f"norms.aux.{n}", f"fc_norm.{n}"
    for i in range(config.num_layers):
        for ours, theirs in LAYER.items():
            yield f"layers.layers.{i}.{ours}", f"layers.{i}.{theirs}"
        if i:
            yield f"layers.input_norms.{i - 1}", f"layers.{i}.input_layernorm"


def translate(name: str, names: dict[str, str]) -> str | None:
    """A tensor's name by the table or its inverse; None if it has none."""
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}" if module in names else None


def canonical(name: str) -> str | None:
    """A checkpoint's name in the spelling of the table; None for what carries nothing of its own."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return name
