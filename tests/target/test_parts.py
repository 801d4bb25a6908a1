"""Embedding, final norm and head of a target, by name out of files whose layers are gone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.nn.view import View
from specdec.target import Target, TargetSource
from tests.target.zoo import FAMILIES, make, tokens

# a head of its own, tied, capped, with a bias, scaled, within a model of images, with experts
SOME = ("qwen2", "llama_tied", "gemma2", "phi", "granite", "gemma3_wrapper", "gemma4_wrapper", "qwen3_vl",
        "deepseek_v3")  # fmt: skip


def without_layers(directory: Path) -> Path:
    """Every file of weights, without what stands in a list of modules."""
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 1
    dropped = 0
    for file in files:
        tensors = load_file(file)
        kept = {
            name: value
            for name, value in tensors.items()
            if "layers." not in name and "blocks." not in name
        }
        dropped += len(tensors) - len(kept)
        save_file(kept, file, metadata={"format": "pt"}) if kept else file.unlink()
    assert dropped > 8
    index = directory / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    written["weight_map"] = {
        n: f for n, f in written["weight_map"].items() if "layers." not in n and "blocks." not in n
    }
    index.write_text(json.dumps(written))
    return directory


def saved(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    model = make(family).to(dtype)
    model.generation_config.eos_token_id = [2, 5, 7]  # of which config.json knows one
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


@pytest.mark.parametrize("family", SOME)
def test_parts_are_those_of_the_whole(family: str, tmp_path: Path) -> None:
    """The same logits of the same states, and the same identity but for the layers' weights."""
    whole = Target.load(saved(family, tmp_path))
    ids_1T = tokens(9)
    final_1TH = whole.forward(ids_1T, View.packed(torch.zeros_like(ids_1T)), ()).final_BTH
    parts = Target.load(without_layers(tmp_path), parts=True).to("cpu")
    assert parts.eos_token_ids == whole.eos_token_ids >= {2, 5, 7}
    assert torch.equal(parts.logits(final_1TH), whole.logits(final_1TH))
    rows_D = torch.tensor([3, 9, 40])
    assert torch.equal(parts.logits(final_1TH, rows_D), whole.logits(final_1TH, rows_D))
    assert torch.equal(parts.embedding_weight(), whole.embedding_weight())
    assert torch.equal(parts.final_norm(final_1TH), whole.final_norm(final_1TH))
    assert (parts.head_weight() is parts.embedding_weight()) == (
        whole.head_weight() is whole.embedding_weight()
    )
    ours, theirs = parts.identity, whole.identity
    assert (
        ours == theirs | {"fingerprint": None, "exact": None}
        and parts.is_of(theirs)
        and whole.is_of(ours)
    )
    parts.take_identity(theirs)
    assert parts.identity == theirs and TargetSource.of(parts).parts
    with pytest.raises(ValueError, match=r"target\.parts is on, so it has no layers to run"):
        parts.forward(ids_1T, View.packed(torch.zeros_like(ids_1T)), ())
    with pytest.raises(ValueError, match=r"target\.parts is on"):
        parts.prove()


def test_weights_are_of_the_dtype_and_device_that_are_asked_for(tmp_path: Path) -> None:
    parts = Target.load(saved("phi", tmp_path), dtype="bfloat16", parts=True)
    whole = Target.load(tmp_path, dtype="bfloat16")
    assert parts.dtype == torch.bfloat16 and torch.equal(parts.head_weight(), whole.head_weight())
    held = {name for name, value in parts.to("cpu").model.named_parameters() if not value.is_meta}
    assert held == {"model.embed_tokens.weight", "model.final_layernorm.weight", "model.final_layernorm.bias",
                    "lm_head.weight", "lm_head.bias"}  # fmt: skip
    assert parts.identity["parts"] == Target.load(tmp_path).identity["parts"]


def test_another_target_is_told_by_its_parts(tmp_path: Path) -> None:
    one, two = saved("llama", tmp_path / "one"), tmp_path / "two"
    model = make("llama").float()
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 3] += 1
    model.save_pretrained(two)
    parts, other = Target.load(one, parts=True), Target.load(two)
    assert (
        not parts.is_of(other.identity) and not other.is_of(parts.identity) and not parts.is_of({})
    )
    with pytest.raises(
        ValueError, match="its embedding, final norm, head or configuration is not that of"
    ):
        parts.take_identity(other.identity)


@pytest.mark.parametrize("fault", ["gone", "twice", "shape", "fp8"])
def test_a_part_that_cannot_be_read_is_named(fault: str, tmp_path: Path) -> None:
    make("llama").float().save_pretrained(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    if fault == "twice":
        tensors |= {"a.lm_head.weight": head, "b.lm_head.weight": head.clone()}
    if fault in ("shape", "fp8"):
        tensors["lm_head.weight"] = head[:-1] if fault == "shape" else head.to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    message = {
        "gone": "among the parts of a target .*lm_head.weight",
        "shape": "among the parts of a target .*lm_head.weight",
        "twice": "lm_head.weight may be any of a.lm_head.weight, b.lm_head.weight",
        "fp8": "lm_head.weight is quantized",
    }
    with pytest.raises(ValueError, match=message[fault]):
        Target.load(tmp_path, parts=True)


def test_what_needs_the_whole_target_is_refused() -> None:
    for more in ({"adapter": "x"}, {"device_map": "auto"}):
        with pytest.raises(ValueError, match=f"target.{next(iter(more))} is of the whole target"):
            TargetSource("x", parts=True, **more)
    assert set(SOME) <= set(FAMILIES)
