"""The engine matrix, row by row, and the page that is made of it."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers as hf

from specdec.drafter import (
    MLA,
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    FixedSize,
    LastLayer,
    MarkovBlock,
    MaskConstant,
    Narrow,
    Norms,
    ScalarMix,
    TargetLayer,
)
from specdec.export import FORMATS, NotServable, Subject, export_drafter, subject_of
from specdec.export.engine_targets import EAGLE3_TARGETS, target_flags, window_of_all_layers
from specdec.export.switches import (
    ENGINES,
    LLAMA_CPP,
    LMDEPLOY,
    MLX_VLM,
    OPENVINO,
    OTHERS,
    SGLANG,
    SWITCHES,
    VLLM,
    Switch,
    dropped,
    lint,
)
from specdec.utils.vllm import find_vllm
from tests.export.made import made_drafter
from tests.export.vllm_source import hands_over_states, installed
from tests.tiny import LAYERS, biased, presets, tiny_config, tiny_target, variants

EAGLE1, EAGLE3, DFLASH = presets()["eagle1"], presets()["eagle3"], variants()["dflash"]
BARE = EAGLE1.norms
LATENT = MLA(10, 256, 6, 64, 5)


def subject(
    spec: DrafterSpec = EAGLE3,
    *,
    own_embedding: bool = False,
    own_head: bool = True,
    entry_bias: bool = False,
    architecture: str = "",
    target_window: int | None = None,
    mixed_heads: tuple[int, int] | None = None,
    **changes: object,
) -> Subject:
    spec = dataclasses.replace(
        spec, **{name: changes.pop(name) for name in list(changes) if hasattr(spec, name)}
    )
    config = dataclasses.replace(tiny_config(spec), **changes)
    head = own_head and config.head == "own"
    return Subject(
        config, own_embedding, head, entry_bias, architecture, target_window, mixed_heads
    )


def norms(base: Norms, **changes: object) -> Norms:
    return dataclasses.replace(base, **changes)


@dataclasses.dataclass(frozen=True)
class Mine(Concat):
    """A part that no engine can know."""


def rope(**block: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e4, **block}


YARN = rope(rope_type="yarn", factor=2.0)
LONG = rope(rope_type="longrope", factor=2.0, short_factor=[1.0] * 6, long_factor=[2.0] * 6)
# by a switch, a drafter that uses it, and which engines serve that
CASES: dict[str, tuple[Subject, str]] = {
    "fusion LastLayer with entry Wide": (subject(fusion=LastLayer()), "V"),
    "entry.bias=true, the bias not zero": (subject(EAGLE1, entry_bias=True), "S"),
    "norms.embed, with method eagle": (subject(EAGLE1, norms=norms(BARE, embed=True)), ""),
    "norms.hidden, with method eagle": (subject(EAGLE1, norms=norms(BARE, hidden=True)), ""),
    "norms.input, with method eagle": (subject(EAGLE1, norms=norms(BARE, input=True)), ""),
    "norms.output, with method eagle": (subject(EAGLE1, norms=norms(BARE, output=True)), ""),
    "norms.query_key, with method eagle": (subject(EAGLE1, norms=norms(BARE, query_key=True)), ""),
    "a separate head, with method eagle": (subject(EAGLE1, head="own"), ""),
    "attention_window, with method eagle": (subject(EAGLE1, attention_window=16), "V"),
    "num_layers above 1, with method eagle": (subject(EAGLE1, num_layers=2), "VS"),
    "fusion ScalarMix": (subject(fusion=ScalarMix()), ""),
    "entry Narrow, with method eagle3": (subject(entry=Narrow()), ""),
    "norms.embed=false, with method eagle3": (subject(norms=Norms(embed=False)), ""),
    "norms.hidden=false, with method eagle3": (subject(norms=Norms(hidden=False)), ""),
    "norms.output=false, with method eagle3": (subject(norms=Norms(output=False)), ""),
    "norms.aux=each (fc_norm)": (subject(norms=Norms(aux="each")), "VS"),
    "norms.aux=concat (norm_before_fc)": (subject(norms=Norms(aux="concat")), "VS"),
    "norms.residual=normed (norm_before_residual)": (subject(norms=Norms(residual="normed")), "V"),
    "recurrence PostNorm (norm_output)": (subject(presets()["eagle3_1"]), "VS"),
    "recurrence FixedSize": (subject(recurrence=FixedSize()), ""),
    "recurrence MaskConstant": (subject(recurrence=MaskConstant()), "V"),
    "norms.query_key, with method eagle3": (subject(norms=Norms(query_key=True)), "V"),
    "aux_layers of another number than three": (subject(aux_layers=[1, 2, 3, 4]), "VS"),
    "draft_vocab_size below the target's": (subject(), "VS"),
    "a boundary 0 in aux_layers": (subject(aux_layers=[0, 2, 4]), "V"),
    "the last boundary in aux_layers": (subject(aux_layers=[2, 4, LAYERS]), "V"),
    "aux_layers not starting at 2": (subject(aux_layers=[3, 4, 5], architecture="DeepseekV3ForCausalLM"), "V"),
    "method eagle3, target of a class": (subject(architecture="MixtralForCausalLM"), "V"),
    "target of a class whose states llama.cpp": (subject(architecture="Qwen2ForCausalLM"), "VS"),
    "target of a class whose last state llama.cpp": (
        subject(aux_layers=[2, 4, LAYERS], architecture="MixtralForCausalLM"), "VS",
    ),
    "method eagle, target of a class": (subject(EAGLE1, architecture="MixtralForCausalLM"), "V"),
    "attention_window=full, every layer": (subject(target_window=5), "VS"),
    "a rope with the target's": (subject(EAGLE1, architecture="Ernie4_5ForCausalLM"), "VS"),
    "aux states as wide together": (subject(aux_layers=[3]), "V"),
    "hidden_size other than the target's": (subject(hidden_size=24, own_embedding=True), "VS"),
    "a trained token embedding": (subject(own_embedding=True), "V"),
    "num_layers above 1, with method eagle3": (subject(num_layers=2), "VS"),
    "attention_window, with method eagle3": (subject(attention_window=16), "VS"),
    "attention_sinks": (subject(attention_window=16, attention_sinks=4), ""),
    "attention MLA, with method eagle": (subject(EAGLE1, attention=LATENT), ""),
    "attention MLA, with method eagle3": (subject(attention=LATENT), "VS"),
    "attention MLA with num_layers above 1": (subject(attention=LATENT, num_layers=2), "V"),
    "attention MLA with norms.aux=concat": (subject(attention=LATENT, norms=Norms(aux="concat")), ""),
    "attention MLA with recurrence MaskConstant": (subject(attention=LATENT, recurrence=MaskConstant()), ""),
    "attention MLA with q_lora_rank 0": (subject(attention=MLA(0, 256, 6, 64, 5)), ""),
    "attention MLA with latents of another width": (subject(attention=MLA(10, 8, 6, 4, 5)), ""),
    "attention MLA with a rope_type": (subject(attention=LATENT, rope=rope(rope_type="linear", factor=2.0)), ""),
    "attention MLA with attention_factor": (
        subject(attention=LATENT, rope=YARN | {"original_max_position_embeddings": 64, "truncate": False}), "",
    ),
    "attention MLA with attention_window": (subject(attention=LATENT, attention_window=16), ""),
    "attention TargetLayer (MTP)": (subject(EAGLE1, attention=TargetLayer()), ""),
    "attention_bias": (subject(attention_bias=True), "V"),
    "attention_bias with norms.query_key": (subject(attention_bias=True, norms=Norms(query_key=True)), ""),
    "rope_type default": (subject(), "VS"),
    "rope_type linear": (subject(rope=rope(rope_type="linear", factor=2.0)), "VS"),
    "rope_type yarn": (subject(rope=YARN | {"original_max_position_embeddings": 64}), "VS"),
    "rope_type dynamic": (subject(rope=rope(rope_type="dynamic", factor=2.0)), "V"),
    "rope_type longrope": (subject(rope=LONG | {"original_max_position_embeddings": 64}), ""),
    "any other rope_type": (subject(rope=rope(rope_type="proportional")), ""),
    "partial_rotary_factor": (subject(rope=rope(partial_rotary_factor=0.5)), "V"),
    "yarn without original_max_position_embeddings": (subject(rope=YARN), ""),
    "yarn with attention_factor": (
        subject(rope=YARN | {"original_max_position_embeddings": 64, "attention_factor": 1.1}),
        "V",
    ),
    "a boundary 0 in aux_layers, the target through": (
        subject(aux_layers=[0, 2, 4], architecture="Gemma3ForCausalLM"), "",
    ),
    "num_layers above 1 with the target's key heads": (subject(num_layers=2, mixed_heads=(2, 12)), ""),
    "an embedding that is scaled": (subject(EAGLE1, architecture="Gemma2ForCausalLM"), ""),
    "mrope_section": (subject(rope=rope(mrope_section=[2, 2, 2])), ""),
    "custom components": (subject(fusion=Mine()), ""),
    "method eagle: ": (subject(EAGLE1), "VS"),
    "method eagle3: ": (subject(), "VS"),
    "method dflash: ": (subject(DFLASH, num_layers=1), "V"),
    "method dspark: ": (subject(variants()["dspark"], num_layers=1), "V"),
    "root_drafts=false, with method dspark": (
        subject(variants()["dspark"], num_layers=1, recurrence=MarkovBlock(root_drafts=False)), "V",
    ),
    "num_layers above 1, with method dflash or dspark": (subject(DFLASH), "V"),
    "fusion LastLayer, with method dflash or dspark": (subject(DFLASH, fusion=LastLayer()), ""),
    "norms.hidden=false, with method dflash or dspark": (subject(DFLASH, norms=norms(DFLASH.norms, hidden=False)), ""),
    "norms.output=false, with method dflash or dspark": (subject(DFLASH, norms=norms(DFLASH.norms, output=False)), ""),
    "norms.query_key=false, with method dflash or dspark": (
        subject(DFLASH, norms=norms(DFLASH.norms, query_key=False)), "",
    ),
    "norms.embed, with method dflash or dspark": (subject(DFLASH, norms=norms(DFLASH.norms, embed=True)), ""),
    "norms.aux, with method dflash or dspark": (subject(DFLASH, norms=norms(DFLASH.norms, aux="each")), ""),
    "attention MLA, with method dflash or dspark": (
        subject(DFLASH, attention=LATENT, norms=norms(DFLASH.norms, query_key=False)), "",
    ),
    "a boundary 0 in aux_layers, with method dflash or dspark": (subject(DFLASH, aux_layers=[0, 2, 4]), ""),
    "rope_type llama3": (
        subject(rope=rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=64)),
        "VS",
    ),
}  # fmt: skip


def row_of(name: str) -> Switch:
    """The row of that name, or the only one that begins so."""
    exact = [row for row in SWITCHES if row.name == name]
    (row,) = exact or [row for row in SWITCHES if row.name.startswith(name)]
    return row


@pytest.mark.parametrize("name", CASES)
def test_which_engine_serves_which_design(name: str) -> None:
    case, wanted = CASES[name]
    row = row_of(name)
    assert row.used(case)
    apart = (
        ("norms.query_key, with method eagle3", "attention_bias")
        if " with norms.query_key" in name
        else ()
    )
    if name == "root_drafts=false, with method dspark":
        apart += (row_of("method dspark: ").name,)
    if "with method dflash or dspark" in name:
        apart += tuple(
            {row_of("method dflash: ").name, "num_layers above 1, with method dflash or dspark"}
            - {name}
        )
    apart += (
        ("norms.query_key=false, with method dflash or dspark",)
        if name == "attention MLA, with method dflash or dspark"
        else ()
    )
    apart += ("recurrence MaskConstant (P-EAGLE)",) if "MLA with" in name else ()
    if name == "a boundary 0 in aux_layers, the target through":
        apart += ("a boundary 0 in aux_layers",)
    if name == "target of a class whose last state llama.cpp":
        apart += (row_of("the last boundary").name, row_of("method eagle3, target of a class").name)
    if name in ("a rope with the target's", "an embedding that is scaled"):
        apart += (row_of("method eagle, target of a class").name,)
    found = {
        engine: [switch.name for switch, _ in lint(case, engine) if switch.name not in apart]
        for engine in ENGINES
    }
    assert found == {
        engine: [] if letter in wanted else [row.name]
        for engine, letter in ((VLLM, "V"), (SGLANG, "S"))
    }


def test_what_llama_cpp_serves() -> None:
    """By the format's own check: what llama.cpp ignores, refuses or was never compared with is no export for it."""
    served = set()
    for name, (case, _) in CASES.items():
        with contextlib.suppress(NotServable):
            FORMATS["gguf"].check(case)
            served.add(name)
    assert served == {
        "norms.aux=concat (norm_before_fc)", "norms.residual=normed (norm_before_residual)",
        "draft_vocab_size below the target's", "a boundary 0 in aux_layers", "the last boundary in aux_layers",
        "method eagle3, target of a class",
        "attention_window=full, every layer", "hidden_size other than the target's", "a trained token embedding",
        "rope_type default", "rope_type linear", "rope_type yarn", "rope_type llama3", "partial_rotary_factor",
        "yarn with attention_factor", "method eagle3: ", "method dflash: ", "method dspark: ",
        "num_layers above 1, with method dflash or dspark",
    }  # fmt: skip


