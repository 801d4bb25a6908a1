"""The engine matrix says which engine honors which property of a drafter. The exporter refuses by it and the docs
show it."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from specdec.drafter import (
    GQA,
    MLA,
    Concat,
    DrafterConfig,
    FixedSize,
    KVInjection,
    LastLayer,
    Leaky,
    MarkovBlock,
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
from specdec.export import engine_targets as targets
from specdec.export.subject import Subject

VLLM = "vLLM 0.32.0"
SGLANG = "SGLang 0.5.23"
ENGINES = (VLLM, SGLANG)  # Exports are written for these.
VLLM_NEXT = "vLLM 0.33.0"
LLAMA_CPP = "llama.cpp (xllamacpp 2026.10.11549)"
OPENVINO = "OpenVINO GenAI 2026.4.1"
MLX_VLM = "mlx-vlm 0.7.10"
LMDEPLOY = "LMDeploy 0.18"
TENSORRT = "TensorRT-LLM"
TRANSFORMERS = "transformers 5.24"
# Users load exports with these too.
OTHERS = (VLLM_NEXT, LLAMA_CPP, OPENVINO, MLX_VLM, LMDEPLOY, TENSORRT, TRANSFORMERS)

LATENT_WIDTHS = (320, 512, 576)  # vLLM has kernels of latent attention for these.


# The evidence of a cell.
RUN = "run"
SOURCE = "source"
UNCHECKED = "not checked"


class EngineCell(NamedTuple):
    """How an engine's version treats a switch."""

    lacks: str = ""  # why the engine does not honor the switch; empty if it does
    since: str = ""  # the first release whose source has it, if earlier ones were seen to lack it
    evidence: str = SOURCE
    silent: bool = False  # whether the engine loads such a drafter and drafts differently
    # drafters for which it honors the switch all the same
    but: Callable[[Subject], bool] = lambda subject: False

    @property
    def words(self) -> str:
        """The cell's text in a table."""
        if not self.lacks:
            if self.evidence == UNCHECKED:
                return UNCHECKED
            since = f", since {self.since}" if self.since else ""
            return f"yes{since} ({self.evidence})"
        verdict = "**dropped in silence**" if self.silent else "**no**"
        lacks = self.lacks.replace("{architecture}", "the target")
        return f"{verdict}: {lacks} ({self.evidence})"


NOT_CHECKED = EngineCell(evidence=UNCHECKED)


class Switch(NamedTuple):
    """One row of the matrix: a property of drafters, and how engines treat it.

    ``vllm`` and ``sglang``, or ``both``, are empty if the engine honors the switch, and otherwise say why it does not.
    """

    name: str
    used: Callable[[Subject], object]
    vllm: str = ""
    sglang: str = ""
    vllm_since: str = ""
    sglang_since: str = ""
    both: str = ""
    # whether a real vLLM of that version proposed what the drafter says, where it honors the switch
    ran: bool = False
    checked: bool = True  # whether SGLang's source was read; it refuses what was not checked
    others: Mapping[str, EngineCell] = {}

    def cell(self, engine: str) -> EngineCell:
        """Return how an engine treats the switch."""
        if engine == VLLM:
            lacks = self.vllm or self.both
            return EngineCell(lacks, self.vllm_since, RUN if self.ran and not lacks else SOURCE)
        if engine == SGLANG:
            return EngineCell(
                self.sglang or self.both, self.sglang_since, SOURCE if self.checked else UNCHECKED
            )
        if engine == LLAMA_CPP and engine not in self.others and self.both:
            return EngineCell(self.both)
        return self.others.get(engine, NOT_CHECKED)


def _no(reason: str, *engines: str, silent: bool = False) -> dict[str, EngineCell]:
    return {engine: EngineCell(reason, silent=silent) for engine in engines}


_has = partial(_no, "")
_drops = partial(_no, silent=True)
# A real llama.cpp proposed what the drafter says.
_RAN_IN_LLAMA_CPP = {LLAMA_CPP: EngineCell(evidence=RUN)}


Uses = Callable[[DrafterConfig], object]


def _with(method: str, uses: Uses, wanted: bool = True) -> Callable[[Subject], bool]:
    return lambda s: s.method == method and bool(uses(s.config)) is wanted


