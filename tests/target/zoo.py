"""Tiny, randomly initialised models of many families, far enough from zero for every part to matter."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCAB, WIDTH, LAYERS, WINDOW = 96, 32, 4, 5
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
GEMMA = {
    **SIZES,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": MIXED,
    "tie_word_embeddings": True,
}
MOE = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def gemma3_wrapper() -> PreTrainedModel:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Gemma3Config(
        text_config=GEMMA,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    return Gemma3ForConditionalGeneration(config)


def gemma4_wrapper() -> PreTrainedModel:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    text = {
        **GEMMA,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    }
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))


def qwen3_vl() -> PreTrainedModel:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
    }
    vision |= {"out_hidden_size": WIDTH, "deepstack_visual_indexes": [0]}
    text = {**SIZES, "head_dim": 16, "rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


def mistral3() -> PreTrainedModel:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", **SIZES}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))


def gpt_oss() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(
        GptOssConfig(**SIZES, **experts, **WINDOWED, head_dim=8, rope_parameters=rope)
    )


TIED = {**SIZES, "tie_word_embeddings": True}
WINDOWED = {"sliding_window": WINDOW, "layer_types": MIXED}
CAPPED = {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "attn_implementation": "eager",
}
UPPER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MULTIPLIERS = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
OLD = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {**OLD, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
OPT = {
    **OLD,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "ffn_dim": 48,
    "num_hidden_layers": LAYERS,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**TIED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2_windows_above": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **UPPER)),
    # 4 heads of 16 are not 32 wide
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA, **CAPPED)),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "gemma3_wrapper": gemma3_wrapper,
    "gemma4_wrapper": gemma4_wrapper,
    "qwen3_vl": qwen3_vl,
    "mistral3": mistral3,
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),  # a bias on the output head
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=WINDOW)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **MULTIPLIERS)),
    "hyperclovax": lambda: HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SIZES, logits_scaling=3.0)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**TIED, **WINDOWED, logit_scale=0.3)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**OPT, num_attention_heads=4, max_position_embeddings=128)
    ),
    "gpt_oss": gpt_oss,
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=4, head_dim=8)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**MOE, **EXPERTS, **LATENT})),
}
SINGLE = {"gpt_oss", "qwen3_moe", "deepseek_v3"}  # their grouped matrix product has no float64


def massive() -> PreTrainedModel:
    """Thirty layers, in which rounding grows; token 3, a proof's first, gets a massive activation."""
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 30}))


def make(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in float64, or float32 where that is all a family can do."""
    torch.manual_seed(seed)
    model = {**FAMILIES, "massive": massive}[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if family == "massive":
            model.get_input_embeddings().weight[3, 7] = 300
    return model.eval() if family in SINGLE else model.double().eval()


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 88, (1, length), generator=torch.Generator().manual_seed(seed))


def own_logits(model: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids_1T, use_cache=False).logits


def assert_close(ours: Tensor, own: Tensor) -> None:
    # norms and softmax are float32 in most families
    tolerance = 1e-5 if own.dtype == torch.float64 else 2e-4
    torch.testing.assert_close(ours, own, rtol=tolerance, atol=tolerance)