def test_every_row_is_tried() -> None:
    assert {row_of(name).name for name in CASES} == {row.name for row in SWITCHES}
    assert len({row.name for row in SWITCHES}) == len(SWITCHES) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_no_row_is_used_by_the_plain_ones_but_their_own(name: str) -> None:
    plain = {
        "method eagle: ",
        "method eagle3: ",
        "rope_type default",
        "draft_vocab_size below the target's",
    }
    if name not in plain:
        row = row_of(name)
        assert not row.used(subject()) and not row.used(subject(EAGLE1))


def table(engines: Sequence[str], rows: Sequence[Switch]) -> str:
    """A table of ``docs/engines.md``, as Markdown."""
    lines = [["switch", *engines], ["---"] * (1 + len(engines))]
    lines += [[row.name, *(row.cell(engine).words for engine in engines)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def matrix() -> str:
    """The engines that are exported for, and the others where anything is known of them."""
    others = [engine for engine in OTHERS if engine != LLAMA_CPP]
    rows = [row for row in SWITCHES if not set(others).isdisjoint(row.others)]
    return f"{table((*ENGINES, LLAMA_CPP), SWITCHES)}\n\n{table(others, rows)}"


def test_the_page_shows_the_table_that_the_exporter_goes_by() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    assert matrix() in page, f"put this there:\n{matrix()}"


def test_a_cell_says_its_verdict_and_its_evidence() -> None:
    assert row_of("norms.aux=each").cell(VLLM).words == "yes, since 0.22.0 (run)"
    assert (
        row_of("partial_rotary_factor").cell(SGLANG).words.startswith("**no**: it reads the factor")
    )
    assert (
        row_of("recurrence PostNorm")
        .cell(LLAMA_CPP)
        .words.startswith("**dropped in silence**: it never reads it")
    )
    assert row_of("method dflash: ").cell(SGLANG).words.endswith("(not checked)")
    assert row_of("custom components").cell(OPENVINO).words == "not checked"
    for row in SWITCHES:
        cells = [row.cell(engine) for engine in (*ENGINES, *OTHERS)]
        assert all(cell.evidence in ("run", "source", "not checked") for cell in cells)
        assert all(cell.lacks for cell in cells if cell.silent) and set(row.others) <= set(OTHERS)
        assert not (cells[0].lacks and cells[0].evidence == "run")  # what is refused was not run


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (subject(presets()["eagle1"]), {}),
        (subject(), {}),
        (subject(presets()["eagle3_1"]), {OPENVINO: 2, LMDEPLOY: 2, LLAMA_CPP: 1, MLX_VLM: 1}),
        (subject(presets()["eagle3_1"], attention=LATENT), {OPENVINO: 2, LLAMA_CPP: 1, MLX_VLM: 1}),
        (subject(norms=Norms(aux="each")), {OPENVINO: 1, LMDEPLOY: 1}),
        (subject(norms=Norms(residual="normed")), {OPENVINO: 1}),
    ],
)
def test_who_drops_what_in_silence(case: Subject, wanted: dict[str, int]) -> None:
    assert {engine: len(names) for engine, names in dropped(case).items()} == wanted


