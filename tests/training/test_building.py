"""From a design, a target, its data and weights to start from to a drafter that is ready to train."""

import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specdec.cli import main
from specdec.data import Batch, TokenData
from specdec.data.token_data import Splits
from specdec.drafter import Drafter, DrafterSpec, load_drafter, save_drafter
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import (
    FromDrafter,
    FromTarget,
    Start,
    build,
    check_checkpoint,
    logit_scale,
)
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.tiny import VOCAB, biased, presets, tiny_drafter, tiny_target, variants

EAGLE1, EAGLE3 = presets()["eagle1"], presets()["eagle3_1"]


class InMemory(TokenData):
    """LossRows as they are."""

    def __init__(self, ids: list[list[int]], answers: list[list[int]] | None = None) -> None:
        super().__init__(len(ids[0]), 1)
        batch = torch.tensor(ids)
        mask = torch.ones_like(batch) if answers is None else torch.tensor(answers)
        rows = Batch(batch, mask.bool(), torch.zeros_like(batch))
        self._splits = Splits(rows, rows)


DATA = InMemory([[7, 7, 7, 60, 60, 3, 3, 9]])


def make(
    spec: DrafterSpec = EAGLE3,
    target: Target | None = None,
    data: TokenData = DATA,
    train_embed: bool = False,
    train_head: bool = True,
    steps: int = 7,
    start: Start = FromTarget(),  # noqa: B008  frozen
) -> Drafter:
    torch.manual_seed(5)
    return build(
        spec,
        target or tiny_target(dtype=torch.float32),
        data,
        start,
        train_embed,
        train_head,
        steps,
    )


def test_it_starts_from_the_target() -> None:
    target = tiny_target(dtype=torch.float32)
    drafter = make(target=target)
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.head_weight()[drafter.vocab.target_ids_D])
    assert drafter.config.target["fingerprint"] == target.identity["fingerprint"]
    whole = make(EAGLE1, target, train_head=False)
    assert torch.equal(whole.lm_head.weight, target.head_weight()) and whole.vocab.complete


@pytest.mark.parametrize("norm_weight", [1.0, 26.0])
@pytest.mark.parametrize("name", ["eagle3", "eagle3_1", "peagle"])
def test_the_first_loss_is_near_that_of_an_even_guess(name: str, norm_weight: float) -> None:
    """Whatever the size of the target's final norm, at every step: a Gemma's began 50 times as high."""
    target = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        target.final_norm.weight.copy_(
            norm_weight * torch.rand(target.hidden_size, generator=torch.manual_seed(0)) ** 2
        )
    drafter = make((presets() | variants())[name], target)
    ids_BT = torch.randint(0, VOCAB, (4, 60), generator=torch.manual_seed(1))
    batch = Batch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT))
    objective = ObjectiveConfig(steps=4)
    loss = TrainStep(drafter, objective)(
        batch, target_outputs(target, drafter, batch, objective, False), False
    ).loss
    assert float(loss.detach()) == pytest.approx(math.log(drafter.config.draft_vocab_size), abs=1)


@pytest.mark.parametrize(
    ("train_embed", "train_head"), [(False, True), (True, False), (True, True), (False, False)]
)
@pytest.mark.parametrize("name", [*presets(), *variants()])
def test_what_is_trained_is_what_was_asked_for(
    name: str, train_embed: bool, train_head: bool
) -> None:
    spec = (presets() | variants())[name]
    drafter = make(spec, train_embed=train_embed, train_head=train_head and spec.head == "own")
    wanted = {
        "embed_tokens.weight": train_embed,
        "lm_head.weight": train_head and spec.head == "own",
    }
    assert {key: p.requires_grad for key, p in drafter.named_parameters()} == {
        key: wanted.get(key, True) for key, _ in drafter.named_parameters()
    }


def capped() -> Target:
    """A target that does more to its logits than multiply."""
    target = tiny_target(dtype=torch.float32)
    plain = target.logits
    target.logits = lambda *args: 30 * torch.tanh(plain(*args) / 30)  # type: ignore[method-assign]
    return target


def scaled(by: float, dtype: torch.dtype = torch.float32) -> Target:
    """A target that multiplies its logits, as Granite and Cohere do."""
    target = tiny_target(dtype=dtype)
    plain = target.logits
    target.logits = lambda *args: plain(*args) * by  # type: ignore[method-assign]
    return target


def biased_head() -> Target:
    target = tiny_target(dtype=torch.float32)
    plain = target.logits
    target.logits = lambda *args: plain(*args) + torch.arange(VOCAB)  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 6, 0.0625, 1 / 0.0078125, 0.123456789])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_a_target_s_logits_is_measured(scale: float, dtype: torch.dtype) -> None:
    measured = logit_scale(scaled(scale, dtype))
    assert measured == pytest.approx(scale, rel=1e-6 if dtype == torch.float32 else 1e-3)
    assert measured == scale or scale == 0.123456789


