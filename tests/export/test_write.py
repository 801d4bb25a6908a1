"""What is written for each engine, and what is left to the target."""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM, LlamaForCausalLM

from specdec.cli import main
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Norms, load_drafter
from specdec.drafter.io import weights_sha256
from specdec.export import FORMATS, export_drafter, import_checkpoint, read_checkpoint, subject_of
from specdec.export.tensors import LAYER
from specdec.target import NotServable, Target, TargetSource
from specdec.utils.reading import sha256
from tests.export.made import evaluation, made_drafter, same_state
from tests.export.made import names as files
from tests.perfect import markov_target
from tests.tiny import (
    HIDDEN,
    LAYERS,
    VOCAB,
    biased,
    largest_file,
    llama_config,
    presets,
    tiny_target,
    variants,
)

H = HIDDEN
SPEC = DrafterSpec(draft_vocab_size=40)
EAGLE3_1 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": 40,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "logit_scale": 1.0,
    "mlp_bias": False,
    "num_aux_hidden_states": 3,
    "num_aux_layers": 3,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": True,
    "norm_output": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention"],
}
SHAPES = {
    "midlayer.self_attn.q_proj.weight": (48, 2 * H),
    "midlayer.self_attn.k_proj.weight": (24, 2 * H),
    "midlayer.self_attn.v_proj.weight": (24, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, 48),
    "midlayer.mlp.gate_proj.weight": (48, H),
    "midlayer.mlp.up_proj.weight": (48, H),
    "midlayer.mlp.down_proj.weight": (H, 48),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "fc.weight": (H, 3 * H),
    **{f"fc_norm.{n}.weight": (H,) for n in range(3)},
    "norm.weight": (H,),
    "lm_head.weight": (40, H),
    "d2t": (40,),
    "t2d": (VOCAB,),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def test_every_key_and_tensor_of_eagle_3_1(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(SPEC, target)
    out = tmp_path / "out"
    exported = export_drafter(
        drafter, target, out, served=TargetSource("org/target"), draft_tokens=5
    )
    assert config_of(out) == EAGLE3_1
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in tensors.items()} == SHAPES
    ids_D = drafter.vocab.target_ids_D
    assert tensors["d2t"].dtype == torch.int64 and torch.equal(
        tensors["d2t"] + torch.arange(40), ids_D
    )
    assert tensors["t2d"].dtype == torch.bool and torch.equal(tensors["t2d"].nonzero()[:, 0], ids_D)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert files(out) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "specdec.json",
    ]
    assert exported.checkpoint.method == "eagle3" and exported.directory == out
    words = shlex.split(exported.command)
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(out),
        "num_speculative_tokens": 5,
    }