def test_the_export_names_the_engines_that_would_draft_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target(dtype=torch.float32)
    for name, spec in presets().items():
        caplog.clear()
        export_drafter(made_drafter(spec, target), target, tmp_path / name)
        said = [
            record.getMessage()
            for record in caplog.records
            if "report no error" in record.getMessage()
        ]
        assert bool(said) == (name == "eagle3_1")
    llama, *_ = (line for line in said if LLAMA_CPP in line)
    assert MLX_VLM in llama and "norm_output" in llama and "fc_norm" not in llama
    assert any(OPENVINO in line and "fc_norm" in line for line in said)


def test_a_block_drafter_of_several_layers_is_exported_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target(dtype=torch.float32)
    for layers in (1, 2):
        caplog.clear()
        drafter = made_drafter(dataclasses.replace(DFLASH, num_layers=layers), target)
        export_drafter(drafter, target, tmp_path / str(layers))
        assert ("first one's k_norm" in caplog.text) == (layers == 2)


def test_sglang_refuses_a_target_whose_class_would_end_the_server(tmp_path: Path) -> None:
    with pytest.raises(
        NotServable, match="its class for MixtralForCausalLM has no set_eagle3_layers_to_capture"
    ):
        FORMATS["sglang"].check(subject(architecture="MixtralForCausalLM"))
    with pytest.raises(NotServable, match="its class for CohereForCausalLM hands over no head"):
        FORMATS["sglang"].check(subject(EAGLE1, architecture="CohereForCausalLM"))
    FORMATS["sglang"].check(subject(architecture="GptOssForCausalLM", aux_layers=[2, 4, LAYERS]))
    FORMATS["vllm"].check(subject(architecture="MixtralForCausalLM"))


