"""Runs that are stopped within a step of several batches."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from safetensors.torch import load_file

from specdec.commands.fit import run_fit
from specdec.data import Batch
from specdec.training.checkpoint import RunCheckpoint
from specdec.training.module import DrafterModule
from tests.short_run import short_run

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of four steps of three batches each, on the CPU; what is drawn would show another place in the run."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return short_run(
        target_directory, text_file,
        model__noise="UniformNoise",
        model__step_keep="0.6",
        model__optimizer__lr="1e-2",
        trainer__max_steps=4,
        trainer__accumulate_grad_batches=3,
        trainer__val_check_interval=4,
        trainer__log_every_n_steps=2,
        trainer__limit_val_batches=1,
        trainer__num_sanity_val_steps=0,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def sent(monkeypatch: pytest.MonkeyPatch, method: str, at: int, *signums: signal.Signals) -> None:
    """Let the signals come in the midst of a batch of training or of a validation."""
    inner = getattr(DrafterModule, method)

    def interrupted(self: DrafterModule, batch: Batch, batch_idx: int) -> torch.Tensor | None:
        out = inner(self, batch, batch_idx)
        if batch_idx == at:
            for signum in signums:
                os.kill(os.getpid(), signum)
        return out

    monkeypatch.setattr(DrafterModule, method, interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "method", "at"),
    [
        (signal.SIGINT, "training_step", 3),
        (signal.SIGTERM, "validation_step", 0),
    ],
)
def test_a_run_stopped_within_a_step_goes_on_as_if_it_were_not(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    method: str,
    at: int,
) -> None:
    """In the second step: at its first batch, at its last, and in the validation between its batches."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    handlers = [signal.getsignal(each) for each in STATUS]
    assert run_fit("fit", [*base, "--out", str(whole)]) == 0
    with monkeypatch.context() as patch:
        sent(patch, method, at, signum)
        assert run_fit("fit", [*base, "--out", str(halves)]) == STATUS[signum]
    last = halves / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    assert run_fit("fit", [*base, "--out", str(halves), "--ckpt_path", str(last)]) == 0
    one, two = (load_file(path / "drafter" / "model.safetensors") for path in (whole, halves))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert handlers == [signal.getsignal(each) for each in STATUS]


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signums", "status", "step"),
    [
        ((INT, INT), 130, 1),
        ((INT, TERM, INT), 130, 1),
        ((TERM, INT), 130, 1),
        ((INT, TERM), 130, 2),
        ((TERM, TERM), 143, 2),
    ],
)
def test_the_first_signal_waits_for_the_step_and_ctrl_c_after_it_ends_the_run_at_once(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signums: tuple[signal.Signals, ...],
    status: int,
    step: int,
) -> None:
    sent(monkeypatch, "training_step", 4, *signums)
    every = ["--checkpoint.every_n_train_steps", "1"]
    assert run_fit("fit", [*base, *every, "--out", str(tmp_path / "run")]) == status
    assert (
        torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
        == step
    )


@pytest.mark.parametrize(("log_model", "uploads"), [("true", 1), ("all", 2)])
def test_a_logger_gets_the_checkpoints(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_model: str, uploads: int
) -> None:
    """As W&B's and MLflow's take them: ``all`` as they are written, ``true`` the last one when training has ended."""
    found: list[tuple[str, float]] = []
    taken: dict[str, float] = {}

    def take(callback: RunCheckpoint) -> None:
        for at, path, *_ in _scan_checkpoints(callback, taken):
            taken[path] = at
            found.append((Path(path).name, torch.load(path, weights_only=True)["global_step"]))

    waiting: list[RunCheckpoint] = []
    monkeypatch.setattr(
        CSVLogger,
        "after_save_checkpoint",
        lambda _, c: take(c) if log_model == "all" else waiting.append(c),
    )
    monkeypatch.setattr(CSVLogger, "finalize", lambda *_: [take(c) for c in waiting])
    out = tmp_path / "run"
    assert run_fit("fit", [*base, "--checkpoint.every_n_train_steps=2", f"--out={out}"]) == 0
    assert found == [("last.ckpt", 2), ("last.ckpt", 4)][-uploads:]
