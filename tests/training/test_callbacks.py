"""The moving average, the loss of every batch, and keyed randomness."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.commands.fit import run_fit
from specdec.target import Target
from specdec.training.callbacks import RunRecord
from specdec.training.losses_file import read_losses
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


EMA = ["--trainer.callbacks+=specdec.training.ema.EMA", f"--trainer.callbacks.decay={DECAY}"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def averaged(history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the average of these weights must be, in float64."""
    out = {name: value.double() for name, value in history[0].items()}
    for state in history[1:]:
        out = {
            name: DECAY * out[name] + (1 - DECAY) * value.double() for name, value in state.items()
        }
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
            seen.append(
                {name: value.detach().clone() for name, value in self.drafter.named_parameters()}
            )

        monkeypatch.setattr(DrafterModule, hook, noting)

    for hook in ("on_train_batch_end", "on_validation_batch_end", "on_fit_end"):
        note(hook)
    return seen


def test_the_average_is_validated_and_saved(
    base: list[str], tmp_path: Path, history: list[dict[str, torch.Tensor]]
) -> None:
    out = tmp_path / "run"
    assert (
        run_fit("fit", [*base, *EMA, "--trainer.num_sanity_val_steps", "1", "--out", str(out)]) == 0
    )
    sanity, *first, valid, again, four, five, six, valid_six, _, left = history
    assert len(first) == 3 and equal(valid, again)
    trained = [*first, four, five, six]
    assert len({float(state["lm_head.weight"].sum()) for state in trained}) == 6
    torch.testing.assert_close(valid, averaged(first), check_dtype=False)
    final = weights(out)
    names = set(six)
    torch.testing.assert_close({n: final[n] for n in names}, averaged(trained), check_dtype=False)
    assert equal({n: final[n] for n in names}, valid_six) and equal(left, valid_six)
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert equal({n: saved["state_dict"][f"train_step.drafter.{n}"] for n in names}, valid_six)
    assert equal({n: saved["current_model_state"][f"train_step.drafter.{n}"] for n in names}, six)
    assert all(name.startswith("train_step.drafter.") for name in saved["state_dict"])
    # frozen: not a bit moves
    assert torch.equal(final["embed_tokens.weight"], sanity["embed_tokens.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["step-3", "last"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    base: list[str], tmp_path: Path, checkpoint: str
) -> None:
    """Also from a last checkpoint that is only written when training ends."""
    whole, first, halves = tmp_path / "whole", tmp_path / "first", tmp_path / "halves"
    constant = [*base, *EMA, "--model.schedule.warmup", "0", "--model.schedule.floor", "1"]
    assert run_fit("fit", [*constant, "--out", str(whole)]) == 0
    short = [
        "--trainer.max_steps",
        "4",
        "--checkpoint.every_n_train_steps",
        "3" if checkpoint == "step-3" else "100",
    ]
    assert run_fit("fit", [*constant, *short, "--out", str(first)]) == 0
    path = first / "checkpoints" / f"{checkpoint}.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == (
        3 if checkpoint == "step-3" else 4
    )
    assert run_fit("fit", [*constant, "--out", str(halves), "--ckpt_path", str(path)]) == 0
    assert equal(weights(whole), weights(halves))


