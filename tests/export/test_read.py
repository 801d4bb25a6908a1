"""Checkpoints as others publish them become drafters, and what is wrong with one is told in one line."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec, Narrow, Norms, PostNorm, PreNorm
from specdec.export import export_drafter, import_checkpoint, import_drafter, keys, read_checkpoint
from specdec.export.boundaries import aux_boundaries
from specdec.export.keys import IDS
from specdec.target import Target
from tests.export.made import made_drafter, same_state
from tests.tiny import HIDDEN, LAYERS, VOCAB, presets, tiny_config, tiny_target

H, D = HIDDEN, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def block(wide: int) -> dict[str, Tensor]:
    """The projections of one layer, after its prefix."""
    shapes = {
        "self_attn.q_proj": (48, wide),
        "self_attn.k_proj": (24, wide),
        "self_attn.v_proj": (24, wide),
        "self_attn.o_proj": (H, 48),
        "mlp.gate_proj": (48, H),
        "mlp.up_proj": (48, H),
        "mlp.down_proj": (H, 48),
        "post_attention_layernorm": (H,),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def vocabulary(ids_D: Tensor) -> dict[str, Tensor]:
    members_V = torch.zeros(VOCAB, dtype=torch.bool)
    members_V[ids_D] = True
    return {"d2t": ids_D - torch.arange(len(ids_D)), "t2d": members_V}


def eagle3(layer: str = "midlayer.", states: int = 3) -> dict[str, Tensor]:
    """SafeAILab's EAGLE-3, which SpecForge and TorchSpec follow; the embedding is left out."""
    torch.manual_seed(3)
    parts = block(2 * H) | {
        f"{name}.weight": torch.randn(H) for name in ("hidden_norm", "input_layernorm")
    }
    ids_D = torch.randperm(VOCAB)[:D].sort().values
    return {f"{layer}{name}": value for name, value in parts.items()} | {
        "fc.weight": torch.randn(H, states * H),
        "norm.weight": torch.randn(H),
        "lm_head.weight": torch.randn(D, H),
        **vocabulary(ids_D),
    }


def eagle1() -> dict[str, Tensor]:
    """SafeAILab's EAGLE-1."""
    torch.manual_seed(1)
    parts = {f"layers.0.{name}": value for name, value in block(H).items()}
    return parts | {
        "fc.weight": torch.randn(H, 2 * H),
        "fc.bias": torch.randn(H),
        "embed_tokens.weight": torch.randn(VOCAB, H),
    }


def few(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Sixteen draft tokens by target ids so low that they are offsets within the vocabulary, too; NVIDIA has no t2d."""
    ids_16 = torch.arange(0, 32, 2)
    config.update(draft_vocab_size=16)
    tensors.update({"lm_head.weight": torch.randn(16, H), "d2t": ids_16})
    del tensors["t2d"]


def flat(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **SIZES, "rope_theta": 1e4,
        "rope_scaling": None, "draft_vocab_size": D, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def nested(**more: Any) -> dict[str, Any]:
    """As the speculators library writes it."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": D,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "transformer_layer_config": {
            "model_type": "llama",
            **SIZES,
            "rope_theta": 1e4,
            "attention_bias": False,
        },
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        **more,
    }


