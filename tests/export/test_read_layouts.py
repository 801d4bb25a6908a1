"""Layouts that published checkpoints have beside the usual ones: biases on three projections, no ``fc``, ropes of
several dimensions, more layers in the config than in the file, tied heads, short positions, one numbering."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafter import Concat, Drafter, DrafterSpec, LastLayer, Narrow, Norms, PreNorm, Wide
from specdec.export import (
    NotServable,
    export_drafter,
    import_checkpoint,
    import_drafter,
    read_checkpoint,
)
from specdec.export.keys import IDS, reaching
from specdec.target import Target
from tests.export.made import made_drafter, same_state
from tests.export.test_read import D, H, block, eagle1, eagle3, flat, nested, written
from tests.tiny import LAYERS, VOCAB, presets, tiny_config, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def biases(prefix: str, names: str = "qkv") -> dict[str, Tensor]:
    sizes = {"q": 48, "k": 24, "v": 24, "o": H}
    return {f"{prefix}self_attn.{name}_proj.bias": torch.randn(sizes[name]) for name in names}


def again(drafter: Drafter, target: Target, out: Path, format: str = "vllm") -> dict[str, Any]:
    """Export a drafter, read it back with its record and without, and return what config.json says."""
    export_drafter(drafter, target, out, format)
    back = import_drafter(out, target)
    assert same_state(back, drafter) and back.config == drafter.config
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


def test_eagle1_of_qwen2(tmp_path: Path, target: Target) -> None:
    """As EAGLE's authors publish it: ``qkv_bias``, and no bias on the output."""
    own = biases("layers.0.")
    config = flat(architectures=["Qwen2ForCausalLM"], model_type="qwen2", qkv_bias=True)
    drafter = import_drafter(written(tmp_path / "x", config, eagle1() | own), target)
    assert drafter.config.attention_bias == "qkv" and drafter.config.entry == Narrow(bias=True)
    attention = drafter.layers.layers[0].attention
    assert (
        torch.equal(attention.qkv_proj.bias, torch.cat([*own.values()]))
        and attention.o_proj.bias is None
    )
    with torch.no_grad():
        drafter.entry.feature_fc.bias.zero_()
    raw = again(drafter, target, tmp_path / "again")
    assert raw["qkv_bias"] is True and raw["attention_bias"] is False


@pytest.mark.parametrize("query_key", [False, True])
@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_three_biases_of_eagle3(
    query_key: bool, format: str, tmp_path: Path, target: Target
) -> None:
    """vLLM's Llama class has a bias on the output as well, which is written as zeros; its Qwen3 class has none."""
    spec = DrafterSpec(
        norms=Norms(query_key=query_key),
        recurrence=PreNorm(),
        draft_vocab_size=D,
        attention_bias="qkv",
    )
    drafter = made_drafter(spec, target)
    assert again(drafter, target, tmp_path / "out", format) is not None
    tensors = read_checkpoint(tmp_path / "out").tensors
    zero = tensors.get("layers.0.self_attn.o_proj.bias")
    assert (zero is None) if query_key else (zero is not None and not zero.any())
    stranger = import_checkpoint(read_checkpoint(tmp_path / "out")._replace(ours=None), target)
    assert stranger.config.attention_bias == ("qkv" if query_key else True)


def test_a_file_of_three_biases_under_the_flag_of_four(tmp_path: Path, target: Target) -> None:
    drafter = import_drafter(
        written(tmp_path / "x", flat(attention_bias=True), eagle3() | biases("midlayer.")), target
    )
    assert drafter.config.attention_bias == "qkv"


