"""The engine matrix: what of a drafter which engine honours. The exporter refuses by it and the docs show it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

from specdec.drafter import (
    GQA,
    MLA,
    Concat,
    DrafterConfig,
    KVInjection,
    LastLayer,
    MaskBlock,
    MaskConstant,
    Narrow,
    PostNorm,
    PreNorm,
    ScalarMix,
    TargetLayer,
    TargetNorm,
    Wide,
)
from specdec.utils.vllm import hands_over_states

VLLM = "vLLM 0.32.0"
SGLANG = "SGLang 0.5.23"
ENGINES = (VLLM, SGLANG)  # that exports are written for, and refused by
VLLM_NEXT = "vLLM 0.33.0"
LLAMA_CPP = "llama.cpp (llama-cpp-python 0.3.36)"
OPENVINO = "OpenVINO GenAI 2026.4.1"
MLX_VLM = "mlx-vlm 0.7.10"
LMDEPLOY = "LMDeploy 0.18"
TENSORRT = "TensorRT-LLM"
TRANSFORMERS = "transformers 5.24"
# that users load exports with
OTHERS = (VLLM_NEXT, LLAMA_CPP, OPENVINO, MLX_VLM, LMDEPLOY, TENSORRT, TRANSFORMERS)

LATENT_WIDTHS = (320, 512, 576)  # that vLLM's kernels of latent attention know
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

# of vLLM 0.32.0's own classes: those that hand states to method eagle3, and those without a head that method eagle
# can share; where its class lacks what is needed, vLLM's Transformers backend runs the model instead. The first list is
# what specdec.utils.vllm.hands_over_states says of every architecture in that version's registry, of text or images
_STATES = (
    "Afmoe Apertus Cohere2Moe Deepseek DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DeepseekV41 Ernie4_5 Gemma4 "
    "Glm5Next GlmMoeDsa GptOss Granite GraniteSWA IQuestCoder InternLM3 K2Horizon KimiLinear LLaMA Laguna Llama "
    "Llama4 MiMo MiMoV2 MiMoV2Flash MiMoV2Omni MiniCPM MiniCPM3 MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral "
    "MistralLarge3 MuseGlimmer NemotronH NemotronHPuzzle Phi3 Plamo3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 "
    "Qwen3_5Moe SarvamMLA Step1 TeleChat2 TeleChat3 TeleFLM"
)
_IMAGES = (
    "CohereCompass Cosmos3 DeepseekV4 Exaone4_5_ Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius "
    "InternS2Preview KimiK25 KimiK3 LightOnOCR Llama4 Llava MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 "
    "MuseGlimmer OpenCUA Pixtral Qwen2_5_VL Qwen3ASR Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
EAGLE3_TARGETS = {f"{name}ForCausalLM" for name in _STATES.split()}
EAGLE3_TARGETS |= {f"{name}ForConditionalGeneration" for name in _IMAGES.split()}
EAGLE3_TARGETS |= {f"NemotronH_{name}_Reasoning_V3" for name in ("Nano_Omni", "Super_Omni")}
EAGLE3_TARGETS |= {
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "Qwen3ASRRealtimeGeneration",
}
# of SGLang 0.5.23's classes, those that have set_eagle3_layers_to_capture, and those without it that have
# get_embed_and_head, which every method asks for: found by walking srt/models/*.py with ast, inheritance included
_SGLANG_STATES = (
    "Apertus BailingMoE BailingMoe BailingMoeV2 DeepseekV2 DeepseekV3 DeepseekV32 ExaoneMoE ExaoneMoe Gemma3 Gemma4 "
    "Glm4Moe Glm4MoeLite GlmMoeDsa GptOss IQuestCoder InternLM3 Llama Llama4 LongcatFlash Mellum MiniMaxM2 "
    "MiniMaxM3Sparse Ministral3 Mistral MistralLarge3 Phi3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe SarvamMoE "
    "TeleFLM"
)
_SGLANG_IMAGES = (
    "Cosmos3 Gemma3 Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius InternS2Preview KimiK25 Llama4 "
    "MiniMaxM3Sparse Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp"
)
_SGLANG_HEADS = (
    "BailingMoeV2_5 BailingMoeV3 DeepseekV4 Dots3Note DotsOCR Ernie4_5_ Ernie4_5_Moe Exaone4 FalconH1 GigaChat35 Glm4 "
    "HYV3 HYV4 IQuestQ1 Laguna LlavaLlama LlavaMistral LlavaQwen MiMo MiMoV2 MiMoV2ASR MiMoV2Flash Nanbeige NemotronH "
    "NemotronHPuzzle OPT Spark2_5 Step3p5 YiVL"
)
_SGLANG_IMAGE_HEADS = (
    "Glm4v Glm4vMoe GlmOcr Inkling LightOnOCR Llava Mistral3 PaddleOCRVL Pixtral Step3p7"
)
SGLANG_EAGLE3_TARGETS = {f"{name}ForCausalLM" for name in _SGLANG_STATES.split()}
SGLANG_EAGLE3_TARGETS |= {f"{name}ForConditionalGeneration" for name in _SGLANG_IMAGES.split()}
SGLANG_EAGLE_TARGETS = SGLANG_EAGLE3_TARGETS | {
    f"{name}ForCausalLM" for name in _SGLANG_HEADS.split()
}
SGLANG_EAGLE_TARGETS |= {f"{name}ForConditionalGeneration" for name in _SGLANG_IMAGE_HEADS.split()}
# those that number otherwise: ids are of layers' outputs only if the first id is 1
_SHIFTED = "DeepseekV2 DeepseekV3 DeepseekV32 Glm4MoeLite GlmMoeDsa MistralLarge3"
SGLANG_SHIFTED = {f"{name}ForCausalLM" for name in _SHIFTED.split()} | {
    "KimiK25ForConditionalGeneration"
}
# those that reach the state after their last layer
SGLANG_LAST = {"GptOssForCausalLM", "MiniMaxM3SparseForCausalLM"}
HEADLESS_TARGETS = {
    f"{name}ForCausalLM" for name in ("Cohere", "Cohere2", "Cohere2Moe", "Gemma2", "Gemma3n")
}
# classes of vLLM that set is_neox_style=False on what get_rope keeps for all who ask by the same parameters
ROPE_CHANGED = {"Ernie4_5ForCausalLM"}
THROUGH_TRANSFORMERS = ["--model-impl", "transformers"]
# classes of transformers whose embedding module multiplies what it looks up; vLLM's own classes do so outside of it
SCALED_EMBEDDINGS = {
    f"{name}{kind}" for name in ("Gemma", "Gemma2", "Gemma3", "Gemma3n", "VaultGemma", "MiniCPM3")
    for kind in ("ForCausalLM", "ForConditionalGeneration")
}  # fmt: skip


class Subject(NamedTuple):
    """What is to be served, as far as engines differ in it."""

    config: DrafterConfig
    own_embedding: bool  # whether the token embedding is another than the target's
    own_head: bool  # whether the head knows fewer tokens than the target's, or has other weights
    entry_bias: bool  # whether a narrow entry adds a bias that is not zero
    architecture: str = ""  # of the target, as its config.json names the class
    # of a target whose every layer slides; see :func:`window_of_all_layers`
    target_window: int | None = None
    # of a target of several kinds of layers; see :func:`heads_of_mixed`
    mixed_heads: tuple[int, int] | None = None

    @property
    def method(self) -> str:
        """What engines call the drafter's kind: ``eagle`` is EAGLE-1 and 2, ``eagle3`` EAGLE-3 to 3.1, P-EAGLE too."""
        if method := self.config.drafting.engine_method:
            return method
        wide = isinstance(self.config.entry, Wide)
        return "eagle" if isinstance(self.config.fusion, LastLayer) and not wide else "eagle3"

    @property
    def fused(self) -> bool:
        """Whether it is a drafter of method eagle3 that reads the states at its boundaries, and not the last one."""
        return self.method == "eagle3" and self.config.fusion.mixes

    @property
    def parallel(self) -> bool:
        """Whether its drafts come of one call, which engines are told of method eagle3."""
        return self.config.drafting.one_call and self.method == "eagle3"

    @property
    def narrowed(self) -> bool:
        """Whether vLLM would give the target's window to a drafter that attends to everything: its layers take what
        ``cache_config.sliding_window`` says if they name none, but for MLA's."""
        sees_all = self.config.attention_window == "full" and type(self.config.attention) is not MLA
        return self.target_window is not None and sees_all

    @property
    def through_transformers(self) -> bool:
        """Whether vLLM runs the target through its Transformers backend for this drafter."""
        return (
            bool(self.architecture)
            and target_flags(self.architecture, self.method) == THROUGH_TRANSFORMERS
        )

    @property
    def spread(self) -> bool:
        """Whether vLLM may put the drafter's layers into several groups of its cache, which it does not draft with."""
        heads = self.config.num_key_value_heads, self.config.head_dim
        return self.config.num_layers > 1 and self.mixed_heads == heads

    @property
    def embedding_is_scaled(self) -> bool:
        """Whether vLLM would hand the drafter the target's embedding with a scale in it, and no norm takes that out."""
        shared = self.method != "eagle3" and not self.own_embedding
        return shared and self.architecture in SCALED_EMBEDDINGS and self.through_transformers

    @property
    def rope_is_changed(self) -> bool:
        """Whether vLLM's class of the target changes its rope, which a drafter with equal parameters is given too."""
        return self.architecture in ROPE_CHANGED

    @property
    def shared(self) -> tuple[str, ...]:
        """Weights that are the target's and stay with it."""
        left = self.method == "eagle" or (self.method == "dflash" and not self.own_head)
        return (() if self.own_embedding else (EMBEDDING,)) + ((HEAD,) if left else ())