def test_an_interrupted_validation_saves_both(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange is undone before the checkpoint is written, and the drafter kept is the average."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DrafterModule, "validation_step", interrupted)
        assert (
            run_fit("fit", [*base, *EMA, "--trainer.num_sanity_val_steps", "0", "--out", str(out)])
            == 130
        )
    whole = tmp_path / "whole"
    assert run_fit("fit", [*base, *EMA, "--out", str(whole)]) == 0
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    wanted = torch.load(whole / "checkpoints" / "step-3.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert equal(saved["current_model_state"], wanted["current_model_state"])
    assert equal(saved["state_dict"], wanted["state_dict"])
    assert equal(
        weights(out),
        {
            name.removeprefix("train_step.drafter."): value
            for name, value in wanted["state_dict"].items()
        },
    )


def trainer(step: int, every: int = 3, zero: bool = True) -> Any:
    return SimpleNamespace(
        global_step=step,
        log_every_n_steps=every,
        is_global_zero=zero,
        global_rank=0,
        loggers=[],
        world_size=1,
    )


def batches(record: RunRecord, steps: range, parts: int = 1, zero: bool = True) -> None:
    for step in steps:
        for part in range(parts):
            record.on_train_batch_start(trainer(step, zero=zero))
            value = torch.tensor(1 / (3 + step + part / 8))
            record.on_train_batch_end(trainer(step, zero=zero), None, {"loss": value})  # type: ignore[arg-type]


def test_no_bit_is_lost_and_a_batch_of_a_step_has_its_number(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, 0)
    record.on_train_start(trainer(0), None)  # type: ignore[arg-type]
    batches(record, range(4), parts=2)
    assert len(read_losses(tmp_path / "losses.txt")) == 6  # three at a time
    record.on_save_checkpoint(trainer(4), None, {})  # type: ignore[arg-type]
    rows = [line.split() for line in read_losses(tmp_path / "losses.txt")]
    assert [row[:2] for row in rows] == [
        [str(step), str(part)] for step in range(4) for part in range(2)
    ]
    assert float.fromhex(rows[3][2]) == float(torch.tensor(1 / (4 + 1 / 8)))


def test_a_snapshot_of_hard_links_ends_no_run_and_stays_as_it_was(tmp_path: Path) -> None:
    """As ``cp -al`` takes it while the run goes on; so with every later one."""
    record = RunRecord(tmp_path, 0)
    record.on_train_start(trainer(0), None)  # type: ignore[arg-type]
    for number in range(3):
        os.link(tmp_path / "losses.txt", tmp_path / f"snapshot-{number}")
        batches(record, range(3 * number, 3 * number + 3))
    for number in range(3):
        assert len(read_losses(tmp_path / f"snapshot-{number}")) == 3 * number
    steps = [line.split()[0] for line in read_losses(tmp_path / "losses.txt")]
    assert steps == [str(step) for step in range(9)]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    path = tmp_path / "losses.txt"
    whole, killed = RunRecord(tmp_path / "whole", 0), RunRecord(tmp_path, 0)
    for record, steps in ((whole, range(7)), (killed, range(5))):
        record.on_train_start(trainer(0), None)  # type: ignore[arg-type]
        batches(record, steps)
    killed.on_save_checkpoint(trainer(5), None, {})  # type: ignore[arg-type]
    with path.open("a") as file:
        file.write("5 0 0x1.8")  # cut short
    again = RunRecord(tmp_path, 0)
    again.on_train_start(trainer(4), None)  # type: ignore[arg-type]
    batches(again, range(4, 7))
    module = SimpleNamespace(teardown=lambda stage: None)
    for record in (whole, again):
        record.on_exception(trainer(7), module, ZeroDivisionError())  # type: ignore[arg-type]
    assert path.read_text() == (tmp_path / "whole" / "losses.txt").read_text()


def draws(seed: int, places: list[tuple[int, int]], before: int = 0) -> list[tuple[Any, ...]]:
    """At each (step, rank) in turn, after something else was drawn."""
    callback, found = RunRecord(Path(), seed), []
    for step, rank in places:
        torch.rand(before)
        callback.on_train_batch_start(SimpleNamespace(global_step=step, global_rank=rank))  # type: ignore[arg-type]
        found.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
    return found


def test_a_batch_is_seeded_the_same_wherever_a_run_begins() -> None:
    whole = draws(0, [(step, 0) for step in (0, 0, 1, 1, 2, 2)])
    assert len(set(whole)) == 6  # the batches of a step differ
    assert draws(0, [(1, 0), (1, 0), (2, 0), (2, 0)], before=7) == whole[2:]


def test_seeds_and_ranks_draw_their_own() -> None:
    one = draws(0, [(0, 0)])
    assert one not in (draws(1, [(0, 0)]), draws(0, [(0, 1)]), draws(0, [(1, 0)]))