def test_kimis_class_is_named_as_sglang_knows_it_where_it_drafts_the_same() -> None:
    assert FORMATS["sglang"].architectures(subject(attention=LATENT)) == [
        "Eagle3DeepseekV2ForCausalLM"
    ]
    assert FORMATS["vllm"].architectures(subject(attention=LATENT)) == [
        "Eagle3DeepseekV2ForCausalLM"
    ]
    two = subject(attention=LATENT, num_layers=2)
    assert FORMATS["vllm"].architectures(two) == ["Eagle3DeepseekV3ForCausalLM"]  # of vLLM alone


@pytest.mark.vllm
def test_the_classes_are_those_of_the_vllm_that_the_table_names() -> None:
    python = find_vllm()[0]
    place = installed(python)
    assert place is not None
    if not VLLM.endswith(place.version.partition("+")[0]):
        pytest.skip(f"this is vLLM {place.version}, the table is of {VLLM}")
    others = {name.replace("ForConditionalGeneration", "ForCausalLM") for name in EAGLE3_TARGETS}
    native = {
        "MixtralForCausalLM",
        "Gemma2ForCausalLM",
        "CohereForCausalLM",
        "GlmOcrForConditionalGeneration",
    }
    for architecture in {*EAGLE3_TARGETS, *others, *native}:
        said = hands_over_states(python, architecture)
        assert said == (architecture in EAGLE3_TARGETS) or (
            said and target_flags(architecture, "eagle3")
        ), architecture


