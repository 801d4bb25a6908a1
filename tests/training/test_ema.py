"""Whole runs with averaged weights."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.fit import run
from specdec.target import Target
from specdec.training.ema import EMA
from specdec.training.module import DrafterModule
from tests.short_run import short_run

DECAY = 0.9


def never_copied(self: Target, memo: Any) -> None:
    raise AssertionError("the target is copied")


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of six steps on the CPU, validated after three."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.setattr(Target, "__deepcopy__", never_copied, raising=False)
    return short_run(
        target_directory, text_file,
        model__optimizer__lr="1e-2",
        trainer__max_steps=6,
        trainer__val_check_interval=3,
        trainer__limit_val_batches=2,
        trainer__log_every_n_steps=2,
        acceptance__every_n_validations=0,
        checkpoint__every_n_train_steps=3,
        checkpoint__save_top_k=-1,
    )  # fmt: skip


def ema(start: int = 0) -> list[str]:
    return [
        "--trainer.callbacks+=specdec.training.ema.EMA",
        f"--trainer.callbacks.decay={DECAY}",
        f"--trainer.callbacks.start={start}",
    ]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def averaged(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the average of these weights must be, in float64."""
    out = {name: value.double() for name, value in history[0].items()}
    for state in history[1:]:
        out = {name: DECAY * out[name] + (1 - DECAY) * value.double() for name, value in state.items()}
    return out


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The drafter's parameters after each optimizer step, those that were validated, and those left at the end."""
    seen: list[dict[str, torch.Tensor]] = []

    def note(hook: str) -> None:
        before = getattr(DrafterModule, hook)

        def noting(self: DrafterModule, *args: Any) -> None:
            before(self, *args)
            assert self.drafter is not None
            seen.append({name: value.detach().clone() for name, value in self.drafter.named_parameters()})

        monkeypatch.setattr(DrafterModule, hook, noting)

    for hook in ("on_train_batch_end", "on_validation_batch_end", "on_fit_end"):
        note(hook)
    return seen


@pytest.mark.parametrize("start", [0, 2])
def test_the_average_is_validated_and_saved(
    base: list[str], tmp_path: Path, history: list[dict[str, torch.Tensor]], start: int
) -> None:
    out = tmp_path / "run"
    assert run("fit", [*base, *ema(start), "--trainer.num_sanity_val_steps", "1", "--out", str(out)]) == 0
    sanity, *first, valid, again, four, five, six, valid_six, _, left = history
    assert len(first) == 3 and equal(valid, again)
    trained = [*first, four, five, six]
    assert len({float(state["lm_head.weight"].sum()) for state in trained}) == 6
    torch.testing.assert_close(valid, averaged(first[start:]), check_dtype=False)
    final = weights(out)
    names = set(six)
    torch.testing.assert_close({n: final[n] for n in names}, averaged(trained[start:]), check_dtype=False)
    assert equal({n: final[n] for n in names}, valid_six) and equal(left, valid_six)
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert equal({n: saved["state_dict"][f"drafter.{n}"] for n in names}, valid_six)
    assert equal({n: saved["current_model_state"][f"drafter.{n}"] for n in names}, six)
    assert all(name.startswith("drafter.") for name in saved["state_dict"])
    assert torch.equal(final["embed_tokens.weight"], sanity["embed_tokens.weight"])  # frozen: not a bit moves


def test_averaging_leaves_training_alone(base: list[str], tmp_path: Path) -> None:
    plain, with_it = tmp_path / "plain", tmp_path / "ema"
    assert run("fit", [*base, "--out", str(plain)]) == 0
    assert run("fit", [*base, *ema(), "--out", str(with_it)]) == 0
    one, two = (torch.load(path / "checkpoints" / "last.ckpt", weights_only=True) for path in (plain, with_it))
    assert equal(one["state_dict"], two["current_model_state"])
    assert not equal(weights(plain), weights(with_it))


@pytest.mark.parametrize("checkpoint", ["step-3", "last"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(base: list[str], tmp_path: Path, checkpoint: str) -> None:
    """Also from a last checkpoint that is only written when training ends."""
    whole, first, halves = tmp_path / "whole", tmp_path / "first", tmp_path / "halves"
    constant = [*base, *ema(), "--model.schedule.warmup", "0", "--model.schedule.floor", "1"]
    assert run("fit", [*constant, "--out", str(whole)]) == 0
    short = ["--trainer.max_steps", "4", "--checkpoint.every_n_train_steps", "3" if checkpoint == "step-3" else "100"]
    assert run("fit", [*constant, *short, "--out", str(first)]) == 0
    path = first / "checkpoints" / f"{checkpoint}.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == (3 if checkpoint == "step-3" else 4)
    assert run("fit", [*constant, "--out", str(halves), "--ckpt_path", str(path)]) == 0
    assert equal(weights(whole), weights(halves))


def test_validate_reads_the_average(base: list[str], tmp_path: Path, history: list[dict[str, torch.Tensor]]) -> None:
    out = tmp_path / "run"
    assert run("fit", [*base, *ema(), "--out", str(out)]) == 0
    last = history[-1]
    history.clear()
    where = ["--ckpt_path", str(out / "checkpoints" / "last.ckpt")]
    assert run("validate", [*base, *ema(), *where]) == 0
    assert equal(history.pop(), last)
    with pytest.warns(UserWarning, match="EMA"):  # Lightning's, that the callback is missing
        assert run("validate", [*base, *where]) == 0
    assert equal(history.pop(), last)


def test_an_interrupted_validation_saves_both(base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is undone before the checkpoint is written, and the drafter kept is the average."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DrafterModule, "validation_step", interrupted)
        assert run("fit", [*base, *ema(), "--trainer.num_sanity_val_steps", "0", "--out", str(out)]) == 130
    whole = tmp_path / "whole"
    assert run("fit", [*base, *ema(), "--out", str(whole)]) == 0
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    wanted = torch.load(whole / "checkpoints" / "step-3.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert equal(saved["current_model_state"], wanted["current_model_state"])
    assert equal(saved["state_dict"], wanted["state_dict"])
    assert equal(weights(out), {name.removeprefix("drafter."): value for name, value in wanted["state_dict"].items()})


def test_what_it_refuses(base: list[str], tmp_path: Path) -> None:
    for decay, start in ((1.0, 0), (-0.1, 0), (0.9, -1)):
        with pytest.raises(ValueError, match="decay must lie"):
            EMA(decay, start)
    with pytest.raises(ValueError, match="bf16-true cannot be averaged"):
        run("fit", [*base, *ema(), "--trainer.precision", "bf16-true", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
