"""Targets that mostly look at the last token, and drafters, made by hand, that know it.

The successors of all tokens form one cycle through the vocabulary. The target's head points from every embedding to
its successor; what its layers add leads it astray now and then, as much as ``context`` says.

Legend: V vocabulary, H hidden.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Narrow
from specdec.target import Target
from tests.published import fill, published
from tests.tiny import HIDDEN, LAYERS, VOCAB, llama_config, presets

WINDOW = 5
OUTPUTS = tuple(
    f"{name}.weight" for name in ("o_proj", "out_proj", "down_proj", "dense", "fc2", "w2")
)
# of a target that is compiled; it wants more context to be led astray
SHALLOW: dict[str, Any] = {"layers": 3}
TAPPED: dict[str, Any] = {"aux_layers": (1, 2, 3)}  # of its drafters
RANK = 24  # channels that embeddings use: a drafter's values (2 heads of 12) can carry no more
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2) + ["sliding_attention"]


def successors(seed: int = 0) -> Tensor:
    """Next token of every token, (V,)."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    following = torch.empty(VOCAB, dtype=torch.int64)
    following[order] = order.roll(-1)
    return following


def embeddings(seed: int = 0) -> Tensor:
    """(V, H) of mean square one, so that an RMSNorm leaves them alone; channel 0 is the same for every token."""
    out = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
    directions = torch.randn(
        VOCAB, RANK - 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    out[:, 0] = 2
    out[:, 1:RANK] = torch.nn.functional.normalize(directions, dim=-1) * (HIDDEN - 4) ** 0.5
    return out


def _dimensions(head_dim: int) -> dict[str, object]:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    more = (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    config = llama_config(head_dim=head_dim)
    return {name: getattr(config, name) for name in (*names, *more)} | {"pad_token_id": None}


def _gemma2(head_dim: int) -> PreTrainedModel:
    config = Gemma2Config(
        **_dimensions(head_dim),
        sliding_window=WINDOW,
        layer_types=MIXED,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


FAMILIES: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": lambda head_dim: LlamaForCausalLM(llama_config(head_dim=head_dim)),
    "mistral": lambda head_dim: MistralForCausalLM(
        MistralConfig(**_dimensions(head_dim), sliding_window=WINDOW)
    ),
    "gemma2": _gemma2,
}


def markov_target(
    family: str = "llama",
    context: float = 0.0,
    seed: int = 0,
    head_dim: int = 12,
    layers: int = LAYERS,
) -> Target:
    """A float64 target whose next token is the last one's successor; always so with ``context`` 0.

    The sliding families look back ``WINDOW`` tokens. Fewer layers are compiled sooner.
    """
    torch.manual_seed(seed)
    return Target(make_markov(FAMILIES[family](head_dim), context, seed, layers))


@torch.no_grad()
def make_markov(
    model: PreTrainedModel, context: float, seed: int = 0, layers: int = LAYERS
) -> PreTrainedModel:
    """The weights of such a target, in float64, for a model of any family; the layers' by torch's own generator."""
    model, family = model.double().eval(), model.config.model_type
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.2)
        elif family == "gemma2" and "post_" in name:
            parameter.fill_(2 * context - 1)  # Gemma multiplies by one more than the weight
        if name.endswith(OUTPUTS) and family != "gemma2":
            parameter.mul_(context)
    model.get_input_embeddings().weight.copy_(embeddings(seed))
    model.get_output_embeddings().weight[successors(seed)] = embeddings(seed)
    return model


def astray(ids: list[int], seed: int = 0) -> int:
    """How many tokens after the first are not the successor of the one before: those that the context has changed."""
    following = successors(seed).tolist()
    return sum(following[a] != b for a, b in itertools.pairwise(ids))


@torch.no_grad()
def perfect_drafter(
    target: Target, spec: DrafterSpec, seed: int = 0, sharpness: float = 20.0
) -> Drafter:
    """A drafter that says the successor of the token it reads: ``markov_target``'s own law, when context is 0.

    Entry Narrow copies the embedding through. Entry Wide reaches it by attention alone: each node attends to itself,
    the more exclusively the higher ``sharpness``, and its value takes the embedding in and the old feature out.
    """
    head_dim = getattr(target.config, "head_dim", None) or 12
    sizes = {
        "vocab_size": VOCAB,
        "num_target_layers": target.num_layers,
        "identity": {"source": "tiny"},
    }
    config = DrafterConfig.for_target(spec, llama_config(head_dim=head_dim), **sizes)
    size = config.draft_vocab_size
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    drafter = Drafter(config, ids).double().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        parameter.fill_(1 if "norm" in name else 0)
    w = {name: weight.clone() for name, weight in published(drafter).items()}
    w["embed_tokens.weight"] = target.embedding_weight()
    w["lm_head.weight"] = target.head_weight()[ids]
    eye = torch.eye(HIDDEN, dtype=torch.float64)
    if isinstance(spec.entry, Narrow):
        w["entry.fc.weight"][:, :HIDDEN] = eye
    else:
        at, width = "layers.layers.0.attention", config.head_dim
        w[f"{at}.q_proj.weight"][:, 0] = w[f"{at}.k_proj.weight"][:, 0] = sharpness
        w[f"{at}.v_proj.weight"][:RANK] = torch.cat([eye, -eye], dim=1)[:RANK]
        per_group = config.num_attention_heads // config.num_key_value_heads * width
        for channel in range(RANK):
            w[f"{at}.o_proj.weight"][channel, channel // width * per_group + channel % width] = 1
    fill(drafter, w)
    return drafter


@torch.no_grad()
def worst_drafter(target: Target, **changes: Any) -> Drafter:
    """One that knows the target's law and drafts what is least likely by it."""
    drafter = perfect_drafter(
        target, replace(presets()["eagle3_1"], draft_vocab_size="all", **changes)
    )
    drafter.lm_head.weight.neg_()
    return drafter


@torch.no_grad()
def disturb(drafter: Drafter, level: float, seed: int = 0) -> Drafter:
    """Noise on every matrix but the embedding, in place: the feature, the context and the depth come into play."""
    generator = torch.Generator().manual_seed(seed)
    w = published(drafter)
    for name, weight in w.items():
        if weight.ndim > 1 and "embed_tokens" not in name:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            w[name] = (
                weight + level * (1.0 if "lm_head" in name else weight.shape[1] ** -0.5) * noise
            )
    fill(drafter, w)
    return drafter