def test_a_bias_on_the_output_is_not_taken_for_none(tmp_path: Path, target: Target) -> None:
    spec = dataclasses.replace(presets()["eagle3"], attention_bias="qkv")
    out = tmp_path / "out"
    export_drafter(made_drafter(spec, target), target, out)
    raw = json.loads((out / "config.json").read_text())
    record = json.loads((out / "specdec.json").read_text())
    tensors = read_checkpoint(out).tensors | {"layers.0.self_attn.o_proj.bias": torch.ones(H)}
    changed = read_checkpoint(out)._replace(tensors=tensors, raw=raw, ours=record)
    with pytest.raises(ValueError, match=r"without a place: layers\.0\.self_attn\.o_proj\.bias"):
        import_checkpoint(changed, target)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_of_several_dimensions(key: str, tmp_path: Path, target: Target) -> None:
    block = {key: "mrope", "mrope_section": [2, 2, 2]}
    drafter = import_drafter(
        written(tmp_path / "x", flat(rope_theta=5e5, rope_scaling=block), eagle3()), target
    )
    assert drafter.config.rope == {"rope_type": "default", "rope_theta": 5e5}
    assert again(drafter, target, tmp_path / "y")["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 5e5,
    }


def test_a_drafter_without_fc(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """NVIDIA's for throughput: EAGLE-3's layer on the target's last state."""
    tensors = eagle3("layers.0.")
    del tensors["fc.weight"]
    config = flat(eagle_config={"use_aux_hidden_state": False, "use_last_layernorm": True})
    with caplog.at_level(logging.INFO):
        drafter = import_drafter(written(tmp_path / "x", config, tensors), target)
    assert "EAGLE-3, NVIDIA" in caplog.text and "a drafter without fc reads" in caplog.text
    assert drafter.config.fusion == LastLayer() and drafter.config.entry == Wide()
    assert drafter.config.aux_layers == (LAYERS,) and drafter.config.norms == Norms()
    raw = again(drafter, target, tmp_path / "y")
    assert raw["eagle_config"] == {"use_aux_hidden_state": False} and not {
        IDS,
        "num_aux_hidden_states",
    } & set(raw)
    line = json.loads((tmp_path / "y" / "specdec.json").read_text())["serve"]
    assert line.startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve") and '"method": "eagle3"' in line
    for format, reason in (
        ("speculators", "no drafter without fc"),
        ("sglang", "was not compared"),
    ):
        with pytest.raises(NotServable, match=reason):
            export_drafter(drafter, target, tmp_path / format, format)
    with pytest.raises(ValueError, match="leave out --aux_layers"):
        import_drafter(tmp_path / "x", target, aux_layers=[2, 3, 4])


def test_numbered_layers_of_nvidia(tmp_path: Path, target: Target) -> None:
    """Its exports of several layers call them ``midlayer.0``, and leave out the input norms of the others."""
    tensors = {name.replace("midlayer.", "midlayer.0."): value for name, value in eagle3().items()}
    tensors |= {f"midlayer.1.{name}": value for name, value in block(H).items()}
    config = flat(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"it lacks layers\.1\.input_layernorm\.weight"):
        import_drafter(written(tmp_path / "x", config, tensors), target)
    tensors["midlayer.1.input_layernorm.weight"] = torch.ones(H)
    assert import_drafter(written(tmp_path / "y", config, tensors), target).config.num_layers == 2


@pytest.mark.parametrize("told", [40, None])
def test_more_layers_in_the_config_than_in_the_file(
    told: int | None, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """EAGLE3-Vicuna1.3-13B has the target's 40; without a number transformers takes 32."""
    config = flat(num_hidden_layers=told)
    with caplog.at_level(logging.INFO):
        drafter = import_drafter(written(tmp_path / "x", config, eagle3()), target)
    assert drafter.config.num_layers == 1
    assert ("layers: 1, as the file has; its config says 40" in caplog.text) == (told == 40)
    assert again(drafter, target, tmp_path / "y")["num_hidden_layers"] == 1


@pytest.mark.parametrize("own", [True, False])
def test_a_tied_head(
    own: bool, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedding is the head, which SGLang makes of it; vLLM would take the target's, and is not to."""
    tensors = {
        name: value
        for name, value in eagle3().items()
        if name not in ("lm_head.weight", "d2t", "t2d")
    }
    embedding = torch.randn(VOCAB, H) if own else target.embedding_weight()
    tensors |= {"embed_tokens.weight": embedding} if own else {}
    config = flat(tie_word_embeddings=True, draft_vocab_size=VOCAB)
    drafter = import_drafter(written(tmp_path / "x", config, tensors), target)
    assert torch.equal(drafter.lm_head.weight, embedding) and drafter.config.head == "own"
    assert "serve an export of this drafter in its place" in caplog.text
    again(drafter, target, tmp_path / "y")
    assert "lm_head.weight" in read_checkpoint(tmp_path / "y").tensors


def warnings_of_reading(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [
        made
        for made in caplog.records
        if made.levelno >= logging.WARNING and made.name == "specdec.export.read"
    ]


def test_a_tied_head_that_is_the_targets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of = tiny_target(dtype=torch.float32, tie_word_embeddings=True)
    tensors = {
        name: value
        for name, value in eagle3().items()
        if name not in ("lm_head.weight", "d2t", "t2d")
    }
    config = flat(tie_word_embeddings=True, draft_vocab_size=VOCAB)
    drafter = import_drafter(written(tmp_path / "x", config, tensors), of)
    assert drafter.config.head == "target" and torch.equal(drafter.lm_head.weight, of.head_weight())
    assert not warnings_of_reading(caplog)


def test_short_positions_are_raised(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        drafter = import_drafter(
            written(tmp_path / "x", flat(max_position_embeddings=128), eagle3()), target
        )
    assert "positions: 128 in its config, raised to the target's 512" in caplog.text
    assert again(drafter, target, tmp_path / "y")["max_position_embeddings"] == 512


def test_short_positions_of_a_rope_that_depends_on_them(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config = flat(max_position_embeddings=128, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    drafter = import_drafter(written(tmp_path / "x", config, eagle3()), target)
    assert drafter.config.max_position_embeddings == 128 and "then rotate otherwise" in caplog.text
    with pytest.raises(
        NotServable, match="its rope dynamic then rotates otherwise than in training"
    ):
        export_drafter(drafter, target, tmp_path / "y")


@pytest.mark.parametrize(
    ("rope", "raised"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, True),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
)
def test_which_ropes_reach_further(rope: dict[str, Any], raised: bool) -> None:
    """Where the length is raised, no frequency changes."""
    config = dataclasses.replace(tiny_config(DrafterSpec()), rope=rope | {"rope_theta": 1e4})
    longer = reaching(config, 4096)
    assert (longer.max_position_embeddings == 4096) is raised
    ids = torch.arange(config.draft_vocab_size)
    before, after = (Drafter(each, ids).layers.rope for each in (config, longer))
    assert torch.equal(before.inverse, after.inverse) and before.factor == after.factor
    assert reaching(config, 16) == config


def test_defaults_less_one_in_speculators(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layout has one numbering: an export of these boundaries is read back; a stranger's is read with a warning."""
    spec = DrafterSpec(
        norms=Norms(), recurrence=PreNorm(), draft_vocab_size=D, aux_layers=[1, 2, 3]
    )
    again(made_drafter(spec, target), target, tmp_path / "x", "speculators")
    assert not warnings_of_reading(caplog)
    config = nested(**{IDS: [1, 2, 3]})
    drafter = import_drafter(written(tmp_path / "y", config, eagle3("layers.0.")), target)
    assert drafter.config.aux_layers == (1, 2, 3) and drafter.config.fusion == Concat()
    assert "give --aux_layers [2, 3, 4]" in caplog.text
    caplog.clear()
    assert import_drafter(tmp_path / "y", target, aux_layers=[2, 3, 4]).config.aux_layers == (
        2,
        3,
        4,
    )
    assert not warnings_of_reading(caplog)