def window_of_all_layers(hf_config: Any) -> int | None:
    """The window that vLLM puts into its cache's config, where every layer of a target slides; None otherwise.

    Args:
        hf_config: the target's transformers config of its text model.

    Source: vLLM 0.32.0, ``engine/arg_utils.py``, ``create_engine_config``; 0 is no window to ``config/model.py``.
    """
    kinds = getattr(hf_config, "layer_types", None)
    all_slide = kinds is None or all(kind == "sliding_attention" for kind in kinds)
    return (getattr(hf_config, "sliding_window", None) or None) if all_slide else None


def heads_of_mixed(hf_config: Any) -> tuple[int, int] | None:
    """Key heads and head size of a target whose layers keep their past in several ways (sliding, full, recurrent).

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


def target_facts(hf_config: Any, architecture: str) -> dict[str, Any]:
    """The fields of :class:`Subject` that are the target's.

    Args:
        hf_config: the target's transformers config of its text model.
        architecture: as its ``config.json`` names the class.
    """
    return {
        "architecture": architecture,
        "target_window": window_of_all_layers(hf_config),
        "mixed_heads": heads_of_mixed(hf_config),
    }


def target_flags(architecture: str, method: str, python: str | None = None) -> list[str]:
    """The flags of ``vllm serve`` without which a target of this class would not be drafted for.

    Args:
        architecture: of the target, as its ``config.json`` names the class.
        method: the drafter's, as engines call it.
        python: whose vLLM will serve; its source is asked, where it tells, in place of the table of vLLM 0.32.0.
    """
    if method == "eagle":
        return THROUGH_TRANSFORMERS if architecture in HEADLESS_TARGETS else []
    native = hands_over_states(python, architecture) if python else None
    if native is None:
        native = architecture in EAGLE3_TARGETS
    return [] if native else THROUGH_TRANSFORMERS


# the evidence of a cell
RUN = "run"
SOURCE = "source"
UNCHECKED = "not checked"


class EngineCell(NamedTuple):
    """What an engine's version makes of a switch."""

    lacks: str = ""  # why it does not honour the switch; nothing if it does
    # the first release whose source has it, where earlier ones were seen to lack it
    since: str = ""
    evidence: str = SOURCE
    # whether it loads such a drafter all the same, and drafts otherwise without a word
    silent: bool = False
    # where it honours the switch after all
    but: Callable[["Subject"], bool] = lambda subject: False

    @property
    def words(self) -> str:
        """For a table."""
        if self.evidence == UNCHECKED and not self.lacks:
            return UNCHECKED
        verdict = "**dropped in silence**" if self.silent else "**no**" if self.lacks else "yes"
        lacks = self.lacks.replace("{architecture}", "the target")
        reason = f": {lacks}" if lacks else f", since {self.since}" if self.since else ""
        return f"{verdict}{reason} ({self.evidence})"


