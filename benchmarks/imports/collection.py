"""The layouts, with the keys of their ``config.json`` as published; and each tensors small, with weights that matter.

Legend: H hidden size of the drafter, S of the target, V vocabulary, D draft vocabulary, L layers of the target.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTH, WIDTH_OF_TARGET, VOCAB, DRAFT_VOCAB, INTERMEDIATE, WINDOW = 64, 80, 128, 48, 40, 16
LAYER = "transformer_layer_config"  # of speculators, which nests what describes the layer
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


class Layout(NamedTuple):
    """One published checkpoint, or what is known of it."""

    name: str
    source: str  # where the keys come from
    public: bool  # whether that is the published file, or a repository's; else they are made up from documentation
    target_layers: int
    config: dict[str, Any]  # the keys of config.json
    prefix: str = "midlayer."  # of the first layer's tensors
    root: str = ""  # of all but the head and the vocabulary's maps
    extra: tuple[str, ...] = ()  # tensors beyond what the keys imply; see :func:`tensors_of`
    aux_layers: tuple[int, ...] = ()  # given to the import
    target_positions: int = 0  # of the target, if not the drafter's
    refused: str = ""  # what the refusal says


def layouts() -> list[Layout]:
    """All of them, in the order of the table."""
    data = json.loads((Path(__file__).parent / "collection.json").read_text())
    tuples = {"extra", "aux_layers"}
    return [
        Layout(**{key: tuple(value) if key in tuples else value for key, value in row.items()})
        for row in data
    ]


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The keys without speculators' nesting; those of the layer's config are meant where both have one."""
    return {
        **{key: value for key, value in config.items() if key != LAYER},
        **config.get(LAYER, {}),
    }


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys with smaller sizes; ratios of heads, layers, ropes, flags and ids stay."""
    smaller = {key: reduced(value) if key == LAYER else value for key, value in config.items()}
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
    }
    if smaller.get("target_hidden_size") is not None:
        sizes["target_hidden_size"] = (
            WIDTH if smaller["target_hidden_size"] == smaller["hidden_size"] else WIDTH_OF_TARGET
        )
    if "draft_vocab_size" in smaller:
        whole = smaller["draft_vocab_size"] == flat(config).get("vocab_size")
        sizes["draft_vocab_size"] = VOCAB if whole else DRAFT_VOCAB
    if "num_attention_heads" in smaller:
        sizes |= _heads(smaller)
    smaller |= {key: value for key, value in sizes.items() if key in smaller}
    if smaller.get("kv_lora_rank"):
        smaller |= LATENT
    if smaller.get("sliding_window") and "sliding_attention" in smaller.get("layer_types", ()):
        smaller["sliding_window"] = WINDOW
    if isinstance(smaller.get("block_size"), int):
        smaller["block_size"] = 4
    if "mask_token_id" in smaller:
        smaller["mask_token_id"] = VOCAB - 2
    if "dflash_config" in smaller:
        smaller["dflash_config"] = {**smaller["dflash_config"], "mask_token_id": VOCAB - 2}
    return smaller


def _heads(config: dict[str, Any]) -> dict[str, int]:
    """At most eight heads, with two groups or one; a head that was not hidden size by heads wide is not so here."""
    heads, groups = (
        config["num_attention_heads"],
        config.get("num_key_value_heads") or config["num_attention_heads"],
    )
    share = min(heads // groups, 4)
    small = {"num_attention_heads": 4, "num_key_value_heads": 4 // share if heads > groups else 4}
    even = config.get("head_dim") in (None, config["hidden_size"] // heads)
    return small | {"head_dim": WIDTH // 4 if even else WIDTH // 4 + 4}


def tensors_of(layout: Layout, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights of a reduced config under the published names, float32: uneven norms, loud attention, biases away
    from zero, and a draft vocabulary with holes.

    Of ``layout.extra``: ``fc.bias``, ``embed_tokens``, ``t2d``, ``qkv_bias`` and ``mask_hidden`` add tensors,
    ``query_key`` norms on heads; ``no_head``, ``no_fc`` and ``no_d2t`` leave tensors out; ``by_frequency`` leaves the
    draft vocabulary unsorted, ``narrow`` is EAGLE-1's, ``block`` DFlash's.
    """
    keys, extra = flat(config), set(layout.extra)
    torch.manual_seed(sum(map(ord, layout.name)))
    H, S = WIDTH, keys.get("target_hidden_size") or WIDTH
    tensors: dict[str, Tensor] = {}
    layers = 1 if "one_layer" in extra else keys.get("num_hidden_layers", 1)
    for i in range(layers):
        wide = 2 * H if i == 0 and not extra & {"narrow", "block"} else H
        prefix = layout.prefix if i == 0 else f"layers.{i}."
        tensors |= {
            layout.root + prefix + name: value for name, value in _layer(keys, wide, extra).items()
        }
        if i or "block" in extra:
            tensors[f"{layout.root}{prefix}input_layernorm.weight"] = _norm(H)
    first = layout.root + layout.prefix
    states = _states(layout, keys)
    if "block" in extra:
        tensors |= {
            "fc.weight": _matrix(H, states * S),
            "hidden_norm.weight": _norm(H),
            "norm.weight": _norm(H),
        }
    elif "narrow" in extra:
        tensors["fc.weight"] = _matrix(H, 2 * H)
    else:
        tensors |= {
            f"{first}{name}.weight": _norm(H) for name in ("hidden_norm", "input_layernorm")
        }
        tensors[f"{layout.root}norm.weight"] = _norm(H)
        if "no_fc" not in extra:
            tensors[f"{layout.root}fc.weight"] = _matrix(H, states * S)
        tensors |= _of_states(layout, keys, states, S)
    if "fc.bias" in extra:
        tensors["fc.bias"] = torch.randn(H) / 2
    if "embed_tokens" in extra:
        tensors[f"{layout.root}embed_tokens.weight"] = torch.randn(VOCAB, H)
    return tensors | _vocabulary(keys, extra)


