"""Embedding and head of the target, rounded by the dtype of a training: the target's own all the same."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specdec.cli import main
from specdec.drafter import Drafter, load
from specdec.export import NotServable, adopt, export_drafter, read_checkpoint, subject_of
from specdec.export.shared import is_targets
from specdec.target import Target
from tests.export.made import made_drafter, same_state
from tests.tiny import llama_config, presets, tiny_target

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
    drafter.warm_start(target.embedding_weight(), target.head_weight(), torch.ones(target.hidden_size))
    return drafter


@pytest.mark.parametrize("format", ["vllm", "sglang"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("then", "now"), [(BF16, F32), (F16, F32), (BF16, BF16), (F32, BF16), (F32, F64), (F32, F32)])
def test_it_stays_with_the_target_in_whatever_dtype_that_is(
    name: str, then: torch.dtype, now: torch.dtype, format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, target = trained(name, loaded(then)), loaded(now)
    export_drafter(drafter, target, tmp_path / "out", format)
    written = {EMBEDDING, HEAD} & set(load_file(tmp_path / "out" / "model.safetensors"))
    assert written == {EMBEDDING, HEAD} - set(SHARED[name])
    back = adopt(read_checkpoint(tmp_path / "out"), target)
    theirs = {EMBEDDING: target.embedding_weight(), HEAD: target.head_weight()}
    for key, value in back.state_dict().items():
        wanted = theirs[key].to(F32) if key in SHARED[name] else drafter.state_dict()[key]
        assert torch.equal(value, wanted), key
    assert dataclasses.replace(back.config, target=drafter.config.target) == drafter.config
    lost = then in (BF16, F16) and now != then
    said = " and ".join(f"{key} to {DTYPES[then]}" for key in SHARED[name])
    told = [record.message for record in caplog.records if "rounded" in record.message]
    assert len(told) == lost and all(f"rounded, {said}: an engine reads" in line for line in told)
    assert ("another target" in caplog.text) is (then == F16)  # fingerprints are of bfloat16, not of float16 in it
    assert (f"| Rounded in training, here as the target has them | {said} |" in card(tmp_path / "out")) is lost
    assert same_state(back, drafter) is (then == now or (then, now) == (F32, F64))


def card(directory: Path) -> str:
    return (directory / "README.md").read_text()


@pytest.mark.parametrize(("then", "now"), [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32)])
@pytest.mark.parametrize("share", [5e-3, 1.0])
def test_trained_weights_are_the_drafters_own(then: torch.dtype, now: torch.dtype, share: float) -> None:
    """However little they moved, a few of them or all: by far less than bfloat16 tells apart.

    Only where the target itself is loaded in bfloat16 is such a difference none that an engine could serve.
    """
    target, drafter = loaded(now), trained("eagle1", loaded(then))
    assert subject_of(drafter, target)[1:3] == (False, False)
    chosen = torch.rand(drafter.embed_tokens.weight.shape, generator=torch.Generator().manual_seed(0)) < share
    assert chosen.any()
    by = 1e-2 if now == BF16 else 1e-5
    for weight in (drafter.embed_tokens.weight, drafter.lm_head.weight):
        before = weight.clone()
        weight[chosen] *= 1 + by
        assert subject_of(drafter, target)[1:3] != (False, False)
        weight.copy_(before)
    assert subject_of(drafter, target)[1:3] == (False, False)


def test_a_trained_head_of_eagle_1_is_refused_as_ever(tmp_path: Path) -> None:
    drafter = trained("eagle1", loaded(BF16))
    drafter.lm_head.weight[3, 4] *= 1.001
    with pytest.raises(NotServable, match="a head of its own, with method eagle"):
        export_drafter(drafter, loaded(F32), tmp_path / "out")


def test_shapes_and_two_roundings_are_no_match() -> None:
    weight = torch.randn(61, 32, generator=torch.Generator().manual_seed(0))
    assert is_targets(weight, weight) and is_targets(weight.bfloat16(), weight) and is_targets(weight, weight.half())
    assert not is_targets(weight, weight[:60]) and not is_targets(weight, weight[:1])
    assert not is_targets(weight.half().float(), weight.bfloat16())


def test_fit_in_bfloat16_then_export_import_and_parity(
    target_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    text, of, half = str(text_file), ["--target", str(target_directory)], ["--target.dtype", "bfloat16"]
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
    one, two, target = load(f"{run}/drafter"), load(back), Target.load(target_directory)
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
    assert f"rounded in training, {EMBEDDING} to bfloat16 and" in told.splitlines()[-1]