NOT_CHECKED = EngineCell(evidence=UNCHECKED)


class Switch(NamedTuple):
    """One row of the matrix: a drafter's property, and what engines make of it.

    The first two engines' cells are written in short: an empty text says that the engine honours the switch, any other
    why it does not. What they say was read in the version's source if it was not run.
    """

    name: str
    used: Callable[[Subject], bool]
    vllm: str = ""
    sglang: str = ""
    vllm_since: str = ""
    sglang_since: str = ""
    ran: bool = False  # whether a real vLLM of that version proposed what the drafter says
    checked: bool = True  # whether SGLang's cell was; where not, it is refused
    others: Mapping[str, EngineCell] = {}

    def cell(self, engine: str) -> EngineCell:
        """What an engine makes of it."""
        if engine == VLLM:
            return EngineCell(self.vllm, self.vllm_since, RUN if self.ran else SOURCE)
        if engine == SGLANG:
            return EngineCell(self.sglang, self.sglang_since, SOURCE if self.checked else UNCHECKED)
        return self.others.get(engine, NOT_CHECKED)


def _has(*engines: str) -> dict[str, EngineCell]:
    return {engine: EngineCell() for engine in engines}


def _drops(reason: str, *engines: str) -> dict[str, EngineCell]:
    return {engine: EngineCell(reason, silent=True) for engine in engines}