def test_eagle_1_is_trained_with_the_target_s_scale() -> None:
    """The drafter's logits of the target's own state are the target's, and the state itself is not scaled."""
    target = scaled(0.25)
    drafter = make(EAGLE1, target, train_head=False, steps=1)
    assert drafter.config.logit_scale == 0.25 and torch.equal(
        drafter.lm_head.weight, target.head_weight()
    )
    h_1TH = torch.randn(1, 5, target.hidden_size)
    view = View.packed(torch.zeros(1, 5, dtype=torch.int64))
    step = drafter.step(torch.tensor([[1, 2, 3, 4, 5]]), h_1TH, view)
    torch.testing.assert_close(drafter.logits(step.normed_BTH), target.logits(step.h_BTH))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": InMemory([[1] * 600])}, r"data\.seq_len 600 exceeds the target's 512 positions"),
        ({"spec": dataclasses.replace(EAGLE3, hidden_size=16)}, r"hidden_size 16.*target's 32.*train_embed=true"),
        (
            {"spec": dataclasses.replace(EAGLE3, hidden_size=16), "train_embed": True, "train_head": False},
            "train_head=true",
        ),
        (
            {"spec": variants()["sliding_window"], "steps": 17},
            r"attention_window 16 is less than ttt_steps 17.*widen the window or unroll less",
        ),
        ({"spec": variants()["peagle"], "steps": 1}, "MaskConstant is what steps after the first read.*2 or more"),
        ({"spec": EAGLE1, "target": capped(), "train_head": False}, "head=target.*bias or a cap.*its own head"),
        ({"spec": EAGLE1, "target": scaled(-2), "train_head": False}, "head=target.*bias or a cap"),
        ({"spec": EAGLE1, "target": biased_head(), "train_head": False}, "head=target.*bias or a cap"),
        ({"spec": dataclasses.replace(EAGLE3, num_attention_heads=6)},
         "hidden_size 32 is no multiple of num_attention_heads 6.*num_attention_heads to 4 or 2, or norms.query_key"),
        ({"target": tiny_target(dtype=torch.float32, rope_parameters=LONGROPE)},
         "longrope.*set model.drafter.rope_theta"),
        ({"data": InMemory([[1, 2, VOCAB]])}, f"{VOCAB}"),
        ({"data": InMemory([[1, 2, -1]])}, "-1"),
        ({"spec": dataclasses.replace(EAGLE3, aux_layers=[1, 8])}, "boundaries 0 to 7"),
        ({"target": tiny_target(dtype=torch.float32, num_hidden_layers=4)}, "4 layers is too shallow.*set aux_layers"),
        ({"spec": dataclasses.replace(EAGLE1, draft_vocab_size=40)}, "draft_vocab_size all"),
        ({"target": tiny_target(dtype=torch.float32, eos_token_id=[1, 2]),
          "spec": dataclasses.replace(EAGLE3, draft_vocab_size=1)}, "2 control tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(**given)
    assert "\n" not in str(error.value)


def stored(drafter: Drafter) -> dict[str, Any]:
    return {
        "drafter_config": drafter.config.to_json(),
        "state_dict": {
            f"train_step.drafter.{name}": value for name, value in drafter.state_dict().items()
        },
    }


def test_a_checkpoint_of_this_drafter_is_taken_and_any_other_refused() -> None:
    drafter = make()
    checkpoint = stored(drafter)
    check_checkpoint(checkpoint, drafter)
    with pytest.raises(ValueError, match="neither specdec fit nor a DrafterModule wrote it"):
        check_checkpoint({"state_dict": checkpoint["state_dict"]}, drafter)
    other = copy.deepcopy(checkpoint)
    other["drafter_config"]["num_layers"] = 2
    other["drafter_config"]["target"]["fingerprint"] = "other"
    with pytest.raises(ValueError, match="num_layers was 2, is 1; target was") as error:
        check_checkpoint(other, drafter)
    assert "norms" not in str(error.value)
    moved = copy.deepcopy(checkpoint)
    moved["state_dict"]["train_step.drafter.vocab.target_ids_D"][0] += 1
    with pytest.raises(ValueError, match="draft vocabulary is not the one"):
        check_checkpoint(moved, drafter)


DESIGNS = presets() | variants()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def saved_drafter(spec: DrafterSpec, directory: Path, target: Target, **changes: object) -> Drafter:
    """A drafter of the target, every weight its own."""
    drafter = tiny_drafter(spec, seed=3, dtype=torch.float32)
    drafter.config = dataclasses.replace(drafter.config, target=target.identity, **changes)
    save_drafter(drafter, directory)
    return drafter


def test_an_imported_scale_of_the_logits_is_kept(tmp_path: Path, target: Target) -> None:
    """No design names it, so that it is no difference of designs."""
    spec = DESIGNS[next(name for name, design in DESIGNS.items() if design.head == "own")]
    plain = saved_drafter(spec, tmp_path / "plain", target)
    scaled = Drafter(dataclasses.replace(plain.config, logit_scale=0.5), plain.vocab.target_ids_D)
    save_drafter(scaled, tmp_path / "scaled")
    assert make(spec, target, start=FromDrafter(str(tmp_path / "scaled"))).config.logit_scale == 0.5


@pytest.mark.parametrize("name", DESIGNS)
def test_all_of_it_is_taken_and_trained(name: str, tmp_path: Path, target: Target) -> None:
    spec = DESIGNS[name]
    before = saved_drafter(spec, tmp_path / "d", target)
    own = spec.head == "own"
    drafter = make(
        spec, target, start=FromDrafter(str(tmp_path / "d")), train_embed=True, train_head=own
    )
    expected = before.state_dict() | ({} if own else {"lm_head.weight": target.head_weight()})
    assert drafter.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in drafter.state_dict().items())
    assert torch.equal(drafter.vocab.draft_ids_V, before.vocab.draft_ids_V)
    assert drafter.config == before.config and drafter.training
    assert all(
        p.requires_grad for key, p in drafter.named_parameters() if own or key != "lm_head.weight"
    )
    frozen = make(spec, target, start=FromDrafter(str(tmp_path / "d")), train_head=False)
    assert {key for key, p in frozen.named_parameters() if not p.requires_grad} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("spec", "asked", "message"),
    [
        (
            DESIGNS["eagle3"],
            EAGLE3,
            r"norms\.aux is none, not each; recurrence is PreNorm, not PostNorm: set model",
        ),
        (biased(), EAGLE1, r"entry\.bias is yes, not no"),
        (
            dataclasses.replace(EAGLE3, aux_layers=[1, 4, 6]),
            EAGLE3,
            r"aux_layers is \[1, 4, 6\], not \[2, 3, 4\]",
        ),
        (
            EAGLE3,
            dataclasses.replace(EAGLE3, draft_vocab_size=39),
            "draft_vocab_size is 40, not 39",
        ),
        (DESIGNS["two_layer"], EAGLE3, "num_layers is 2, not 1"),
        (
            dataclasses.replace(EAGLE3, intermediate_size=20),
            EAGLE3,
            "intermediate_size is 20, not 48",
        ),
        (DESIGNS["sliding_window"], EAGLE3, "attention_window is 16, not full"),
    ],
)
def test_another_design_is_refused_by_name(
    spec: DrafterSpec, asked: DrafterSpec, message: str, tmp_path: Path, target: Target
) -> None:
    saved_drafter(spec, tmp_path / "d", target)
    with pytest.raises(
        ValueError, match=rf"d: the drafter is not of the design in model\.drafter: {message}"
    ) as error:
        make(asked, target, start=FromDrafter(str(tmp_path / "d")), train_head=asked.head == "own")
    assert "\n" not in str(error.value)