def test_what_is_the_targets_own_is_seen() -> None:
    target = tiny_target(dtype=torch.float32)
    eagle1 = made_drafter(biased(), target)
    assert subject_of(eagle1, target)[1:4] == (False, False, False)
    eagle1.entry.feature_fc.bias[3] = 1e-6
    eagle1.embed_tokens.weight[0, 0] += 1
    eagle1.lm_head.weight[0, 0] += 1
    assert subject_of(eagle1, target)[1:4] == (True, True, True)
    half = made_drafter(EAGLE3, target).to(torch.bfloat16)
    assert not subject_of(half, target).own_embedding


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (hf.MistralConfig(sliding_window=5), 5),
        (hf.MistralConfig(sliding_window=None), None),
        (hf.MistralConfig(sliding_window=0), None),
        (hf.Phi3Config(sliding_window=7), 7),
        (hf.Starcoder2Config(sliding_window=9), 9),
        # a stray key, which the family ignores and vLLM does not
        (hf.LlamaConfig(sliding_window=3), 3),
        (
            hf.Gemma3TextConfig(
                num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=6
            ),
            6,
        ),
        (hf.Gemma3TextConfig(sliding_window=6), None),
        (hf.Qwen2Config(use_sliding_window=False), None),
        (hf.LlamaConfig(), None),
    ],
)
def test_the_window_that_a_drafter_would_be_given(
    config: hf.PretrainedConfig, window: int | None
) -> None:
    assert window_of_all_layers(config) == window


def test_a_config_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.float32)
    spec = dataclasses.replace(EAGLE3, fusion=Mine())
    drafter = made_drafter(spec, target)
    assert isinstance(drafter, Drafter) and isinstance(drafter.config, DrafterConfig)
    with pytest.raises(NotServable, match="custom components: no engine knows them"):
        export_drafter(drafter, target, tmp_path / "out")