def _no(reason: str, *engines: str) -> dict[str, EngineCell]:
    return {engine: EngineCell(reason) for engine in engines}


class _Both(TypedDict):
    vllm: str
    sglang: str


def _both(reason: str) -> _Both:
    return {"vllm": reason, "sglang": reason}


def _eagle(used: Callable[[DrafterConfig], object]) -> Callable[[Subject], bool]:
    return lambda s: s.method == "eagle" and bool(used(s.config))


def _eagle3(used: Callable[[DrafterConfig], object]) -> Callable[[Subject], bool]:
    return lambda s: s.method == "eagle3" and bool(used(s.config))


def _fused(used: Callable[[DrafterConfig], object]) -> Callable[[Subject], bool]:
    return lambda s: s.fused and bool(used(s.config))


def _dflash(used: Callable[[DrafterConfig], object]) -> Callable[[Subject], bool]:
    return lambda s: s.method == "dflash" and bool(used(s.config))


def _any(used: Callable[[DrafterConfig], object]) -> Callable[[Subject], bool]:
    return lambda s: bool(used(s.config))


# by rope_type, why vLLM and why SGLang do not honour it; nothing if they do
_NO_EAGLE = "its generate has no EAGLE"
_LMDEPLOY = {
    LMDEPLOY: EngineCell(
        "only its class with MLA reads it",
        silent=True,
        but=lambda s: type(s.config.attention) is MLA,
    )
}
_UNKNOWN = "its frequencies are not known to be ours"
ROPE_KINDS = dict.fromkeys(("default", "linear", "llama3", "yarn"), ("", "")) | {
    "dynamic": ("", _UNKNOWN),
    "longrope": ("the short or long factors are chosen by the server's max_model_len", _UNKNOWN),
}
_ROPE_KEYS = {
    "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor",
    "low_freq_factor", "high_freq_factor",  # llama3
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",  # yarn
    "short_factor", "long_factor",  # longrope
}  # fmt: skip

