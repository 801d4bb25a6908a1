"""Tiny targets of many families for :mod:`benchmarks.served`, saved as directories that transformers and vLLM read.

Weights are random and large enough that a text depends on all of its tokens. Of the families in ``MARKOV`` the last
token mostly decides, so that a drafter that knows the law has drafts accepted.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn

from specdec.target import Target
from tests import perfect
from tests.tiny import HIDDEN, VOCAB

SPREAD = 0.2  # standard deviation of random matrices
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
# where a head is as wide as the model
PLAIN: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
SLIDING: dict[str, Any] = {
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
}  # fmt: skip
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED: dict[str, Any] = SPARSE | {
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
CAPPED: dict[str, Any] = {
    "query_pre_attn_scalar": 32,
    "final_logit_softcapping": 30.0,
    "attn_implementation": "eager",
}
MAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"], "mamba_num_heads": 4,
    "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "chunk_size": 8,
}  # fmt: skip


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """A config's rope block."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


YARN = rope(
    "yarn",
    factor=2.0,
    original_max_position_embeddings=128,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
)
LLAMA3 = rope(
    "llama3",
    factor=4.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
LONGROPE = rope(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=[1.0] * 16,
    long_factor=[2.0] * 16,
)


class Family(NamedTuple):
    """A class of transformers, and what its config says beside :data:`SIZES`."""

    name: str
    config: dict[str, Any]
    layers: int = 7
    vocabulary: int = VOCAB
    context: float = 0.0  # of a Markov target, how far its context leads it astray


MARKOV = {
    "Llama": Family("Llama", {}, context=0.75),
    "Llama, 4 layers": Family("Llama", {}, 4, context=0.75),
    "Llama, tied, 30 layers": Family("Llama", {"tie_word_embeddings": True}, 30, context=0.3),
    "Qwen2": Family("Qwen2", PLAIN, context=0.75),
    "Qwen3, 6 layers": Family("Qwen3", {}, 6, context=0.75),
    "Qwen3-MoE": Family("Qwen3Moe", SPARSE, context=0.4),
    "Mixtral": Family("Mixtral", LOCAL, context=0.4),
    "Mistral with a window": Family("Mistral", {"sliding_window": 16}, context=0.75),
    "Gemma": Family("Gemma", {}, context=0.75),
    "Gemma-2": Family("Gemma2", SLIDING | CAPPED, context=1.2),
    "Gemma-3": Family("Gemma3", SLIDING | {"query_pre_attn_scalar": 32}, context=0.75),
    "Phi-3": Family("Phi3", PLAIN, context=0.75),
    "Granite": Family(
        "Granite", PLAIN | {"logits_scaling": 3.0, "residual_multiplier": 0.5}, context=0.75
    ),
    "Cohere": Family("Cohere", PLAIN | {"logit_scale": 0.3}, context=0.75),
    "OLMo-2": Family("Olmo2", PLAIN, context=0.75),
    # a text without the recurrent state, which vLLM on a CPU does not put back where drafts are refused
    "Nemotron-H, last token alone": Family("NemotronH", MAMBA, 4),
    "GPT-OSS": Family("GptOss", LOCAL | YARN | {"sliding_window": 16}, context=0.4),
}
RANDOM = {
    "Mistral": Family("Mistral", {"sliding_window": None}, vocabulary=67),
    "Ministral, layers mixed": Family("Ministral", SLIDING, vocabulary=89),
    "Llama, linear rope": Family("Llama", rope("linear", factor=2.0), 9, 101),
    "Llama, llama3 rope": Family("Llama", LLAMA3, 8, 97),
    "Llama, yarn rope": Family("Llama", YARN, 7, 59),
    "Llama, dynamic rope": Family("Llama", rope("dynamic", factor=2.0)),
    "Llama, longrope": Family("Llama", LONGROPE),
    "Llama, 5 layers, 3 key heads": Family(
        "Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, 5, 103
    ),
    "Qwen3, hidden no multiple of heads": Family(
        "Qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}
    ),
    "Phi-3 with a window": Family("Phi3", PLAIN | {"sliding_window": 16}, vocabulary=71),
    "Starcoder2": Family("Starcoder2", PLAIN, vocabulary=73),
    "Starcoder2 with a window": Family("Starcoder2", PLAIN | {"sliding_window": 16}),
    "SmolLM3": Family("SmolLM3", PLAIN | {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1]}),
    "ERNIE-4.5": Family("Ernie4_5", {}, vocabulary=83),
    "ERNIE-4.5 MoE": Family(
        "Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    ),
    "OLMo": Family("Olmo", PLAIN),
    "OLMo-3": Family("Olmo3", PLAIN | SLIDING),
    "OLMoE": Family("Olmoe", PLAIN | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite MoE": Family(
        "GraniteMoe", PLAIN | LOCAL | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}
    ),
    "EXAONE-4": Family("Exaone4", SLIDING | {"sliding_window_pattern": 2}),
    "Cohere-2": Family("Cohere2", SLIDING | {"logit_scale": 0.5}),
    "Qwen2-MoE": Family("Qwen2Moe", PLAIN | SHARED),
    "GLM": Family("Glm", {"eos_token_id": [1]}),
    "GLM-4": Family("Glm4", {"eos_token_id": [1]}, vocabulary=79),
    "GLM-4 MoE": Family(
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
        },
    ),
    "StableLM": Family("StableLm", PLAIN),
    "Nemotron": Family("Nemotron", {}),
    "Apertus": Family("Apertus", {}),
    "Arcee": Family("Arcee", {}),
    "Seed-OSS": Family("SeedOss", {}),
    "Helium": Family("Helium", PLAIN),
    "HunYuan dense": Family("HunYuanDenseV1", {}),
    "Qwen3, tied": Family("Qwen3", {"tie_word_embeddings": True}, 11, 107),
    "Gemma-3, tied": Family(
        "Gemma3",
        SLIDING | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        vocabulary=109,
    ),
}
FAMILIES = MARKOV | RANDOM
BFLOAT16 = (
    "Apertus",
)  # vLLM keeps the numbers of its activation (xIELU) in bfloat16, as published checkpoints have them


def make_target(family: str, folder: Path) -> Target:
    """A target of a family, saved in ``folder`` with a tokenizer of one word a token."""
    name, more, layers, vocabulary, context = FAMILIES[family]
    model_class = getattr(hf, f"{name}ForCausalLM")
    torch.manual_seed(0)
    config = model_class.config_class(
        **SIZES | {"vocab_size": vocabulary} | more, num_hidden_layers=layers
    )
    model = model_class(config)
    if family in MARKOV:
        perfect.make_markov(model, context, layers=layers)
    else:
        spread_out(model)
    if family in BFLOAT16:
        model.bfloat16()
    model.float().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # what Qwen2's class keeps
    tokenizer.add_tokens([AddedToken(f"t{n}", normalized=False) for n in range(vocabulary)])
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return Target.load(folder)


@torch.no_grad()
def spread_out(model: nn.Module) -> None:
    """Random weights of which every part shows: matrices large, norms uneven."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=SPREAD)
        else:
            parameter.add_(torch.randn_like(parameter) * SPREAD)