def test_a_block_is_served_with_all_of_its_masks(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(dataclasses.replace(variants()["dflash"], num_layers=1), target)
    with pytest.raises(ValueError, match="--draft_tokens 3: the drafter's block makes 7 drafts"):
        export_drafter(drafter, target, tmp_path / "out", draft_tokens=3)
    for format in ("vllm", "speculators"):
        out = tmp_path / format
        exported = export_drafter(drafter, target, out, format)
        config = config_of(out)
        assert config["block_size"] == 8 and exported.checkpoint.drafts(None) == 7
        (out / "SHA256SUMS").unlink()
        (out / "config.json").write_text(
            json.dumps({k: v for k, v in config.items() if k != "block_size"})
        )
        with pytest.raises(ValueError, match="block_size is None, wanted the nodes of a block"):
            import_checkpoint(read_checkpoint(out), target)


def test_our_own_record(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(SPEC, target)
    exported = export_drafter(drafter, target, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "specdec.json").read_text())
    assert record["weights_sha256"] == sha256(tmp_path / "out" / "model.safetensors")
    assert DrafterConfig.from_json(record["drafter"]) == drafter.config
    assert (record["method"], record["engine"], record["serve"]) == (
        "eagle3",
        "vLLM 0.32.0",
        exported.command,
    )
    assert "command" in record["provenance"]


@pytest.mark.parametrize("spec", [presets()["eagle1"], biased()], ids=["no bias", "a bias of zero"])
def test_eagle1_carries_neither_head_nor_norms(
    spec: DrafterSpec, tmp_path: Path, target: Target
) -> None:
    drafter = made_drafter(spec, target)
    exported = export_drafter(drafter, target, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in tensors if not name.startswith("layers.0.")} - {"fc.bias"} == {
        "fc.weight"
    }
    assert ("fc.bias" in tensors) == spec.entry.bias
    assert not any("layernorm" in name and "post" not in name for name in tensors)
    assert config_of(tmp_path / "out")["architectures"] == ["EagleLlamaForCausalLM"]
    assert '"method": "eagle"' in exported.command
    assert torch.equal(tensors["fc.weight"][:, :H], drafter.entry.token_fc.weight)


def test_a_class_that_the_other_engine_does_not_know(tmp_path: Path, target: Target) -> None:
    """Where SGLang would draft something else it must not load the drafter at all."""
    cases = {
        "both": (SPEC, "LlamaForCausalLMEagle3"),
        "residual": (DrafterSpec(norms=Norms("each", residual="normed")), "Eagle3LlamaForCausalLM"),
        "heads": (DrafterSpec(norms=Norms("each", query_key=True)), "Eagle3Qwen3ForCausalLM"),
        "embeddings": (DrafterSpec(aux_layers=[0, 3]), "Eagle3LlamaForCausalLM"),
        "two": (DrafterSpec(num_layers=2), "Eagle3LlamaForCausalLM"),
    }
    for name, (spec, wanted) in cases.items():
        export_drafter(made_drafter(spec, target), target, tmp_path / name)
        assert config_of(tmp_path / name)["architectures"] == [wanted]
    assert config_of(tmp_path / "heads")["model_type"] == "qwen3"
    own = made_drafter(SPEC, target, own_embedding=True)
    export_drafter(own, target, tmp_path / "own")
    assert config_of(tmp_path / "own")["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert "embed_tokens.weight" in load_file(tmp_path / "own" / "model.safetensors")


def test_a_window_and_further_layers(tmp_path: Path, target: Target) -> None:
    spec = DrafterSpec(attention_window=16, num_layers=2, draft_vocab_size="all")
    export_drafter(made_drafter(spec, target), target, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert (config["sliding_window"], config["layer_types"]) == (16, ["sliding_attention"] * 2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (48, H)
    assert "layers.1.input_layernorm.weight" in tensors and not {"d2t", "t2d"} & set(tensors)
    # SGLang does not read the window there
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"]
    windowed = made_drafter(DrafterSpec(attention_window=16), target)
    line = export_drafter(windowed, target, tmp_path / "sglang", "sglang").command
    assert "--speculative-draft-window-size 16" in line


def drafter_layer(directory: Path) -> dict[str, Any]:
    """The keys of the drafter's layers, whatever the format nests them in."""
    config = config_of(directory)
    return config.get("transformer_layer_config", config)


WHOLE = {"use_sliding_window": True, "sliding_window": 2**30, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("spec", "format", "wanted"),
    [
        (SPEC, "vllm", WHOLE),
        (SPEC, "speculators", WHOLE),
        (SPEC, "sglang", WHOLE),
        (DrafterSpec(norms=Norms("each", query_key=True)), "vllm", WHOLE),
        (variants()["peagle"], "vllm", WHOLE),
        (variants()["peagle"], "speculators", WHOLE),
        (variants()["dflash"], "vllm", WHOLE | {"layer_types": ["sliding_attention"] * 2}),
        (variants()["dflash"], "speculators", WHOLE | {"layer_types": ["sliding_attention"] * 2}),
        (variants()["dspark"], "vllm", WHOLE | {"layer_types": ["sliding_attention"] * 2, "is_causal": False}),
        (variants()["dspark"], "speculators", WHOLE | {"layer_types": ["sliding_attention"] * 2, "is_causal": False}),
        (presets()["eagle1"], "vllm", WHOLE | {"target_layer_count": LAYERS}),
        (presets()["eagle1"], "sglang", WHOLE | {"target_layer_count": LAYERS}),
        (dataclasses.replace(SPEC, attention_window=16), "vllm", WHOLE | {"sliding_window": 16}),
        (dataclasses.replace(presets()["eagle1"], attention_window=16), "vllm",
         WHOLE | {"sliding_window": 16, "target_layer_count": LAYERS}),
    ],
)  # fmt: skip
def test_a_drafter_keeps_its_own_window_where_every_layer_of_the_target_slides(
    spec: DrafterSpec, format: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM gives the target's window to each layer that names none."""
    target = Target(markov_target("mistral").model.float())
    drafter = made_drafter(spec, target)
    export_drafter(drafter, target, tmp_path / "out", format)
    layer = drafter_layer(tmp_path / "out")
    assert {key: layer.get(key) for key in wanted} == wanted
    assert drafter_layer(tmp_path / "out").get("dflash_config", {}).get("causal", False) is False
    read = import_checkpoint(read_checkpoint(tmp_path / "out"), target)
    assert read.config.attention_window == drafter.config.attention_window


def test_a_window_of_method_eagle_is_written_for_any_target(tmp_path: Path, target: Target) -> None:
    export_drafter(made_drafter(presets()["eagle1"], target), target, tmp_path / "full")
    assert not {"layer_types", "sliding_window", "target_layer_count"} & set(
        config_of(tmp_path / "full")
    )
    spec = dataclasses.replace(presets()["eagle1"], attention_window=16)
    export_drafter(made_drafter(spec, target), target, tmp_path / "windowed")
    config = config_of(tmp_path / "windowed")
    assert (config["sliding_window"], config["layer_types"], config["target_layer_count"]) == (
        16, ["sliding_attention"], LAYERS,
    )  # fmt: skip


@pytest.mark.parametrize(
    "spec", [SPEC, presets()["eagle1"], variants()["dflash"]], ids=["eagle3", "eagle", "dflash"]
)
@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_the_rope_is_not_the_one_that_the_targets_class_changes(
    spec: DrafterSpec, format: str, tmp_path: Path
) -> None:
    """vLLM's ERNIE-4.5 sets the style of a rope that get_rope hands to all who ask by the same parameters."""
    if format == "speculators" and spec == presets()["eagle1"]:
        pytest.skip("that format has no method eagle")
    sizes = llama_config().to_dict() | {"architectures": ["Ernie4_5ForCausalLM"]}
    known = {
        key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    target = Target(
        Ernie4_5ForCausalLM(Ernie4_5Config(**known, **heads, tie_word_embeddings=False)).float()
    )
    drafter = made_drafter(spec, target)
    export_drafter(drafter, target, tmp_path / "out", format)
    rope = drafter_layer(tmp_path / "out")["rope_parameters"]
    assert (
        rope == {**drafter.config.rope, "owner": "drafter"}
        and rope != target.config.rope_parameters
    )
    assert (
        import_checkpoint(read_checkpoint(tmp_path / "out"), target).config.rope
        == drafter.config.rope
    )


def test_sglang_gets_what_it_would_leave_at_random(tmp_path: Path, target: Target) -> None:
    exported = export_drafter(
        made_drafter(DrafterSpec(num_layers=2), target), target, tmp_path / "two", "sglang"
    )
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    assert torch.equal(
        tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"]
    )
    words = shlex.split(exported.command)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "4"
    export_drafter(made_drafter(presets()["eagle1"], target), target, tmp_path / "one", "sglang")
    assert not load_file(tmp_path / "one" / "model.safetensors")["fc.bias"].any()
    assert config_of(tmp_path / "one")["architectures"] == [
        "LlamaForCausalLMEagle",
        "LlamaForCausalLM",
    ]


def test_speculators_nests_the_layer(tmp_path: Path, target: Target) -> None:
    exported = export_drafter(
        made_drafter(SPEC, target),
        target,
        tmp_path / "out",
        "speculators",
        served=TargetSource("org/t"),
    )
    config = config_of(tmp_path / "out")
    assert "model_type" not in config  # vLLM refuses it there
    assert "eagle_config" not in config["transformer_layer_config"]  # SGLang's numbers
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_aux_hidden_states"], layer["vocab_size"]) == (
        "llama",
        3,
        VOCAB,
    )
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/t",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (
        config["norm_before_residual"] is False
        and config["fc_norm"] is True
        and config["norm_output"] is True
    )
    assert (
        config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and config["draft_vocab_size"] == 40
    )
    assert exported.command == f"vllm serve {tmp_path / 'out'}"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors
    # the library loads nothing from the verifier of its own accord
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding_weight())
    target.model.save_pretrained(tmp_path / "target")
    here = TargetSource(os.path.relpath(tmp_path / "target"))
    export_drafter(
        made_drafter(SPEC, target), target, tmp_path / "here", "speculators", served=here
    )
    verifier = config_of(tmp_path / "here")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(tmp_path / "target")


@pytest.mark.parametrize(
    ("family", "spec", "flags"),
    [
        ("llama", SPEC, ""),
        ("gemma2", SPEC, " --model-impl transformers"),
        ("mistral", SPEC, ""),
    ],
)
def test_the_line_has_the_flags_that_the_family_needs(
    family: str, spec: DrafterSpec, flags: str, tmp_path: Path
) -> None:
    target = markov_target(family)
    target = Target(target.model.float())
    for format in ("vllm", "speculators"):
        exported = export_drafter(made_drafter(spec, target), target, tmp_path / format, format)
        assert exported.command.endswith(flags) and ("--model-impl" in exported.command) == bool(
            flags
        )


def test_a_scaled_embedding_is_not_shared_with_a_drafter_that_has_no_norm_for_it(
    tmp_path: Path,
) -> None:
    gemma = Target(markov_target("gemma2").model.float())
    drafter = made_drafter(presets()["eagle1"], gemma)
    with pytest.raises(NotServable, match=r"with the scale in it.* train an EAGLE-3 drafter"):
        export_drafter(drafter, gemma, tmp_path / "out")


def test_the_line_names_a_local_target_for_every_working_directory(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    for format in ("vllm", "sglang"):
        drafter = made_drafter(SPEC, target)
        line = export_drafter(
            drafter, target, Path(format), format, served=TargetSource("target")
        ).command
        named = [word for word in shlex.split(line) if word.endswith("target")]
        assert named == [str(tmp_path / "target")] and str(tmp_path / format) in line


def test_the_embedding_that_eagles_own_code_would_not_load(tmp_path: Path, target: Target) -> None:
    """It takes the target's where the config has no target_hidden_size, and the file's otherwise."""
    export_drafter(made_drafter(SPEC, target), target, tmp_path / "theirs")
    export_drafter(made_drafter(SPEC, target, own_embedding=True), target, tmp_path / "own")
    for name, held in (("theirs", False), ("own", True)):
        assert ("target_hidden_size" in config_of(tmp_path / name)) == held
        assert ("embed_tokens.weight" in load_file(tmp_path / name / "model.safetensors")) == held


def test_the_card_quotes_an_evaluation_of_this_drafter_alone(
    tmp_path: Path, target: Target
) -> None:
    drafter = made_drafter(SPEC, target)
    fingerprint = target.identity["fingerprint"]
    stored = drafter.config.to_json() | {"weights_sha256": weights_sha256(drafter)}
    good = evaluation(tmp_path / "good", stored, fingerprint)
    export_drafter(drafter, target, tmp_path / "out", evaluation=[good])
    card = (tmp_path / "out" / "README.md").read_text()
    quoted = "2.35 [2.10, 2.60] | 1.72x [1.50, 1.90] | 79 of 80 | 10% | 2.10 [2.00, 2.20] |"
    assert f"| mt_bench.jsonl | 80 | 0 | chain of 5 | {quoted}" in card
    for name, wrong, message in (
        ("a", evaluation(tmp_path / "a", stored, "other"), "not an evaluation of this target"),
        (
            "b",
            evaluation(tmp_path / "b", stored | {"num_layers": 2}, fingerprint),
            "of this drafter",
        ),
        ("c", tmp_path / "nowhere", "no such file"),
        (
            "e",
            evaluation(tmp_path / "e", stored | {"weights_sha256": "0" * 64}, fingerprint),
            "of this drafter's weights",
        ),
        (
            "f",
            evaluation(tmp_path / "f", drafter.config.to_json(), fingerprint),
            "of this drafter's weights",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export_drafter(drafter, target, tmp_path / f"out-{name}", evaluation=[wrong])
        assert not (tmp_path / f"out-{name}").exists()
    (good / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match="not an evaluation of this target"):
        export_drafter(drafter, target, tmp_path / "out-d", evaluation=[good])


def test_a_full_disk_leaves_nothing(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(SPEC, target)
    with largest_file(3000), pytest.raises(ValueError, match=r"out"):
        export_drafter(drafter, target, tmp_path / "out")
    assert files(tmp_path) == []


def test_what_reads_back_otherwise_is_not_exported(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = made_drafter(SPEC, target)
    monkeypatch.setitem(LAYER, "mlp.gate_proj", "mlp.up_proj")  # a table with a mistake
    with pytest.raises(ValueError, match=r"lack|otherwise"):
        export_drafter(drafter, target, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(FORMATS["vllm"], "engine", "SGLang 0.5.23")
    tensors = type(FORMATS["vllm"]).tensors

    def worse(self: object, *args: Any) -> dict[str, torch.Tensor]:
        made = tensors(FORMATS["vllm"], *args)
        made["norm.weight"] = made["norm.weight"] + 1e-6
        return made

    monkeypatch.setattr(type(FORMATS["vllm"]), "tensors", worse)
    with pytest.raises(ValueError, match=r"norms\.output\.weight reads back otherwise"):
        export_drafter(drafter, target, tmp_path / "out")
    assert files(tmp_path) == []


def test_weights_that_are_not_finite(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(SPEC, target)
    drafter.fusion.fc.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"fc\.weight are not all finite"):
        export_drafter(drafter, target, tmp_path / "out")


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SHARED = {"eagle1": (EMBEDDING, HEAD), "eagle3": (EMBEDDING,), "eagle3_1": (EMBEDDING,)}
DTYPES = {F64: "float64", F32: "float32", BF16: "bfloat16", F16: "float16"}


def loaded(dtype: torch.dtype) -> Target:
    """One checkpoint of float32, loaded in a dtype."""
    model = LlamaForCausalLM(llama_config())
    model.load_state_dict(tiny_target(dtype=F32).model.state_dict())
    return Target(model.to(dtype))


def trained(name: str, target: Target) -> Drafter:
    """Stored in float32 whatever the target was in, as ``fit`` does."""
    drafter = made_drafter(presets()[name], target).float()
    drafter.warm_start(target.embedding_weight(), target.head_weight())
    return drafter


@pytest.mark.parametrize("format", ["vllm", "sglang"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("then", "now"), [(BF16, F32), (F32, BF16), (F32, F64)])
def test_the_targets_weights_are_left_out_in_whatever_dtype(
    name: str,
    then: torch.dtype,
    now: torch.dtype,
    format: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter, target = trained(name, loaded(then)), loaded(now)
    export_drafter(drafter, target, tmp_path / "out", format)
    written = {EMBEDDING, HEAD} & set(load_file(tmp_path / "out" / "model.safetensors"))
    assert written == {EMBEDDING, HEAD} - set(SHARED[name])
    back = import_checkpoint(read_checkpoint(tmp_path / "out"), target)
    theirs = {EMBEDDING: target.embedding_weight(), HEAD: target.head_weight()}
    for key, value in back.state_dict().items():
        wanted = theirs[key].to(F32) if key in SHARED[name] else drafter.state_dict()[key]
        assert torch.equal(value, wanted), key
    assert dataclasses.replace(back.config, target=drafter.config.target) == drafter.config
    lost = then in (BF16, F16) and now != then
    said = " and ".join(f"{key} to {DTYPES[then]}" for key in SHARED[name])
    told = [record.message for record in caplog.records if "rounded" in record.message]
    assert len(told) == lost and all(f"rounded, {said}: an engine reads" in line for line in told)
    # fingerprints are of bfloat16, not of float16 in it
    assert ("another target" in caplog.text) is (then == F16)
    assert same_state(back, drafter) is (then == now or (then, now) == (F32, F64))


@pytest.mark.parametrize(("then", "now"), [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32)])
@pytest.mark.parametrize("share", [5e-3, 1.0])
def test_trained_weights_are_the_drafters_own(
    then: torch.dtype, now: torch.dtype, share: float
) -> None:
    """However little they moved, a few of them or all: by far less than bfloat16 tells apart.

    Only where the target itself is loaded in bfloat16 is such a difference none that an engine could serve.
    """
    target, drafter = loaded(now), trained("eagle1", loaded(then))
    assert subject_of(drafter, target)[1:3] == (False, False)
    chosen = (
        torch.rand(drafter.embed_tokens.weight.shape, generator=torch.Generator().manual_seed(0))
        < share
    )
    assert chosen.any()
    by = 1e-2 if now == BF16 else 1e-5
    for weight in (drafter.embed_tokens.weight, drafter.lm_head.weight):
        before = weight.clone()
        weight[chosen] *= 1 + by
        assert subject_of(drafter, target)[1:3] != (False, False)
        weight.copy_(before)
    assert subject_of(drafter, target)[1:3] == (False, False)


@pytest.mark.slow
def test_fit_in_bfloat16_then_export_import_and_parity(
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    text, of, half = (
        str(text_file),
        ["--target", str(target_directory)],
        ["--target.dtype", "bfloat16"],
    )
    run, served, back = (str(tmp_path / name) for name in ("run", "served", "back"))
    fit = [
        "fit", "--config", "conf/train/eagle1.yaml", "--data", "TextData", "--data.train", text, "--data.val", text,
        "--data.seq_len", "32", "--model.target.source", str(target_directory), "--model.target.dtype", "bfloat16",
        "--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "0",
        "--trainer.log_every_n_steps", "1", "--out", run,
    ]  # fmt: skip
    assert main(fit) == 0
    assert main(["export", "--drafter", f"{run}/drafter", *of, "--out", served]) == 0
    assert main(["import", "--checkpoint", served, *of, "--out", back]) == 0
    one, two, target = (
        load_drafter(f"{run}/drafter"),
        load_drafter(back),
        Target.load(target_directory),
    )
    assert torch.equal(one.embed_tokens.weight, target.embedding_weight().bfloat16().float())
    assert torch.equal(two.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(two.lm_head.weight, target.head_weight()) and two.config == one.config
    caplog.clear()
    parity = ["parity", "--drafter", f"{run}/drafter", "--max_new_tokens", "8", "--depth", "2", *of]
    assert main([*parity, *half]) == 0
    assert "rounded" not in caplog.text
    capsys.readouterr()
    assert main([*parity, "--exported", served]) == 1  # float32 shows what bfloat16 rounded
    assert f"rounded, {EMBEDDING} to bfloat16 and {HEAD} to bfloat16" in caplog.text
    told = capsys.readouterr().out
    assert "not what this drafter exports" not in told
    assert "NOT THE SAME" in told.splitlines()[-1]