_eagle = partial(_with, "eagle")
_eagle3 = partial(_with, "eagle3")


def _block(uses: Uses, wanted: bool = True) -> Callable[[Subject], bool]:
    return lambda s: s.block and bool(uses(s.config)) is wanted


def _fused(uses: Uses) -> Callable[[Subject], bool]:
    return lambda s: s.fused and bool(uses(s.config))


def _part(kind: type, method: str = "") -> Callable[[Subject], bool]:
    """Whether a drafter has a part of this very kind."""
    return lambda s: method in ("", s.method) and kind in map(type, vars(s.config).values())


_NO_EAGLE = "its generate has no EAGLE"
_LMDEPLOY = {
    LMDEPLOY: EngineCell(
        "only its class with MLA reads it",
        silent=True,
        but=lambda s: type(s.config.attention) is MLA,
    )
}
_UNKNOWN = "its frequencies are not known to be ours"
# By rope_type, why vLLM and why SGLang do not honor it; empty if they do.
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
    Switch("method eagle: fusion LastLayer, entry Narrow", lambda s: s.method == "eagle",
           others=_has(VLLM_NEXT) | _no(_NO_EAGLE, TRANSFORMERS) | _no("it has no EAGLE-1", LLAMA_CPP), ran=True),
    Switch("method eagle, target of a class without get_embed_and_head in SGLang",
           lambda s: s.method == "eagle" and s.architecture not in ("", *targets.SGLANG_EAGLE_TARGETS),
           sglang="its class for {architecture} hands over no head, and the server ends at start: use --format vllm",
           ran=True),
    Switch("entry.bias=true, the bias not zero", lambda s: s.method == "eagle" and s.entry_bias,
           vllm="fc.bias is dropped without a word: train with entry.bias=false"),
    *(Switch(f"norms.{site}, with method eagle", _eagle(attrgetter(f"norms.{site}")),
             both="method eagle has no such norm")
      for site in ("embed", "hidden", "input", "output", "query_key")),
    Switch("a separate head, with method eagle", lambda s: s.method == "eagle" and s.own_head,
           both="method eagle reads the target's head: train with head=target"),
    # EAGLE-3 and 3.1
    Switch("method eagle3: fusion Concat, entry Wide", _fused(lambda c: True),
           others=_has(VLLM_NEXT, OPENVINO, MLX_VLM, LMDEPLOY, TENSORRT) | _no(_NO_EAGLE, TRANSFORMERS)
           | _RAN_IN_LLAMA_CPP, ran=True),
    Switch("fusion LastLayer with entry Wide (use_aux_hidden_state=false)",
           _part(LastLayer, "eagle3"), sglang="what it makes of such a config was not compared", checked=False,
           others=_no("it fuses three states", LLAMA_CPP), ran=True),
    Switch("method eagle3, target of a class without set_eagle3_layers_to_capture in SGLang",
           lambda s: s.method == "eagle3" and s.architecture not in ("", *targets.SGLANG_EAGLE3_TARGETS),
           sglang="its class for {architecture} has no set_eagle3_layers_to_capture, and the server ends at start: "
           "use --format vllm", others=_has(LLAMA_CPP), ran=True),
    Switch("target of a class whose states llama.cpp does not hand out, with method eagle3",
           lambda s: s.method == "eagle3" and s.architecture not in ("", *targets.LLAMA_CPP_TARGETS),
           others=_no("it does not hand out the layers' inputs of {architecture}, and its server ends at start",
                      LLAMA_CPP)),
    Switch("fusion ScalarMix", _part(ScalarMix),
           both="states are concatenated, there are no weights for them"),
    Switch("entry Narrow, with method eagle3", _part(Narrow, "eagle3"),
           both="the layer reads embedding and feature side by side: use entry Wide"),
    *(Switch(f"norms.{site}=false, with method eagle3", _eagle3(attrgetter(f"norms.{site}"), False),
             both="method eagle3 always has this norm") for site in ("embed", "hidden", "output")),
    Switch("norms.aux=each (fc_norm)", lambda s: s.config.norms.aux == "each",
           vllm_since="0.22.0", sglang_since="0.5.12",
           others=_has(VLLM_NEXT, TENSORRT) | _no("its drafters have no norm on each state", LLAMA_CPP)
           | _drops("it reads no switch", OPENVINO) | _LMDEPLOY, ran=True),
    Switch("norms.aux=concat (norm_before_fc)", lambda s: s.config.norms.aux == "concat",
           vllm_since="0.18.0", sglang_since="0.5.17",
           others=_has(VLLM_NEXT) | _drops("it reads no switch", OPENVINO) | _RAN_IN_LLAMA_CPP, ran=True),
    Switch("norms.residual=normed (norm_before_residual)", lambda s: s.config.norms.residual == "normed",
           sglang="its residual path starts at the raw feature", vllm_since="0.10.1",
           others=_has(VLLM_NEXT) | _drops("it reads no switch", OPENVINO) | _RAN_IN_LLAMA_CPP, ran=True),
    Switch("recurrence PostNorm (norm_output)", _part(PostNorm, "eagle3"),
           vllm_since="0.22.0", sglang_since="0.5.12",
           others=_has(VLLM_NEXT, TENSORRT) | _drops("it never reads it, and feeds the raw state back", LLAMA_CPP)
           | _drops("it reads no switch", OPENVINO) | _drops("it never reads it", MLX_VLM) | _LMDEPLOY, ran=True),
    Switch("recurrence FixedSize or Leaky", lambda s: type(s.config.recurrence) in (FixedSize, Leaky),
           both="it feeds back the raw state or the normed one, at no other size"),
    Switch("recurrence MaskConstant (P-EAGLE)", _part(MaskConstant),
           sglang="it drafts one after another", others=_no("it drafts one after another", LLAMA_CPP), ran=True),
    Switch("norms.query_key, with method eagle3", _eagle3(lambda c: c.norms.query_key),
           sglang="its layers have no norms on queries and keys", vllm_since="0.24.0",
           others=_no("its drafters have no norms on queries and keys", LLAMA_CPP), ran=True),
    Switch("aux_layers of another number than three", _fused(lambda c: len(c.aux_layers) != 3),
           vllm_since="0.22.0", sglang_since="0.5.12",
           others=_has(VLLM_NEXT) | _no("it has three", LLAMA_CPP, OPENVINO), ran=True),
    Switch("draft_vocab_size below the target's", _eagle3(lambda c: c.draft_vocab_size < c.vocab_size),
           others=_has(VLLM_NEXT) | _RAN_IN_LLAMA_CPP, ran=True),
    Switch("a boundary 0 in aux_layers", _fused(lambda c: c.aux_layers[0] == 0),
           sglang="its ids are of layers' outputs: the embeddings have none", others=_RAN_IN_LLAMA_CPP, ran=True),
    Switch("the last boundary in aux_layers, target other than GPT-OSS and MiniMax-M3",
           lambda s: s.fused and s.config.aux_layers[-1] == s.config.num_target_layers
           and s.architecture not in targets.SGLANG_LAST,
           sglang="it captures before a layer: the state after the last one is not reached", others=_has(LLAMA_CPP),
           ran=True),
    Switch("target of a class whose last state llama.cpp does not hand out, the last boundary in aux_layers",
           lambda s: s.fused and s.config.aux_layers[-1] == s.config.num_target_layers
           and s.architecture not in ("", *targets.LLAMA_CPP_LAST),
           others=_no("its class of {architecture} hands out nothing after the last layer: choose lower aux_layers",
                      LLAMA_CPP)),
    Switch("aux_layers not starting at 2, target of DeepSeek's, Kimi's or Mistral-Large-3's class",
           lambda s: s.fused and s.architecture in targets.SGLANG_SHIFTED and s.config.aux_layers[0] != 2,
           sglang="its ids are shifted for this family only if the first is 1", others=_has(LLAMA_CPP)),
    Switch("aux states as wide together as the drafter",
           _fused(lambda c: len(c.aux_layers) * c.target_hidden_size == c.hidden_size),
           sglang="it tells fused states by their width, and would leave fc out", others=_has(LLAMA_CPP), ran=True),
    # DFlash and DSpark
    Switch("method dflash: fusion Concat, entry KVInjection, recurrence MaskBlock", lambda s: s.method == "dflash",
           sglang="what it makes of a config was not compared", checked=False,
           others=_RAN_IN_LLAMA_CPP, ran=True),
    Switch("method dspark: DFlash's parts, recurrence MarkovBlock", lambda s: s.method == "dspark",
           sglang="what it makes of a config was not compared", checked=False,
           others=_RAN_IN_LLAMA_CPP),
    Switch("root_drafts=false, with method dspark",
           lambda s: s.method == "dspark" and not s.config.recurrence.root_drafts,  # type: ignore[attr-defined]
           sglang="what it makes of a config was not compared", checked=False,
           others=_no("its log names no drafts of such a block, so that nothing was compared", LLAMA_CPP)),
    Switch("num_layers above 1, with method dflash or dspark", _block(lambda c: c.num_layers > 1),
           sglang="what it makes of a config was not compared", checked=False, others=_RAN_IN_LLAMA_CPP),
    Switch("fusion LastLayer, with method dflash or dspark", _block(lambda c: type(c.fusion) is LastLayer),
           both="a block drafter projects the states of several layers: use fusion Concat"),
    *(Switch(f"norms.{site}=false, with method dflash or dspark", _block(attrgetter(f"norms.{site}"), False),
             both="a block drafter always has this norm") for site in ("hidden", "output", "query_key")),
    *(Switch(f"norms.{site}, with method dflash or dspark", _block(used), both="a block drafter has no such norm")
      for site, used in {"embed": lambda c: c.norms.embed, "aux": lambda c: c.norms.aux != "none"}.items()),
    Switch("attention MLA, with method dflash or dspark", _block(lambda c: type(c.attention) is MLA),
           both="a block drafter has no such attention"),
    Switch("a boundary 0 in aux_layers, with method dflash or dspark", _block(lambda c: c.aux_layers[0] == 0),
           both="its ids are of layers' outputs: the embeddings have none"),
    # any
    Switch("hidden_size other than the target's", lambda s: s.config.hidden_size != s.config.target_hidden_size,
           others=_RAN_IN_LLAMA_CPP, ran=True),
    Switch("a trained token embedding",
           lambda s: s.own_embedding and s.config.hidden_size == s.config.target_hidden_size,
           sglang="it puts the target's embedding in its place", others=_RAN_IN_LLAMA_CPP),
    Switch("num_layers above 1, with method eagle", _eagle(lambda c: c.num_layers > 1), ran=True),
    Switch("num_layers above 1, with method eagle3", _eagle3(lambda c: c.num_layers > 1),
           vllm_since="0.11.1", sglang_since="0.5.12",
           others=_has(VLLM_NEXT) | _no("it has one", LLAMA_CPP), ran=True),
    Switch("attention_window, with method eagle3", _eagle3(lambda c: c.attention_window != "full"),
           vllm_since="0.10.2", others=_no("its drafters see the whole text", LLAMA_CPP), ran=True),
    Switch("attention_window, with method eagle", _eagle(lambda c: c.attention_window != "full"),
           sglang="no config says so, only a flag of the server", ran=True),
    Switch("attention_window=full, every layer of the target slides (Mistral, Phi-3)", lambda s: s.narrowed,
           others=_has(LLAMA_CPP), ran=True),
    Switch("a rope with the target's parameters, which vLLM's class of the target changes (ERNIE-4.5)",
           lambda s: s.rope_is_changed, others=_has(LLAMA_CPP), ran=True),
    Switch("attention_sinks", lambda s: s.config.attention_sinks,
           both="its windows hide a text's first tokens as any others"),
    Switch("attention MLA, with method eagle", _part(MLA, "eagle"),
           both="method eagle has no such attention"),
    Switch("attention MLA, with method eagle3", _part(MLA, "eagle3"),
           vllm_since="0.32.0", others=_has(LMDEPLOY) | _no("its drafters have no such attention", LLAMA_CPP)),
    *(Switch(f"attention MLA with {name}", _eagle3(lambda c, used=used: type(c.attention) is MLA and used(c)),  # type: ignore[misc]
             both="its class with this attention lacks that")
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
    Switch("attention TargetLayer (MTP)", _part(TargetLayer),
           both="such a drafter is a part of its target: use --format mtp"),
    Switch("attention_bias", lambda s: s.config.attention_bias, sglang="its layers have no biases",
           others=_no("its layers have no biases", LLAMA_CPP), ran=True),
    Switch("attention_bias with norms.query_key", _eagle3(lambda c: c.attention_bias is True and c.norms.query_key),
           vllm="its class with these norms has no bias on the attention's output", sglang="its layers have no biases"),
    *(Switch(f"rope_type {kind}", lambda s, kind=kind: s.config.rope["rope_type"] == kind, *lacks, ran=True,  # type: ignore[misc]
             others=_no(_UNKNOWN, LLAMA_CPP) if any(lacks) else _RAN_IN_LLAMA_CPP)
      for kind, lacks in ROPE_KINDS.items()),
    Switch("any other rope_type", lambda s: s.config.rope["rope_type"] not in ROPE_KINDS, both=_UNKNOWN),
    Switch("partial_rotary_factor", lambda s: s.config.rope.get("partial_rotary_factor", 1.0) != 1.0,
           sglang="it reads the factor elsewhere than in the rope block", others=_RAN_IN_LLAMA_CPP, ran=True),
    Switch("yarn without original_max_position_embeddings",
           lambda s: s.config.rope["rope_type"] == "yarn" and "original_max_position_embeddings" not in s.config.rope,
           both="the length that the factor starts from must be written"),
    Switch("yarn with attention_factor",
           lambda s: s.config.rope["rope_type"] == "yarn" and "attention_factor" in s.config.rope,
           sglang="it reads no attention_factor", others=_RAN_IN_LLAMA_CPP, ran=True),
    Switch("a boundary 0 in aux_layers, the target through vLLM's Transformers backend (Gemma 3, Mixtral)",
           lambda s: s.fused and s.config.aux_layers[0] == 0 and s.through_transformers,
           vllm="that backend records what layers return, and the server ends at start: leave boundary 0 out",
           sglang="its ids are of layers' outputs: the embeddings have none", others=_has(LLAMA_CPP)),
    Switch("num_layers above 1 with the target's key heads and head size, target of mixed layers (Gemma 3, GPT-OSS)",
           lambda s: s.spread,
           vllm="it divides layers with equal caches into groups, and the server ends at start where the drafter's lie "
           "in several: choose another num_key_value_heads or head_dim, or one layer",
           sglang="what it makes of such a drafter was not compared", checked=False),
    Switch("an embedding that is scaled as it is looked up (Gemma 2), with method eagle, dflash or dspark",
           lambda s: s.embedding_is_scaled,
           vllm="its Transformers backend shares the target's embedding with the scale in it, and such drafters have "
           "no norm on embeddings that would take it out: train an EAGLE-3 drafter",
           sglang="what it makes of such a target was not compared", checked=False),
    Switch("mrope_section and other keys in the rope block",  # whose reading was not compared
           lambda s: s.config.rope["rope_type"] in ROPE_KINDS and not set(s.config.rope) <= _ROPE_KEYS, both=_UNKNOWN),
    Switch("custom components", lambda s: not _stock(s.config), both="no engine knows them"),
)  # fmt: skip


def _stock(config: DrafterConfig) -> bool:
    return (
        type(config.fusion) in (LastLayer, Concat, ScalarMix)
        and type(config.entry) in (Narrow, Wide, KVInjection)
        and type(config.attention) in (GQA, MLA, TargetLayer)
        and type(config.recurrence)
        in (PreNorm, PostNorm, FixedSize, Leaky, MaskConstant, MaskBlock, MarkovBlock)
        and all(type(norm) in (bool, str, TargetNorm) for norm in vars(config.norms).values())
    )


def lint(subject: Subject, engine: str) -> Iterator[tuple[Switch, str]]:
    """Yield every switch in use that the engine does not honor, and why."""
    for switch in SWITCHES:
        if switch.used(subject) and (reason := switch.cell(engine).lacks):
            yield switch, reason.format(architecture=subject.architecture)


def dropped(subject: Subject) -> dict[str, list[str]]:
    """Return, by engine, the switches in use that it ignores: it loads the drafter and drafts differently."""
    names: dict[str, list[str]] = {}
    for engine in OTHERS:
        for switch in SWITCHES:
            cell = switch.cell(engine)
            if cell.silent and switch.used(subject) and not cell.but(subject):
                names.setdefault(engine, []).append(switch.name)
    return names
