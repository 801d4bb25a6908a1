"""Tiny targets with recurrent layers beside those with attention, for tests and benchmarks."""

from collections.abc import Callable

from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.target.zoo import MOE
from tests.target.zoo import SIZES as ZOO
from tests.tiny import HIDDEN, VOCAB

SIZES = {
    **ZOO,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = ["linear_attention", "full_attention"] * 2
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": KINDS,
}  # fmt: skip
EXPERTS = {**MOE, **SIZES, "num_experts": 4, "shared_expert_intermediate_size": 24}
MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=12)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**EXPERTS, **DELTA, head_dim=12)),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**SIZES, **MAMBA, mamba_chunk_size=8)),
    "nemotron_h": lambda: NemotronHForCausalLM(
        NemotronHConfig(
            **SIZES, layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
            mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8, head_dim=12,
        )
    ),
    "granite_4": lambda: GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SIZES, layer_types=KINDS, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
            mamba_chunk_size=8, num_local_experts=0, shared_intermediate_size=48, embedding_multiplier=2.0,
            logits_scaling=1.5, residual_multiplier=0.7,
        )
    ),
    "olmo_hybrid": lambda: OlmoHybridForCausalLM(
        OlmoHybridConfig(**SIZES, **{**DELTA, "linear_num_key_heads": 4})
    ),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2)),
}  # fmt: skip