def _states(layout: Layout, keys: dict[str, Any]) -> int:
    inner, block = keys.get("eagle_config") or {}, keys.get("dflash_config") or {}
    lists = [keys.get("eagle_aux_hidden_state_layer_ids"), keys.get("aux_hidden_state_layer_ids")]
    lists += [
        inner.get("eagle_aux_hidden_state_layer_ids"),
        block.get("target_layer_ids"),
        [0, 0, 0],
    ]
    return len(next(ids for ids in lists if ids))


def _of_states(layout: Layout, keys: dict[str, Any], states: int, width: int) -> dict[str, Tensor]:
    """Norms on the target's states, and the learned state of P-EAGLE."""
    inner, root = keys.get("eagle_config") or {}, layout.root
    tensors: dict[str, Tensor] = {}
    if keys.get("fc_norm"):
        tensors |= {f"{root}fc_norm.{n}.weight": _norm(width) for n in range(states)}
    if keys.get("norm_before_fc") or inner.get("norm_before_fc"):
        tensors[f"{root}input_norm.weight"] = _norm(states * width)
    if "mask_hidden" in layout.extra:
        tensors["mask_hidden"] = torch.randn(1, 1, states * width)
    return tensors


def _layer(keys: dict[str, Any], wide: int, extra: set[str]) -> dict[str, Tensor]:
    """The projections of one layer and the norm after its attention."""
    heads, groups = (
        keys["num_attention_heads"],
        keys.get("num_key_value_heads") or keys["num_attention_heads"],
    )
    d = keys.get("head_dim") or WIDTH // heads
    shapes = {
        "q_proj": (heads * d, wide),
        "k_proj": (groups * d, wide),
        "v_proj": (groups * d, wide),
    }
    shapes["o_proj"] = (WIDTH, heads * d)
    if keys.get("kv_lora_rank"):
        q, kv, plain, turned, values = LATENT.values()
        shapes = {
            "q_a_proj": (q, wide),
            "q_b_proj": (heads * (plain + turned), q),
            "o_proj": (WIDTH, heads * values),
        }
        shapes |= {
            "kv_a_proj_with_mqa": (kv + turned, wide),
            "kv_b_proj": (heads * (plain + values), kv),
        }
    tensors = {
        f"self_attn.{name}.weight": _matrix(*shape, scale=3.0) for name, shape in shapes.items()
    }
    if keys.get("kv_lora_rank"):
        tensors |= {
            "self_attn.q_a_layernorm.weight": _norm(q),
            "self_attn.kv_a_layernorm.weight": _norm(kv),
        }
    if "query_key" in extra:
        tensors |= {f"self_attn.{name}_norm.weight": _norm(d) for name in "qk"}
    if "qkv_bias" in extra:
        tensors |= {
            f"self_attn.{name}_proj.bias": torch.randn(shapes[f"{name}_proj"][0]) for name in "qkv"
        }
    tensors |= {f"mlp.{name}_proj.weight": _matrix(INTERMEDIATE, WIDTH) for name in ("gate", "up")}
    tensors["mlp.down_proj.weight"] = _matrix(WIDTH, INTERMEDIATE)
    return tensors | {"post_attention_layernorm.weight": _norm(WIDTH)}


def _vocabulary(keys: dict[str, Any], extra: set[str]) -> dict[str, Tensor]:
    """The head, unless it is the target's or tied; offsets where it knows fewer tokens."""
    size = keys.get("draft_vocab_size") or keys["vocab_size"]
    tensors = {} if extra & {"no_head", "narrow"} else {"lm_head.weight": 3 * _matrix(size, WIDTH)}
    if size < keys["vocab_size"] and "no_d2t" not in extra:
        ids = torch.randperm(VOCAB)[:size]
        ids = ids if "by_frequency" in extra else ids.sort().values
        tensors["d2t"] = ids - torch.arange(size)
        members = torch.zeros(VOCAB, dtype=torch.bool)
        members[ids] = True
        tensors |= {"t2d": members} if "t2d" in extra else {}
    return tensors


def _matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, columns) * scale / columns**0.5


def _norm(width: int) -> Tensor:
    return torch.empty(width).uniform_(0.4, 1.6)
