"""Where a causal language model keeps its layers, final norm and head, and which families cannot be driven.

What is refused here would give wrong numbers under a draft tree, whatever mask it is given.
"""

import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

# what transformers calls a layer, by whether it slides, and by whether it carries a state from token to token
ATTENDS = {
    "full_attention": False,
    "sliding_attention": True,
    "hybrid": False,
    "hybrid_sliding": True,
}
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
NO_MIXER = ("moe", "mlp")
# what a config says in place of sdpa and eager
OURS = "specdec"
OURS_EAGER = "specdec_eager"
ATTENTION = ("sdpa", "eager", OURS, OURS_EAGER)  # the implementations that take any 4-D mask


class ModelParts(NamedTuple):
    """The parts of a model that features and verification touch."""

    config: Any  # the text model's Hugging Face configuration
    decoder: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    head: nn.Linear
    decoder_path: list[str]  # names from the model down to the decoder
    head_name: str
    sliding: tuple[bool, ...]  # per layer
    attends: tuple[bool, ...]  # per layer, whether it takes a mask
    # per layer, the module that carries a state from token to token; None of a layer without
    mixers: tuple[nn.Module | None, ...]
    mask_argument: int  # place of ``attention_mask`` among a layer's positional arguments
    # the name under which the decoder and the model take and return their cache
    cache_argument: str


def model_parts(model: PreTrainedModel) -> ModelParts:
    """Find the parts of ``model``.

    Raises:
        ValueError: the family has a part that a draft tree cannot drive, or a part cannot be found.
    """
    family = type(model).__name__
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if not isinstance(decoder, nn.Module) or not hasattr(decoder, "config"):
        raise ValueError(f"{family}: no text decoder found; give the causal language model itself")
    config: Any = decoder.config
    _check_family(model, decoder, config)
    _check_attention(family, config)
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise ValueError(
            f"{family}: needs a linear, unquantized output head, found {type(head).__name__}"
        )
    layers = _decoder_layers(family, decoder, config.num_hidden_layers)
    final_norm = _final_norm(family, decoder)
    arguments = list(inspect.signature(layers[0].forward).parameters)
    if "attention_mask" not in arguments:
        raise ValueError(
            f"{family}: its layers take no attention_mask, so a draft tree cannot be verified with it"
        )
    paths = [name.split(".") for name, part in model.named_modules() if part is decoder and name]
    heads = [name for name, part in model.named_children() if part is head]
    if len(paths) != 1 or len(heads) != 1:
        raise ValueError(f"{family}: its decoder and output head are not its own direct parts")
    sliding, attends, recurrent = _kinds(family, config)
    # a config may list more kinds than the model has layers
    mixers = tuple(
        _mixer(family, layer) if carries else None
        for layer, carries in zip(layers, recurrent, strict=False)
    )
    mask_argument = arguments.index("attention_mask")
    # transformers 5.24 calls it so, and warns of the earlier name
    takes_cache = "cache" in inspect.signature(decoder.forward).parameters
    cache_argument = "cache" if takes_cache else "past_key_values"
    return ModelParts(
        config, decoder, layers, final_norm, head, paths[0], heads[0], sliding, attends, mixers, mask_argument,
        cache_argument,
    )  # fmt: skip


def _check_family(model: PreTrainedModel, decoder: nn.Module, config: Any) -> None:
    """Raise ValueError if the family has a part that a draft tree cannot drive."""
    is_stateful = getattr(model, "_is_stateful", False)
    reasons = {
        "it is an encoder-decoder": getattr(model.config, "is_encoder_decoder", False),
        "its layers carry a recurrent state, and no layer_types of its config say which": is_stateful
        and getattr(config, "layer_types", None) is None,
        "its attention is chunked": getattr(config, "attention_chunk_size", None) is not None,
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", False)
        or not getattr(config, "is_causal", True),
        "its positions are ALiBi biases": getattr(config, "alibi", False),
        "it takes no position_ids": "position_ids"
        not in inspect.signature(decoder.forward).parameters,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{type(model).__name__} cannot be a target: {reason}")


def _check_attention(family: str, config: Any) -> None:
    """Raise ValueError if the model runs with an attention that takes no tree mask, or leaves its cap out."""
    attention = config._attn_implementation
    if attention not in ATTENTION:
        raise ValueError(
            f"{family} runs with attention {attention!r}, which takes no tree mask: "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    if attention in ("sdpa", OURS) and getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{family} caps its attention logits, which attention 'sdpa' silently leaves out: "
            "load it with attn_implementation='eager'"
        )


def _decoder_layers(family: str, decoder: nn.Module, count: int) -> nn.ModuleList:
    """Return the decoder's only list of this many layers."""
    lists = [part for part in decoder.children() if isinstance(part, nn.ModuleList)]
    lists = [part for part in lists if len(part) == count]
    if len(lists) != 1:
        raise ValueError(f"{family}: found {len(lists)} lists of {count} decoder layers, not one")
    return lists[0]


def _final_norm(family: str, decoder: nn.Module) -> nn.Module:
    """Return the only norm outside the decoder's layers, or the one that is called so."""
    norms = [part for part in decoder.children() if "norm" in type(part).__name__.lower()]
    if len(norms) > 1:  # Gemma 4 norms what it adds in every layer, too
        norms = [part for name, part in decoder.named_children() if name == "norm"] or norms
    if len(norms) != 1:
        raise ValueError(
            f"{family}: found {len(norms)} norms outside the decoder layers, not one final norm"
        )
    return norms[0]


def _mixer(family: str, layer: nn.Module) -> nn.Module:
    """Return the layer's only module with a convolution over the text, which all recurrent mixers begin with."""
    mixers = [
        part
        for part in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children())
    ]
    if len(mixers) != 1:
        raise ValueError(
            f"{family} cannot be a target: a recurrent layer has {len(mixers)} modules with a convolution over the "
            "text, not one, so it is unclear which carries the state"
        )
    return mixers[0]


def _kinds(family: str, config: Any) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...]]:
    """Which layers slide, which attend, and which are recurrent."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        # else a stray field, which the family ignores
        declared = hasattr(type(config), "sliding_window")
        layers = config.num_hidden_layers
        return (declared and window is not None,) * layers, (True,) * layers, (False,) * layers
    foreign = sorted(set(types) - {*ATTENDS, *RECURRENT, *NO_MIXER})
    if foreign:
        raise ValueError(
            f"{family} cannot be a target: it has layers of type {', '.join(foreign)}; known are "
            f"{', '.join(dict.fromkeys((*ATTENDS, *RECURRENT, *NO_MIXER)))}"
        )
    sliding = tuple(ATTENDS.get(kind, False) and window is not None for kind in types)
    return (
        sliding,
        tuple(kind in ATTENDS for kind in types),
        tuple(kind in RECURRENT for kind in types),
    )


def rope_limit(config: Any) -> int | None:
    """Length beyond which the rotary frequencies depend on the sequence's length; None if they never do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = (
        [parameters]
        if "rope_type" in parameters
        else [p for p in parameters.values() if isinstance(p, dict)]
    )
    limits = []
    for kind in kinds:
        name = kind.get("rope_type") or "default"
        if name == "longrope" or "dynamic" in name:
            limits.append(
                kind.get("original_max_position_embeddings") or config.max_position_embeddings
            )
    return min(limits, default=None)
