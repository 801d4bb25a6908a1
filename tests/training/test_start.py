"""A training's first weights: a saved drafter's, if it is one of this target and of this design."""

import dataclasses
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specdec.cli import main
from specdec.drafter import Drafter, DrafterSpec, load, save
from specdec.target import Target
from specdec.training.start import FromDrafter, FromTarget
from tests.tiny import biased, presets, tiny_drafter, tiny_target, variants
from tests.training.test_building import EAGLE1, EAGLE3, InMemory, make

DESIGNS = presets() | variants()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def saved(spec: DrafterSpec, directory: Path, target: Target, **changes: object) -> Drafter:
    """A drafter of the target, every weight its own."""
    drafter = tiny_drafter(spec, seed=3, dtype=torch.float32)
    drafter.config = dataclasses.replace(drafter.config, target=target.identity, **changes)
    save(drafter, directory)
    return drafter


@pytest.mark.parametrize("name", DESIGNS)
def test_all_of_it_is_taken_and_trained(name: str, tmp_path: Path, target: Target) -> None:
    spec = DESIGNS[name]
    before = saved(spec, tmp_path / "d", target)
    own = spec.head == "own"
    drafter = make(spec, target, start=FromDrafter(str(tmp_path / "d")), train_embed=True, train_head=own)
    expected = before.state_dict() | ({} if own else {"lm_head.weight": target.head_weight()})
    assert drafter.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in drafter.state_dict().items())
    assert torch.equal(drafter.vocab.draft_ids_V, before.vocab.draft_ids_V)
    assert drafter.config == before.config and drafter.training
    assert all(p.requires_grad for key, p in drafter.named_parameters() if own or key != "lm_head.weight")
    frozen = make(spec, target, start=FromDrafter(str(tmp_path / "d")), train_head=False)
    assert {key for key, p in frozen.named_parameters() if not p.requires_grad} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }


def test_another_width_needs_nothing_of_the_target(tmp_path: Path, target: Target) -> None:
    spec = dataclasses.replace(EAGLE3, hidden_size=16)
    before = saved(spec, tmp_path / "d", target)
    drafter = make(spec, target, start=FromDrafter(str(tmp_path / "d")), train_head=False)
    assert torch.equal(drafter.embed_tokens.weight, before.embed_tokens.weight)
    with pytest.raises(ValueError, match="cannot start from the target's"):
        make(spec, target, start=FromTarget(), train_head=False)