SWITCHES = (
    # EAGLE-1 and 2
    Switch("method eagle: fusion LastLayer, entry Narrow", lambda s: s.method == "eagle", ran=True,
           others=_has(VLLM_NEXT) | _no(_NO_EAGLE, TRANSFORMERS)),
    Switch("method eagle, target of a class without get_embed_and_head in SGLang",
           lambda s: s.method == "eagle" and bool(s.architecture) and s.architecture not in SGLANG_EAGLE_TARGETS,
           sglang="its class for {architecture} hands over no head, and the server ends at start: use --format vllm",
           ran=True),
    Switch("entry.bias=true, the bias not zero", lambda s: s.method == "eagle" and s.entry_bias,
           vllm="fc.bias is dropped without a word: train with entry.bias=false"),
    *(Switch(f"norms.{site}, with method eagle", _eagle(lambda c, site=site: getattr(c.norms, site)),  # type: ignore[misc]
             **_both("method eagle has no such norm"))
      for site in ("embed", "hidden", "input", "output", "query_key")),
    Switch("a head of its own, with method eagle", lambda s: s.method == "eagle" and s.own_head,
           **_both("method eagle reads the target's head: train with head=target")),
    # EAGLE-3 and 3.1
    Switch("method eagle3: fusion Concat, entry Wide", _fused(lambda c: True), ran=True,
           others=_has(VLLM_NEXT, LLAMA_CPP, OPENVINO, MLX_VLM, LMDEPLOY, TENSORRT) | _no(_NO_EAGLE, TRANSFORMERS)),
    Switch("fusion LastLayer with entry Wide (use_aux_hidden_state=false)",
           _eagle3(lambda c: type(c.fusion) is LastLayer), sglang="what it makes of such a config was not compared",
           ran=True, checked=False),
    Switch("method eagle3, target of a class without set_eagle3_layers_to_capture in SGLang",
           lambda s: s.method == "eagle3" and bool(s.architecture) and s.architecture not in SGLANG_EAGLE3_TARGETS,
           sglang="its class for {architecture} has no set_eagle3_layers_to_capture, and the server ends at start: "
           "use --format vllm", ran=True),
    Switch("fusion ScalarMix", _any(lambda c: type(c.fusion) is ScalarMix),
           **_both("states are concatenated, there are no weights for them")),
    Switch("entry Narrow, with method eagle3", _eagle3(lambda c: type(c.entry) is Narrow),
           **_both("the layer reads embedding and feature side by side: use entry Wide")),
    *(Switch(f"norms.{site}=false, with method eagle3", _eagle3(lambda c, site=site: not getattr(c.norms, site)),  # type: ignore[misc]
             **_both("method eagle3 always has this norm")) for site in ("embed", "hidden", "output")),
    Switch("norms.aux=each (fc_norm)", _any(lambda c: c.norms.aux == "each"),
           vllm_since="0.22.0", sglang_since="0.5.12", ran=True,
           others=_has(VLLM_NEXT, TENSORRT) | _no("its converter refuses fc_norm.*", LLAMA_CPP)
           | _drops("it reads no switch", OPENVINO) | _LMDEPLOY),
    Switch("norms.aux=concat (norm_before_fc)", _any(lambda c: c.norms.aux == "concat"),
           vllm_since="0.18.0", sglang_since="0.5.17", ran=True,
           others=_has(VLLM_NEXT) | _drops("it reads no switch", OPENVINO)),
    Switch("norms.residual=normed (norm_before_residual)", _any(lambda c: c.norms.residual == "normed"),
           sglang="its residual path starts at the raw feature", vllm_since="0.10.1", ran=True,
           others=_has(VLLM_NEXT) | _drops("it reads no switch", OPENVINO)),
    Switch("recurrence PostNorm (norm_output)", _eagle3(lambda c: type(c.recurrence) is PostNorm),
           vllm_since="0.22.0", sglang_since="0.5.12", ran=True,
           others=_has(VLLM_NEXT, TENSORRT) | _drops("it never reads it, and feeds the raw state back", LLAMA_CPP)
           | _drops("it reads no switch", OPENVINO) | _drops("it never reads it", MLX_VLM) | _LMDEPLOY),
    Switch("recurrence MaskConstant (P-EAGLE)", _any(lambda c: type(c.recurrence) is MaskConstant),
           sglang="it drafts one after another", ran=True),
    Switch("norms.query_key, with method eagle3", _eagle3(lambda c: c.norms.query_key),
           sglang="its layers have no norms on queries and keys", vllm_since="0.24.0", ran=True,
           others=_no("its drafters have no norms on queries and keys", LLAMA_CPP)),
    Switch("aux_layers of another number than three", _fused(lambda c: len(c.aux_layers) != 3),
           vllm_since="0.22.0", sglang_since="0.5.12", ran=True,
           others=_has(VLLM_NEXT) | _no("it has three", LLAMA_CPP, OPENVINO)),
    Switch("draft_vocab_size below the target's", _eagle3(lambda c: c.draft_vocab_size < c.vocab_size), ran=True,
           others=_has(VLLM_NEXT, LLAMA_CPP)),
    Switch("a boundary 0 in aux_layers", _fused(lambda c: c.aux_layers[0] == 0),
           sglang="its ids are of layers' outputs: the embeddings have none", ran=True),
    Switch("the last boundary in aux_layers, target other than GPT-OSS and MiniMax-M3",
           lambda s: s.fused and s.config.aux_layers[-1] == s.config.num_target_layers
           and s.architecture not in SGLANG_LAST,
           sglang="it captures before a layer: the state after the last one is not reached", ran=True),
    Switch("aux_layers not starting at 2, target of DeepSeek's, Kimi's or Mistral-Large-3's class",
           lambda s: s.fused and s.architecture in SGLANG_SHIFTED and s.config.aux_layers[0] != 2,
           sglang="its ids are shifted for this family only if the first is 1"),
    Switch("aux states as wide together as the drafter",
           _fused(lambda c: len(c.aux_layers) * c.target_hidden_size == c.hidden_size),
           sglang="it tells fused states by their width, and would leave fc out", ran=True),
    # DFlash
    Switch("method dflash: fusion Concat, entry KVInjection, recurrence MaskBlock", lambda s: s.method == "dflash",
           sglang="what it makes of a config was not compared", ran=True, checked=False),
    Switch("num_layers above 1, with method dflash", _dflash(lambda c: c.num_layers > 1),
           sglang="what it makes of a config was not compared", checked=False),
    Switch("fusion LastLayer, with method dflash", _dflash(lambda c: type(c.fusion) is LastLayer),
           **_both("method dflash projects the states of several layers: use fusion Concat")),
    *(Switch(f"norms.{site}=false, with method dflash", _dflash(lambda c, site=site: not getattr(c.norms, site)),  # type: ignore[misc]
             **_both("method dflash always has this norm")) for site in ("hidden", "output", "query_key")),
    *(Switch(f"norms.{site}, with method dflash", _dflash(used), **_both("method dflash has no such norm"))
      for site, used in {"embed": lambda c: c.norms.embed, "aux": lambda c: c.norms.aux != "none"}.items()),
    Switch("attention MLA, with method dflash", _dflash(lambda c: type(c.attention) is MLA),
           **_both("method dflash has no such attention")),
    Switch("a boundary 0 in aux_layers, with method dflash", _dflash(lambda c: c.aux_layers[0] == 0),
           **_both("its ids are of layers' outputs: the embeddings have none")),
    # any
    Switch("hidden_size other than the target's", _any(lambda c: c.hidden_size != c.target_hidden_size), ran=True),
    Switch("a trained token embedding",
           lambda s: s.own_embedding and s.config.hidden_size == s.config.target_hidden_size,
           sglang="it puts the target's embedding in its place"),
    Switch("num_layers above 1, with method eagle", _eagle(lambda c: c.num_layers > 1), ran=True),
    Switch("num_layers above 1, with method eagle3", _eagle3(lambda c: c.num_layers > 1),
           vllm_since="0.11.1", sglang_since="0.5.12", ran=True,
           others=_has(VLLM_NEXT) | _no("it has one", LLAMA_CPP)),
    Switch("attention_window, with method eagle3", _eagle3(lambda c: c.attention_window != "full"),
           vllm_since="0.10.2", ran=True),
    Switch("attention_window, with method eagle", _eagle(lambda c: c.attention_window != "full"),
           sglang="no config says so, only a flag of the server", ran=True),
    Switch("attention_window=full, every layer of the target slides (Mistral, Phi-3)", lambda s: s.narrowed, ran=True),
    Switch("a rope with the target's parameters, which vLLM's class of the target changes (ERNIE-4.5)",
           lambda s: s.rope_is_changed, ran=True),
    Switch("attention_sinks", _any(lambda c: c.attention_sinks),
           **_both("its windows hide a text's first tokens as any others")),
    Switch("attention MLA, with method eagle", _eagle(lambda c: type(c.attention) is MLA),
           **_both("method eagle has no such attention")),
    Switch("attention MLA, with method eagle3", _eagle3(lambda c: type(c.attention) is MLA),
           vllm_since="0.32.0", others={LMDEPLOY: EngineCell()}),
    *(Switch(f"attention MLA with {name}", _eagle3(lambda c, used=used: type(c.attention) is MLA and used(c)),  # type: ignore[misc]
             **_both("its class with this attention lacks that"))
      for name, used in {
          "norms.aux=concat": lambda c: c.norms.aux == "concat",
          "recurrence MaskConstant": lambda c: c.drafting.one_call,
          "attention_window": lambda c: c.attention_window != "full",
          "q_lora_rank 0": lambda c: c.attention.q_lora_rank == 0,
          "latents of another width than 320, 512 or 576, kv_lora_rank and qk_rope_head_dim together": lambda c: (
              c.attention.kv_lora_rank + c.attention.qk_rope_head_dim not in LATENT_WIDTHS
          ),
          "a rope_type other than default and yarn": lambda c: c.rope["rope_type"] not in ("default", "yarn"),
          "attention_factor or truncate in the rope": lambda c: not {"attention_factor", "truncate"}.isdisjoint(c.rope),
      }.items()),
    Switch("attention MLA with num_layers above 1", _eagle3(lambda c: type(c.attention) is MLA and c.num_layers > 1),
           sglang="its class with this attention has one layer"),
    Switch("attention TargetLayer (MTP)", _any(lambda c: type(c.attention) is TargetLayer),
           **_both("such a drafter is a part of its target: use --format mtp")),
    Switch("attention_bias", _any(lambda c: c.attention_bias), sglang="its layers have no biases", ran=True),
    Switch("attention_bias with norms.query_key", _eagle3(lambda c: c.attention_bias is True and c.norms.query_key),
           vllm="its class with these norms has no bias on the attention's output", sglang="its layers have no biases"),
    *(Switch(f"rope_type {kind}", _any(lambda c, kind=kind: c.rope["rope_type"] == kind), *lacks, ran=not lacks[0])  # type: ignore[misc]
      for kind, lacks in ROPE_KINDS.items()),
    Switch("any other rope_type", _any(lambda c: c.rope["rope_type"] not in ROPE_KINDS), **_both(_UNKNOWN)),
    Switch("partial_rotary_factor", _any(lambda c: c.rope.get("partial_rotary_factor", 1.0) != 1.0),
           sglang="it reads the factor elsewhere than in the rope block", ran=True),
    Switch("yarn without original_max_position_embeddings",
           _any(lambda c: c.rope["rope_type"] == "yarn" and "original_max_position_embeddings" not in c.rope),
           **_both("the length that the factor starts from must be written")),
    Switch("yarn with attention_factor",
           _any(lambda c: c.rope["rope_type"] == "yarn" and "attention_factor" in c.rope),
           sglang="it reads no attention_factor", ran=True),
    Switch("a boundary 0 in aux_layers, the target through vLLM's Transformers backend (Gemma 3, Mixtral)",
           lambda s: s.fused and s.config.aux_layers[0] == 0 and s.through_transformers,
           vllm="that backend records what layers return, and the server ends at start: leave boundary 0 out",
           sglang="its ids are of layers' outputs: the embeddings have none"),
    Switch("num_layers above 1 with the target's key heads and head size, target of mixed layers (Gemma 3, GPT-OSS)",
           lambda s: s.spread,
           vllm="it divides layers with equal caches into groups, and the server ends at start where the drafter's lie "
           "in several: choose another num_key_value_heads or head_dim, or one layer",
           sglang="what it makes of such a drafter was not compared", checked=False),
    Switch("an embedding that is scaled as it is looked up (Gemma 2), with method eagle or dflash",
           lambda s: s.embedding_is_scaled,
           vllm="its Transformers backend shares the target's embedding with the scale in it, and such drafters have "
           "no norm on embeddings that would take it out: train an EAGLE-3 drafter",
           sglang="what it makes of such a target was not compared", checked=False),
    Switch("mrope_section and other keys in the rope block",  # whose reading was not compared
           _any(lambda c: c.rope["rope_type"] in ROPE_KINDS and not set(c.rope) <= _ROPE_KEYS), **_both(_UNKNOWN)),
    Switch("parts of your own", _any(lambda c: not _stock(c)), **_both("no engine knows them")),
)  # fmt: skip


def _stock(config: DrafterConfig) -> bool:
    return (
        type(config.fusion) in (LastLayer, Concat, ScalarMix)
        and type(config.entry) in (Narrow, Wide, KVInjection)
        and type(config.attention) in (GQA, MLA, TargetLayer)
        and type(config.recurrence) in (PreNorm, PostNorm, MaskConstant, MaskBlock)
        and all(type(norm) in (bool, str, TargetNorm) for norm in vars(config.norms).values())
    )


def lint(subject: Subject, engine: str) -> Iterator[tuple[Switch, str]]:
    """Every switch in use that the engine does not honour, and why."""
    for switch in SWITCHES:
        if switch.used(subject) and (reason := switch.cell(engine).lacks):
            yield switch, reason.format(architecture=subject.architecture)


def dropped(subject: Subject) -> dict[str, list[str]]:
    """By engine, the switches in use that it drops in silence: it loads the drafter and drafts otherwise."""
    names: dict[str, list[str]] = {}
    for engine in OTHERS:
        for switch in SWITCHES:
            cell = switch.cell(engine)
            if cell.silent and switch.used(subject) and not cell.but(subject):
                names.setdefault(engine, []).append(switch.name)
    return names
