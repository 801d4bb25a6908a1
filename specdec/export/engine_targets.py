"""The properties of targets that engines differ in, and the classes of targets that they treat in special ways.

A class goes by the name that the target's ``config.json`` gives.
"""

from typing import Any

from specdec.export.tensors import Raw

THROUGH_TRANSFORMERS = ["--model-impl", "transformers"]


def _causal(names: str) -> set[str]:
    return {f"{name}ForCausalLM" for name in names.split()}


def _conditional(names: str) -> set[str]:
    return {f"{name}ForConditionalGeneration" for name in names.split()}


# The classes of vLLM 0.32.0 that hand states to method eagle3, as tests/export/vllm_source.py finds them in that
# version's registry, for text and for images. Where a class does not, vLLM's Transformers backend runs the model.
EAGLE3_TARGETS = _causal(
    "Afmoe Apertus Cohere2Moe Deepseek DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DeepseekV41 Ernie4_5 Gemma4 "
    "Glm5Next GlmMoeDsa GptOss Granite GraniteSWA IQuestCoder InternLM3 K2Horizon KimiLinear LLaMA Laguna Llama "
    "Llama4 MiMo MiMoV2 MiMoV2Flash MiMoV2Omni MiniCPM MiniCPM3 MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral "
    "MistralLarge3 MuseGlimmer NemotronH NemotronHPuzzle Phi3 Plamo3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 "
    "Qwen3_5Moe SarvamMLA Step1 TeleChat2 TeleChat3 TeleFLM"
)
EAGLE3_TARGETS |= _conditional(
    "CohereCompass Cosmos3 DeepseekV4 Exaone4_5_ Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius "
    "InternS2Preview KimiK25 KimiK3 LightOnOCR Llama4 Llava MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 "
    "MuseGlimmer OpenCUA Pixtral Qwen2_5_VL Qwen3ASR Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
EAGLE3_TARGETS |= {
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "Qwen3ASRRealtimeGeneration",
}

# The classes of SGLang 0.5.23 with set_eagle3_layers_to_capture. This list and the next one were found by walking
# srt/models/*.py with ast, inheritance included.
SGLANG_EAGLE3_TARGETS = _causal(
    "Apertus BailingMoE BailingMoe BailingMoeV2 DeepseekV2 DeepseekV3 DeepseekV32 ExaoneMoE ExaoneMoe Gemma3 Gemma4 "
    "Glm4Moe Glm4MoeLite GlmMoeDsa GptOss IQuestCoder InternLM3 Llama Llama4 LongcatFlash Mellum MiniMaxM2 "
    "MiniMaxM3Sparse Ministral3 Mistral MistralLarge3 Phi3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe SarvamMoE "
    "TeleFLM"
)
SGLANG_EAGLE3_TARGETS |= _conditional(
    "Cosmos3 Gemma3 Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius InternS2Preview KimiK25 Llama4 "
    "MiniMaxM3Sparse Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
# Every method asks for get_embed_and_head; these classes have it, and no set_eagle3_layers_to_capture.
SGLANG_EAGLE_TARGETS = SGLANG_EAGLE3_TARGETS | _causal(
    "BailingMoeV2_5 BailingMoeV3 DeepseekV4 Dots3Note DotsOCR Ernie4_5_ Ernie4_5_Moe Exaone4 FalconH1 GigaChat35 Glm4 "
    "HYV3 HYV4 IQuestQ1 Laguna LlavaLlama LlavaMistral LlavaQwen MiMo MiMoV2 MiMoV2ASR MiMoV2Flash Nanbeige NemotronH "
    "NemotronHPuzzle OPT Spark2_5 Step3p5 YiVL"
)
SGLANG_EAGLE_TARGETS |= _conditional(
    "Glm4v Glm4vMoe GlmOcr Inkling LightOnOCR Llava Mistral3 PaddleOCRVL Pixtral Step3p7"
)
# Classes of SGLang in which ids mean the outputs of layers only if the first id is 1.
SGLANG_SHIFTED = _causal("DeepseekV2 DeepseekV3 DeepseekV32 Glm4MoeLite GlmMoeDsa MistralLarge3")
SGLANG_SHIFTED |= _conditional("KimiK25")
# Classes of SGLang that reach the state after their last layer.
SGLANG_LAST = _causal("GptOss MiniMaxM3Sparse")

# The classes whose layers' inputs llama.cpp b11434 keeps for a drafter: those of src/models/*.cpp that fill t_layer_inp
# with one layer's input, by the names that its conversion/*.py registers. With any other its server ends at start.
LLAMA_CPP_TARGETS = _causal(
    "BailingMoeV3 Gemma4 GptOss IQuestCoder InternLM3 LLaMA Lfm2 Llama MiMoV2 MiMoV2Flash MiniMaxM1 MiniMaxM2 "
    "MiniMaxText01 Mistral Mixtral Nanbeige NemotronH Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe"
)
LLAMA_CPP_TARGETS |= _conditional("Gemma4 Gemma4Unified HunYuanVL MuseGlimmer Qwen3_5 Qwen3_5Moe")
# Those of them that fill t_h_nextn, the state after the last layer; others hand out what the buffer held before.
LLAMA_CPP_LAST = _causal(
    "BailingMoeV3 Gemma4 GptOss MiMoV2 MiMoV2Flash NemotronH Qwen3Next Qwen3_5 Qwen3_5Moe"
)
LLAMA_CPP_LAST |= _conditional("Gemma4 Gemma4Unified Qwen3_5 Qwen3_5Moe")

# Classes of vLLM without a head that method eagle can share.
HEADLESS_TARGETS = _causal("Cohere Cohere2 Cohere2Moe Gemma2 Gemma3n")
# Classes of vLLM that set is_neox_style=False on what get_rope keeps for all who ask by the same parameters.
ROPE_CHANGED = _causal("Ernie4_5")
# Classes of transformers whose embedding module multiplies what it looks up; vLLM's own classes do so outside of it.
_SCALED = "Gemma Gemma2 Gemma3 Gemma3n VaultGemma MiniCPM3"
SCALED_EMBEDDINGS = _causal(_SCALED) | _conditional(_SCALED)


def window_of_all_layers(hf_config: Any) -> int | None:
    """Return the window that vLLM puts into its cache's config if every layer of a target slides, else None.

    Args:
        hf_config: the target's transformers config of its text model.

    Source: vLLM 0.32.0, ``engine/arg_utils.py``, ``create_engine_config``; 0 is no window to ``config/model.py``.
    """
    kinds = getattr(hf_config, "layer_types", None)
    all_slide = kinds is None or all(kind == "sliding_attention" for kind in kinds)
    return (getattr(hf_config, "sliding_window", None) or None) if all_slide else None


def heads_of_mixed(hf_config: Any) -> tuple[int, int] | None:
    """Return key heads and head size of a target with several kinds of layers (sliding, full, recurrent), else None.

    vLLM 0.32.0 divides layers with equal caches into groups of one size, and refuses drafters of several layers that
    come to lie in different groups (``validate_same_kv_cache_group``). A drafter with other heads has a group alone.

    Args:
        hf_config: the target's transformers config of its text model.
    """
    kinds = (
        getattr(hf_config, "layer_types", None)
        or getattr(hf_config, "layers_block_type", None)
        or ()
    )
    if len(set(kinds) - {"mlp", "moe"}) < 2:
        return None
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return getattr(hf_config, "num_key_value_heads", None) or heads, head_dim


def target_facts(hf_config: Any, architecture: str) -> Raw:
    """Return the fields of :class:`Subject` that depend on the target alone.

    Args:
        hf_config: the target's transformers config of its text model.
        architecture: as its ``config.json`` names the class.
    """
    return {
        "architecture": architecture,
        "target_window": window_of_all_layers(hf_config),
        "mixed_heads": heads_of_mixed(hf_config),
    }


def target_flags(architecture: str, method: str) -> list[str]:
    """Return the flags of ``vllm serve`` that a target of this class needs in order to be drafted for.

    Args:
        architecture: of the target, as its ``config.json`` names the class.
        method: the drafter's, as engines call it.
    """
    if method == "eagle":
        return THROUGH_TRANSFORMERS if architecture in HEADLESS_TARGETS else []
    return [] if architecture in EAGLE3_TARGETS else THROUGH_TRANSFORMERS
