"""Targets of several families that mostly say the last token's successor, and drafters fitted to them in seconds.

The successors of all tokens form one cycle through the vocabulary. A target's head points from every embedding to its
successor; what its random layers add to the residual stream leads it astray now and then, so that texts do not repeat
themselves and a fitted drafter is right often and wrong often.

Legend: B rows, T tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdec.data import Batch
from specdec.drafter import Concat, Drafter, DrafterConfig, DrafterSpec, LastLayer, Narrow, Norms, PreNorm
from specdec.target import Target
from specdec.training.objective import Recipe, objective, teach

VOCAB, HIDDEN, LAYERS, WINDOW = 96, 48, 4, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",
}  # in all dtypes, compiled too

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **SLIDING)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)),
}
CONTEXT = {"llama": 0.5, "qwen3": 0.5, "gemma3": 0.9, "mixtral": 0.5}  # how far the layers lead astray

EAGLE1 = DrafterSpec(LastLayer(), Narrow(), Norms(embed=False, hidden=False, output=False), PreNorm(), "target", "all")
EAGLE3 = DrafterSpec(Concat(), norms=Norms(), recurrence=PreNorm(), draft_vocab_size=80, aux_layers=[1, 2, 3])
EAGLE3_1 = DrafterSpec(draft_vocab_size="all", aux_layers=[1, 2, 3])
SPECS = {"llama": EAGLE3_1, "qwen3": EAGLE3, "gemma3": EAGLE3_1, "mixtral": EAGLE1}


def successors(seed: int = 0) -> Tensor:
    """Next token of every token, (V,)."""
    order_V = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    following_V = torch.empty_like(order_V)
    following_V[order_V] = order_V.roll(-1)
    return following_V


@torch.no_grad()
def random_target(family: str, dtype: torch.dtype, seed: int = 0) -> Target:
    """A target of a family; the same weights in every dtype."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().double()
    width = HIDDEN**0.5 if family.startswith("gemma") else 1.0  # which it multiplies embeddings by
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.2)
        elif family.startswith("gemma") and "post_" in name:
            weight.fill_(CONTEXT[family] - 1)  # it multiplies by one more
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) and not family.startswith("gemma"):
            weight.mul_(CONTEXT[family])
    directions_VH = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, dtype=torch.float64), dim=-1)
    model.get_input_embeddings().weight.copy_(directions_VH * HIDDEN**0.5 / width)
    model.get_output_embeddings().weight[successors(seed)] = directions_VH * HIDDEN**0.5
    return Target(model.float().to(dtype))


def walks(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids (B, T) that go from successor to successor, and elsewhere every fourth time."""
    following_V = successors()
    ids = [torch.randint(VOCAB, (rows,), generator=generator)]
    for _ in range(length - 1):
        astray_B = torch.rand(rows, generator=generator) < 0.25
        ids.append(torch.where(astray_B, torch.randint(VOCAB, (rows,), generator=generator), following_V[ids[-1]]))
    return torch.stack(ids, 1)


def fitted(target: Target, spec: DrafterSpec, ids: Iterator[Tensor], lr: float = 4e-3) -> Drafter:
    """A drafter trained by specdec's own objective, one step for each of ``ids``, (B, T) int64."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(
        spec, target.config, vocab_size=target.vocab_size, num_target_layers=target.num_layers, identity=target.identity
    )
    known_D = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, known_D)
    drafter.warm_start(target.embedding_weight().float(), target.head_weight().float(), torch.ones(target.hidden_size))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    recipe = Recipe(steps=4)
    for ids_BT in ids:
        batch = Batch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT))
        loss = objective(drafter, batch, teach(target, drafter, batch, recipe, False), recipe, False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False)