@pytest.fixture
def export_command(
    target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
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


@pytest.mark.slow
def test_fit_export_import_and_fit_again(
    export_command: list[str], target_directory: Path, tmp_path: Path
) -> None:
    """What was trained goes on from where it was, says so in its config, and is resumed like any run."""
    first, served, back, second = (
        tmp_path / name for name in ("first", "served", "back", "second")
    )
    of, one = ["--target", str(target_directory)], ["--trainer.max_steps", "1"]
    assert main([*export_command, "--trainer.max_steps", "2", "--out", str(first)]) == 0
    assert main(["export", "--drafter", str(first / "drafter"), *of, "--out", str(served)]) == 0
    assert main(["import", "--checkpoint", str(served), *of, "--out", str(back)]) == 0
    start = ["--model.start", "FromDrafter", "--model.start.directory", str(back)]
    small = ["--model.optimizer.lr", "1e-7"]
    assert main([*export_command, *one, *start, *small, "--out", str(second)]) == 0
    before, after = weights(first / "drafter"), weights(second / "drafter")
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[key], before[key], rtol=0, atol=2e-7) for key in before)
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert load_drafter(second / "drafter").config == load_drafter(first / "drafter").config
    model = yaml.safe_load((second / "config.yaml").read_text())["model"]
    assert model["start"]["class_path"].endswith("FromDrafter")
    assert model["start"]["init_args"] == {"directory": str(back)}
    checkpoint = ["--ckpt_path", str(second / "checkpoints" / "last.ckpt")]
    config = ["fit", "--config", str(second / "config.yaml"), "--trainer.max_steps", "2"]
    assert main([*config, "--out", str(second), *checkpoint]) == 0
    assert json.loads((second / "DONE.json").read_text())["steps"] == 2