def written(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def laid_out(drafter: Drafter, layer: str) -> dict[str, Tensor]:
    """What of a drafter of three fused states must be which tensor."""
    w = drafter.state_dict()
    q, k, v = w["layers.layers.0.attention.qkv_proj.weight"].split([48, 24, 24])
    token_q, token_k, token_v = w["entry.token_qkv_proj.weight"].split([48, 24, 24])
    gate, up = w["layers.layers.0.mlp.gate_up_proj.weight"].chunk(2)
    return {
        f"{layer}self_attn.q_proj.weight": torch.cat([token_q, q], 1),
        f"{layer}self_attn.k_proj.weight": torch.cat([token_k, k], 1),
        f"{layer}self_attn.v_proj.weight": torch.cat([token_v, v], 1),
        f"{layer}self_attn.o_proj.weight": w["layers.layers.0.attention.o_proj.weight"],
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": w["layers.layers.0.mlp.down_proj.weight"],
        f"{layer}post_attention_layernorm.weight": w["layers.layers.0.post_attention_norm.weight"],
        f"{layer}hidden_norm.weight": w["norms.hidden.weight"],
        f"{layer}input_layernorm.weight": w["norms.embed.weight"],
        "fc.weight": w["fusion.fc.weight"],
        "norm.weight": w["norms.output.weight"],
        "lm_head.weight": w["lm_head.weight"],
        "d2t": drafter.vocab.target_ids_D - torch.arange(D),
        "t2d": drafter.vocab.draft_ids_V >= 0,
    }


def check(directory: Path, target: Target) -> Drafter:
    """Import a checkpoint, find every tensor in its place, and export it with the same weights."""
    checkpoint = read_checkpoint(directory)
    drafter = import_checkpoint(checkpoint, target)
    for name, value in laid_out(drafter, "layers.0.").items():
        assert torch.equal(value, checkpoint.tensors[name]), name
    export_drafter(drafter, target, directory / "again")
    again = import_checkpoint(read_checkpoint(directory / "again"), target)
    assert same_state(again, drafter) and again.config == drafter.config
    return drafter


def test_safeailab_eagle3(tmp_path: Path, target: Target) -> None:
    drafter = check(written(tmp_path / "x", flat(), eagle3()), target)
    assert drafter.config.aux_layers == (2, 3, 4)
    assert drafter.config.norms == Norms() and drafter.config.recurrence == PreNorm()
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert drafter.config.target == target.identity


def test_specforge_and_torchspec_number_outputs(tmp_path: Path, target: Target) -> None:
    config = flat(eagle_config={IDS: [1, 2, 4], "use_aux_hidden_state": True})
    assert check(written(tmp_path / "x", config, eagle3()), target).config.aux_layers == (2, 3, 5)


def test_automodel_prefixes_and_has_eagle_3_1(tmp_path: Path, target: Target) -> None:
    tensors = eagle3("layers.0.") | {f"fc_norm.{n}.weight": torch.randn(H) for n in range(3)}
    tensors = {
        name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": x
        for name, x in tensors.items()
    }
    config = flat(fc_norm=True, norm_output=True, eagle_config={IDS: [0, 2, 4]})
    drafter = check(written(tmp_path / "x", config, tensors), target)
    assert drafter.config.norms.aux == "each" and drafter.config.recurrence == PostNorm()
    assert drafter.config.aux_layers == (1, 3, 5)
    assert torch.equal(drafter.norms.aux[1].weight, tensors["model.fc_norm.1.weight"])


def test_nvidia_orders_by_frequency_and_names_boundaries(tmp_path: Path, target: Target) -> None:
    tensors = eagle3("layers.0.") | {"input_norm.weight": torch.randn(3 * H)}
    ids_D = torch.randperm(VOCAB)[:D]
    tensors["d2t"] = ids_D - torch.arange(D)
    del tensors["t2d"]
    inner = {
        IDS: [3, 5, LAYERS],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
        "use_last_layernorm": True,
    }
    drafter = import_checkpoint(
        read_checkpoint(written(tmp_path / "x", flat(eagle_config=inner), tensors)), target
    )
    assert drafter.config.aux_layers == (3, 5, LAYERS) and drafter.config.norms.aux == "concat"
    assert drafter.vocab.target_ids_D.tolist() == sorted(ids_D.tolist())
    for row, token in enumerate(ids_D.tolist()):
        ours = int(drafter.vocab.to_draft(torch.tensor(token)))
        assert torch.equal(drafter.lm_head.weight[ours], tensors["lm_head.weight"][row])


def test_speculators(tmp_path: Path, target: Target) -> None:
    tensors = eagle3("layers.0.", states=2) | {"input_norm.weight": torch.randn(2 * H)}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, H)
    config = nested(norm_before_fc=True, norm_output=True, **{IDS: [2, 6]})
    drafter = check(written(tmp_path / "x", config, tensors), target)
    assert drafter.config.norms == Norms(aux="concat", residual="normed")
    assert drafter.config.recurrence == PostNorm() and drafter.config.aux_layers == (2, 6)
    assert torch.equal(drafter.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_safeailab_eagle1(tmp_path: Path, target: Target) -> None:
    tensors = eagle1()
    config = {**flat(bias=True), "architectures": ["LlamaForCausalLM"]}
    del config["draft_vocab_size"], config["rope_theta"]
    drafter = import_checkpoint(read_checkpoint(written(tmp_path / "x", config, tensors)), target)
    assert drafter.config.norms == presets()["eagle1"].norms and drafter.config.entry == Narrow(
        bias=True
    )
    assert drafter.config.head == "target" and drafter.config.rope["rope_theta"] == 1e4
    assert torch.equal(drafter.entry.token_fc.weight, tensors["fc.weight"][:, :H])
    assert torch.equal(drafter.entry.feature_fc.weight, tensors["fc.weight"][:, H:])
    assert torch.equal(drafter.entry.feature_fc.bias, tensors["fc.bias"])
    assert torch.equal(drafter.lm_head.weight, target.head_weight())
    with pytest.raises(ValueError, match=r"fc\.bias is dropped"):
        export_drafter(drafter, target, tmp_path / "out")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.bin"])
def test_plain_weights_in_a_pickle(name: str, tmp_path: Path, target: Target) -> None:
    directory = written(tmp_path / "x", flat(), eagle3())
    want = import_checkpoint(read_checkpoint(directory), target)
    (directory / "model.safetensors").unlink()
    torch.save(eagle3(), directory / name)
    assert same_state(import_checkpoint(read_checkpoint(directory), target), want)


def test_several_files(tmp_path: Path, target: Target) -> None:
    tensors, directory = eagle3(), tmp_path / "x"
    want = import_checkpoint(read_checkpoint(written(tmp_path / "one", flat(), tensors)), target)
    written(directory, flat(), {})
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    assert same_state(import_checkpoint(read_checkpoint(directory), target), want)


def test_a_second_layer_under_either_engines_name(tmp_path: Path, target: Target) -> None:
    second = {f"layers.1.{name}": value for name, value in block(H).items()}
    for name in ("input_layernorm", "hidden_norm"):
        tensors = eagle3() | second | {f"layers.1.{name}.weight": torch.full((H,), 0.5)}
        drafter = check(written(tmp_path / name, flat(num_hidden_layers=2), tensors), target)
        assert drafter.layers.input_norms[0].weight.eq(0.5).all()
    tensors["layers.1.input_layernorm.weight"] = torch.ones(H)
    with pytest.raises(ValueError, match="differ: engines take one or the other"):
        import_checkpoint(
            read_checkpoint(written(tmp_path / "both", flat(num_hidden_layers=2), tensors)), target
        )


@pytest.mark.parametrize(
    ("config", "layer", "said"),
    [
        (flat(), "midlayer.", "layout: EAGLE-3, SafeAILab; its layer is called midlayer.*"),
        (
            flat(eagle_config={IDS: [1, 2, 4]}),
            "midlayer.",
            "layout: EAGLE-3, SpecForge or TorchSpec; ",
        ),
        (flat(eagle_config={IDS: [1, 2, 4]}), "model.layers.0.", "layout: EAGLE-3, Automodel; "),
        (
            flat(eagle_config={IDS: [2, 3, 5], "use_last_layernorm": True}),
            "layers.0.",
            "layout: EAGLE-3, NVIDIA; ",
        ),
        (nested(), "layers.0.", "layout: EAGLE-3, speculators; its layer is called layers.0.*"),
        (flat(), "layers.0.", "layout: EAGLE-3, vLLM; "),
    ],
)
def test_whose_layout_it_is_and_what_it_says(
    config: dict[str, Any],
    layer: str,
    said: str,
    tmp_path: Path,
    target: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    drafter = import_drafter(written(tmp_path / "x", config, eagle3(layer)), target)
    layout, boundaries, switches, vocabulary = (
        record.getMessage() for record in caplog.records[-4:]
    )
    assert layout.startswith(said)
    why = "of its config" if IDS in str(config) else "its config names none: EAGLE-3's own"
    assert (
        boundaries
        == f"boundaries: {', '.join(map(str, drafter.config.aux_layers))} of {LAYERS} ({why})"
    )
    assert switches.startswith("switches: ") and "fc_norm" in switches.rpartition(" on; ")[2]
    share = f"{D} of {VOCAB} tokens ({100 * D / VOCAB:.1f} %)"
    assert vocabulary == f"draft vocabulary: {share}, d2t and t2d; the target's embedding"


def test_a_layer_under_another_name_is_guessed(tmp_path: Path, target: Target) -> None:
    tensors = eagle3()
    tensors["fc.weigth"] = tensors.pop("fc.weight")
    with pytest.raises(ValueError, match=r"lacks a matrix fc\.weight; did you mean fc\.weigth\?"):
        import_checkpoint(read_checkpoint(written(tmp_path / "x", flat(), tensors)), target)


def test_attention_with_biases(tmp_path: Path, target: Target) -> None:
    sizes = {"q": 48, "k": 24, "v": 24, "o": H}
    biases = {
        f"midlayer.self_attn.{name}_proj.bias": torch.randn(size) for name, size in sizes.items()
    }
    drafter = check(written(tmp_path / "x", flat(attention_bias=True), eagle3() | biases), target)
    attention = drafter.layers.layers[0].attention
    joined = torch.cat([biases[f"midlayer.self_attn.{name}_proj.bias"] for name in "qkv"])
    assert torch.equal(attention.qkv_proj.bias, joined)
    assert torch.equal(attention.o_proj.bias, biases["midlayer.self_attn.o_proj.bias"])


@pytest.mark.parametrize("norm_output", [True, False])
def test_a_warning_of_what_specforge_trained_otherwise(
    norm_output: bool, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config = flat(norm_output=norm_output, eagle_config={IDS: [1, 2, 3]}) | {IDS: [2, 3, 4]}
    import_drafter(written(tmp_path / "x", config, eagle3()), target)
    assert ("pull request 879" in caplog.text) == norm_output


def test_an_imported_drafter_learns(tmp_path: Path, target: Target) -> None:
    """Its parameters are ordinary ones: a step of descent changes them, and they export again."""
    drafter = import_checkpoint(read_checkpoint(written(tmp_path / "x", flat(), eagle3())), target)
    drafter.train().requires_grad_(True)
    normed = drafter.norms.output(drafter.fuse(torch.randn(1, 4, 3, H)))
    drafter.logits(normed).square().mean().backward()
    torch.optim.SGD([p for p in drafter.parameters() if p.grad is not None], lr=0.1).step()
    export_drafter(drafter, target, tmp_path / "out")
    assert same_state(import_checkpoint(read_checkpoint(tmp_path / "out"), target), drafter)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
BROKEN: dict[str, tuple[Change, str]] = {
    "no layer": (lambda c, t: t.pop("midlayer.self_attn.q_proj.weight"), "no drafter: it lacks"),
    "no fc": (lambda c, t: t.pop("fc.weight"), "no drafter: it lacks"),
    "no norm": (
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        "it lacks layers.0.hidden_norm.weight",
    ),
    "no map": (lambda c, t: t.pop("d2t"), "it lacks d2t"),
    "no head": (lambda c, t: t.pop("lm_head.weight"), "it lacks lm_head.weight"),
    "absolute ids": (
        lambda c, t: t.update(d2t=t["d2t"] + torch.arange(D)),
        "d2t rises with every token",
    ),
    "ids that fit": (lambda c, t: few(c, t), "d2t rises with every token"),
    "offsets beyond": (lambda c, t: t.update(d2t=t["d2t"] + 40), "d2t must hold offsets"),
    "half offsets": (
        lambda c, t: t.update(d2t=t["d2t"] + 0.7),
        "d2t is torch.float32, wanted integers",
    ),
    "a NaN": (
        lambda c, t: t["fc.weight"][3, 4].fill_(torch.nan),
        "the weights fc.weight are not all finite",
    ),
    "an infinity": (
        lambda c, t: t["norm.weight"][3].fill_(torch.inf),
        "the weights norm.weight are not all finite",
    ),
    "outputs at the top": (
        lambda c, t: c.update({IDS: [1, 2, 3]}),
        r"EAGLE-3's \[2, 3, 4\], if it were",
    ),
    "boundaries inside": (lambda c, t: c.update(eagle_config={IDS: [2, 3, 4]}), "EAGLE-3's"),
    "one id": (lambda c, t: c.update({IDS: 5}), "is 5, wanted a list of whole numbers"),
    "half an id": (lambda c, t: c.update({IDS: [2.5, 3, 5]}), "wanted a list of whole numbers"),
    "a true id": (
        lambda c, t: c.update(eagle_config={IDS: [True, 3, 5]}),
        "wanted a list of whole numbers",
    ),
    "a list for a table": (
        lambda c, t: c.update(eagle_config=[2, 3]),
        r"eagle_config is \[2, 3\], wanted a table",
    ),
    "a word for a switch": (
        lambda c, t: c.update(norm_output="false"),
        "norm_output is 'false', wanted true or false",
    ),
    "no heads": (lambda c, t: c.update(num_attention_heads=0), "not one that transformers reads"),
    "no groups": (
        lambda c, t: c.update(num_key_value_heads=-2),
        "num_key_value_heads is -2, wanted a number above 0",
    ),
    "a vector": (
        lambda c, t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(48)}),
        "it lacks a matrix",
    ),
    "a number": (lambda c, t: t.update({"fc.weight": torch.tensor(1.0)}), "it lacks a matrix"),
    "a layer too many": (
        lambda c, t: (
            c.update(num_hidden_layers=2),
            t.update({"layers.1.input_layernorm.weight": torch.ones(H)}),
        ),
        "it lacks layers.1.self_attn.q_proj.weight .48, 32. and 7 more",
    ),
    "another map": (
        lambda c, t: t.update(t2d=t["t2d"].flip(0)),
        "t2d and d2t name different tokens",
    ),
    "a short map": (lambda c, t: t.update(d2t=t["d2t"][:-1].clone()), r"d2t has shape \[39\]"),
    "norms too many": (
        lambda c, t: t.update({"fc_norm.0.weight": torch.ones(H)}),
        "without a place: fc_norm.0",
    ),
    "norms too few": (lambda c, t: c.update(fc_norm=True), "it lacks fc_norm.0.weight"),
    "both norms": (lambda c, t: c.update(fc_norm=True, norm_before_fc=True), "both on"),
    "a bias": (
        lambda c, t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(48)}),
        "neither attention_bias nor qkv_bias",
    ),
    "parallel": (
        lambda c, t: t.update(mask_hidden=torch.ones(1, 3 * H)),
        "it lacks mask_token_id in config.json",
    ),
    "a mask, no state": (lambda c, t: c.update(pard_token=7), "it lacks the tensor mask_hidden"),
    "no such mask": (
        lambda c, t: (c.update(ptd_token_id=99), t.update(mask_hidden=torch.ones(3 * H))),
        "none of the",
    ),
    "an odd mask": (
        lambda c, t: c.update(dflash_config={"mask_token_id": "x"}),
        "mask_token_id is 'x'",
    ),
    "latent": (
        lambda c, t: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(8, H)}),
        "it lacks kv_lora_rank in config.json",
    ),
    "half a bias": (
        lambda c, t: (
            c.update(attention_bias=True),
            t.update({"midlayer.self_attn.q_proj.bias": torch.ones(48)}),
        ),
        "it lacks layers.0.self_attn.k_proj.bias",
    ),
    "a word for a bias": (lambda c, t: c.update(attention_bias="yes"), "attention_bias"),
    "a wrong width": (
        lambda c, t: c.update(intermediate_size=50),
        r"gate_proj.weight is \[48, 32\], the config says \[50, 32\]",
    ),
    "a long head": (
        lambda c, t: t.update({"lm_head.weight": torch.ones(D + 1, H)}),
        r"lm_head.weight is \[41, 32\]",
    ),
    "a wide key": (
        lambda c, t: t.update({"midlayer.self_attn.k_proj.weight": torch.ones(24, 3 * H)}),
        "k_proj",
    ),
    "a narrow key": (
        lambda c, t: t.update({"midlayer.self_attn.k_proj.weight": torch.ones(24, H)}),
        "k_proj",
    ),
    "another act": (lambda c, t: c.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "another target": (lambda c, t: c.update(vocab_size=100), "target of vocab_size 100"),
    "another width": (
        lambda c, t: c.update(target_hidden_size=64),
        "target of target_hidden_size 64",
    ),
    "two lists": (
        lambda c, t: c.update({IDS: [2, 3, 5], "eagle_config": {IDS: [2, 3, 5]}}),
        "--aux_layers",
    ),
    "no such layer": (lambda c, t: c.update({IDS: [2, 3, 9]}), r"in 0\.\.7"),
    "no states": (
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}),
        "engines drop: remove one",
    ),
    "a word for no states": (
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": "no"}),
        "wanted true or",
    ),
    "a gap in the layers": (
        lambda c, t: (
            c.update(num_hidden_layers=3),
            t.update({"layers.2.input_layernorm.weight": torch.ones(H)}),
        ),
        "it lacks layers.1.self_attn.q_proj.weight",
    ),
    "a tied head over some": (
        lambda c, t: (c.update(tie_word_embeddings=True), t.pop("lm_head.weight")),
        "is no head over 40",
    ),
    "a bias on the output alone": (
        lambda c, t: c.update(attention_bias=True, qkv_bias=False),
        "on the output alone",
    ),
    "integers": (
        lambda c, t: t.update({"fc.weight": torch.ones(H, 3 * H, dtype=torch.int16)}),
        "only unquantized",
    ),
    "int8 without scales": (
        lambda c, t: t.update({"fc.weight": torch.ones(H, 3 * H, dtype=torch.int8)}),
        "without fc.weight_scale_inv or fc.weight_scale",
    ),
    "twice": (lambda c, t: t.update({"layers.0.hidden_norm.weight": torch.ones(H)}), "twice"),
    "mixed layers": (lambda c, t: c.update(layer_types=["a", "b"]), "one kind for all layers"),
    "odd rope": (
        lambda c, t: c.update(rope_scaling={"rope_type": "spiral"}),
        "unknown rope_type 'spiral'",
    ),
    "no number": (lambda c, t: c.update(rms_norm_eps="small"), "rms_norm_eps"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_in_one_line(name: str, tmp_path: Path, target: Target) -> None:
    change, message = BROKEN[name]
    config, tensors = flat(), eagle3()
    change(config, tensors)
    with pytest.raises(ValueError, match=message) as told:
        import_checkpoint(read_checkpoint(written(tmp_path / "x", config, tensors)), target)
    assert str(tmp_path / "x") in str(told.value) and len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": None}, "norm_before_residual is absent"),
        (
            {"speculators_model_type": "xpress"},
            "only eagle3, peagle, dflash and dspark can be read",
        ),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
    ],
)
def test_speculators_that_cannot_be_read(
    change: dict[str, Any], message: str, tmp_path: Path, target: Target
) -> None:
    config = {key: value for key, value in nested(**change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        import_checkpoint(
            read_checkpoint(written(tmp_path / "x", config, eagle3("layers.0."))), target
        )


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    directory = written(tmp_path / "x", flat(), {})
    (directory / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no file of plain weights"):
        read_checkpoint(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*invariant:UserWarning")  # torch 2.11 and 2.14
def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    directory = written(tmp_path / "x", flat(), {})
    (directory / "model.safetensors").write_bytes(b"12")
    with pytest.raises(ValueError, match="damaged or cut off"):
        read_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        read_checkpoint(directory)
    for content in (
        [torch.ones(1)],
        {1: torch.ones(1)},
        {"fc.weight": torch.ones(2, 2).to_sparse()},
    ):
        torch.save(content, directory / "pytorch_model.bin")
        with pytest.raises(ValueError, match="not a table of tensors"):
            read_checkpoint(directory)
    for raw in (b"", b"fc.weight: 1, 2, 3", b"\x80\x02garbage"):
        (directory / "pytorch_model.bin").write_bytes(raw)
        with pytest.raises(ValueError, match="no file of plain weights") as told:
            read_checkpoint(directory)
        assert "\x1b" not in str(told.value) and "()" not in str(told.value)
    (directory / "pytorch_model.bin").unlink()
    (directory / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_checkpoint(directory)


def test_our_own_record_must_agree(tmp_path: Path, target: Target) -> None:
    drafter = made_drafter(DrafterSpec(draft_vocab_size=D), target)
    directory = tmp_path / "x"
    export_drafter(drafter, target, directory)
    config = json.loads((directory / "config.json").read_text())
    config[IDS], config["eagle_config"][IDS] = [1, 3, 4], [0, 2, 3]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: its SHA-256 is not that in SHA256SUMS"):
        read_checkpoint(directory)
    (directory / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"specdec\.json and config\.json differ in aux_layers"):
        import_checkpoint(read_checkpoint(directory), target)


L = 36


def test_a_shallow_target_has_no_usual_boundaries() -> None:
    assert aux_boundaries({IDS: [1, 2, 3], "eagle_config": {IDS: [0, 1, 2]}}, 4) == (1, 2, 3)
    with pytest.raises(ValueError, match="too shallow for EAGLE-3's boundaries"):
        aux_boundaries({}, 4)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, (2, 18, 33)),  # EAGLE-3's
        ({IDS: [2, 18, 33]}, (2, 18, 33)),
        ({IDS: [33, 2, 18]}, (2, 18, 33)),  # engines concatenate ascending
        ({IDS: [0, 36]}, (0, 36)),
        ({IDS: None, "eagle_config": None}, (2, 18, 33)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
        # NVIDIA's: the last can be no layer's output
        ({"eagle_config": {IDS: [24, 30, 36]}}, (24, 30, 36)),
        ({"eagle_config": {"layer_ids": [2, 18, 33]}}, (2, 18, 33)),
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
    ],
)
def test_boundaries_that_a_config_names(raw: dict[str, object], found: tuple[int, ...]) -> None:
    assert aux_boundaries(raw, L) == found


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [2, 18, 33]}}, "should be one less everywhere"),
        ({IDS: [2, 2, 33]}, "named once"),
        ({IDS: [2, 37]}, r"in 0\.\.36"),
        ({IDS: [-1, 2]}, r"in 0\.\.36"),
    ],
)
def test_boundaries_that_contradict_or_repeat_are_refused(
    raw: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        aux_boundaries(raw, L)


def test_boundaries_that_are_given_decide_whatever_the_lists_say(
    tmp_path: Path, target: Target
) -> None:
    """As the refusal tells to: contradictory lists, and EAGLE-3's own in the other numbering."""
    for n, names in enumerate(
        ({IDS: [2, 3, 5], "eagle_config": {IDS: [2, 3, 5]}}, {"eagle_config": {IDS: [2, 3, 4]}})
    ):
        directory = written(tmp_path / str(n), flat(**names), eagle3())
        with pytest.raises(ValueError, match="--aux_layers"):
            import_drafter(directory, target)
        assert import_drafter(directory, target, aux_layers=[1, 3, 6]).config.aux_layers == (
            1,
            3,
            6,
        )


def test_the_list_of_outputs_is_one_less_and_has_no_embeddings() -> None:
    config = tiny_config(presets()["eagle3"])
    assert keys._eagle_config(config) == {"use_aux_hidden_state": True, IDS: [1, 2, 3]}
    low = dataclasses.replace(config, aux_layers=(0, 2))
    assert keys._eagle_config(low) == {"use_aux_hidden_state": True}