def test_what_a_design_does_not_say_is_kept(tmp_path: Path, target: Target) -> None:
    """Published drafters have heads, a rope and lengths of their own."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    spec = tiny_drafter(EAGLE3, dtype=torch.float32).config
    other = dataclasses.replace(spec, num_attention_heads=2, num_key_value_heads=1, rope=rope, rms_norm_eps=1e-5)
    other = dataclasses.replace(other, max_position_embeddings=2048, target=target.identity)
    save(Drafter(other, torch.arange(40)), tmp_path / "d")
    assert make(EAGLE3, target, start=FromDrafter(str(tmp_path / "d"))).config == other


def test_the_precision_of_the_run_is_the_drafters(tmp_path: Path, target: Target) -> None:
    before = saved(EAGLE3, tmp_path / "d", target)
    torch.set_default_dtype(torch.float64)
    try:
        drafter = make(EAGLE3, tiny_target(), start=FromDrafter(str(tmp_path / "d")))
    finally:
        torch.set_default_dtype(torch.float32)
    assert drafter.fusion.fc.weight.dtype == torch.float64
    assert torch.equal(drafter.fusion.fc.weight.float(), before.fusion.fc.weight)


@pytest.mark.parametrize(
    ("spec", "asked", "message"),
    [
        (DESIGNS["eagle3"], EAGLE3, r"norms\.aux is none, not each; recurrence is PreNorm, not PostNorm: set model"),
        (biased(), EAGLE1, r"entry\.bias is yes, not no"),
        (dataclasses.replace(EAGLE3, aux_layers=[1, 4, 6]), EAGLE3, r"aux_layers is \[1, 4, 6\], not \[2, 3, 4\]"),
        (EAGLE3, dataclasses.replace(EAGLE3, draft_vocab_size=39), "draft_vocab_size is 40, not 39"),
        (DESIGNS["two_layer"], EAGLE3, "num_layers is 2, not 1"),
        (dataclasses.replace(EAGLE3, intermediate_size=20), EAGLE3, "intermediate_size is 20, not 48"),
        (DESIGNS["sliding_window"], EAGLE3, "attention_window is 16, not full"),
    ],
)
def test_another_design_is_refused_by_name(
    spec: DrafterSpec, asked: DrafterSpec, message: str, tmp_path: Path, target: Target
) -> None:
    saved(spec, tmp_path / "d", target)
    with pytest.raises(ValueError, match=rf"d: the drafter is not of the design in model\.drafter: {message}") as error:
        make(asked, target, start=FromDrafter(str(tmp_path / "d")), train_head=asked.head == "own")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 70}, "vocab_size 61, the target has 70"),
        ({"hidden_size": 48}, "target_hidden_size 32, the target has 48"),
        ({"num_hidden_layers": 8}, "num_target_layers 7, the target has 8"),
    ],
)
def test_a_target_of_another_size_is_refused(
    changes: dict[str, int], message: str, tmp_path: Path, target: Target
) -> None:
    saved(EAGLE3, tmp_path / "d", target)
    with pytest.raises(ValueError, match=f"the drafter is for another target, of .*{message}"):
        make(EAGLE3, tiny_target(dtype=torch.float32, **changes), start=FromDrafter(str(tmp_path / "d")))


def test_another_target_of_the_same_size_is_warned_of_and_becomes_its_own(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    before = saved(EAGLE3, tmp_path / "d", target)
    start = FromDrafter(str(tmp_path / "d"))
    with caplog.at_level(logging.INFO, "specdec"):
        make(EAGLE3, target, start=start)
    assert f"the drafter starts from {tmp_path / 'd'}" in caplog.text and "another target" not in caplog.text
    other = tiny_target(seed=1, dtype=torch.float32)
    drafter = make(EAGLE3, other, start=start)
    assert f"{tmp_path / 'd'} was trained for another target (in memory) of the same shape" in caplog.text
    assert drafter.config.target == other.identity
    assert torch.equal(drafter.embed_tokens.weight, before.embed_tokens.weight)


def test_its_vocabulary_counts_and_not_the_datas(tmp_path: Path, target: Target) -> None:
    spec = dataclasses.replace(EAGLE3, draft_vocab_size=3)
    before = saved(spec, tmp_path / "d", target)
    data = InMemory([[5, 5, 9, 9, 11, 11, 5, 9]])
    drafter = make(spec, target, data, start=FromDrafter(str(tmp_path / "d")))
    assert torch.equal(drafter.vocab.target_ids_D, before.vocab.target_ids_D)
    assert make(spec, target, data).vocab.target_ids_D.tolist() == [5, 9, 11]


@pytest.fixture
def command(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A short run on the CPU, of EAGLE-3."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    text = str(text_file)
    return [
        "fit", "--data", "TextData", "--data.train", text, "--data.val", text, "--data.seq_len", "32",
        "--model.target.source", str(target_directory), "--trainer.accelerator", "cpu", "--model.ttt_steps", "2",
        "--trainer.limit_val_batches", "0", "--trainer.log_every_n_steps", "1", "--model.optimizer.lr", "1e-3",
        "--model.drafter", "conf/drafter/eagle3.yaml", "--model.drafter.draft_vocab_size", "200",
    ]  # fmt: skip


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_fit_export_import_and_fit_again(command: list[str], target_directory: Path, tmp_path: Path) -> None:
    """What was trained goes on from where it was, says so in its config, and is resumed like any run."""
    first, served, back, second = (tmp_path / name for name in ("first", "served", "back", "second"))
    of, one = ["--target", str(target_directory)], ["--trainer.max_steps", "1"]
    assert main([*command, "--trainer.max_steps", "2", "--out", str(first)]) == 0
    assert main(["export", "--drafter", str(first / "drafter"), *of, "--out", str(served)]) == 0
    assert main(["import", "--checkpoint", str(served), *of, "--out", str(back)]) == 0
    start = ["--model.start", "FromDrafter", "--model.start.directory", str(back)]
    small = ["--model.optimizer.lr", "1e-7"]
    assert main([*command, *one, *start, *small, "--out", str(second)]) == 0
    before, after = weights(first / "drafter"), weights(second / "drafter")
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[key], before[key], rtol=0, atol=2e-7) for key in before)
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert load(second / "drafter").config == load(first / "drafter").config
    model = yaml.safe_load((second / "config.yaml").read_text())["model"]
    assert model["start"]["class_path"].endswith("FromDrafter")
    assert model["start"]["init_args"] == {"directory": str(back)}
    checkpoint = ["--ckpt_path", str(second / "checkpoints" / "last.ckpt")]
    config = ["fit", "--config", str(second / "config.yaml"), "--trainer.max_steps", "2"]
    assert main([*config, "--out", str(second), *checkpoint]) == 0
    assert json.loads((second / "DONE.json").read_text())["steps"] == 2


def test_a_mistake_is_one_line_and_leaves_nothing(
    command: list[str], drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--model.start", "FromDrafter", "--model.start.directory", str(drafter_directory)]
    assert main([*command, *start, "--trainer.max_steps", "1", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not of the design in model.drafter: norms.aux is each, not none" in error
    assert not (tmp_path / "run").exists()
