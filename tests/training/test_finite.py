"""Training that is no longer finite ends as an error, and leaves what was saved before."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.cli import main
from specdec.data import Batch
from specdec.training.checkpoint import read_training_checkpoint
from specdec.training.module import DrafterModule
from specdec.training.nonfinite import NO_STEP, NonFiniteSteps
from specdec.training.step import StepOutput
from tests.short_run import short_run
from tests.training.test_module import InMemory, learner, sample, trainer

SAID = "the loss or a weight was NaN or infinite: lower the learning rate"


@pytest.fixture
def base(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of six steps, none of which is logged."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return short_run(
        target_directory, text_file,
        model__ttt_steps=1,
        model__schedule__warmup=0,
        trainer__max_steps=6,
        trainer__limit_val_batches=0,
        trainer__log_every_n_steps=0,
        trainer__enable_progress_bar="false",
        checkpoint__every_n_train_steps=2,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def spoil(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The loss, and with it every gradient, of one step is NaN."""
    inner = DrafterModule._run

    def run(self: DrafterModule, batch: Batch, stage: str, measure: bool = True) -> StepOutput:
        out = inner(self, batch, stage, measure)
        return (
            out._replace(loss=out.loss * math.nan)
            if stage == "train" and self.global_step == step
            else out
        )

    monkeypatch.setattr(DrafterModule, "_run", run)


EMA = ["--trainer.callbacks+=specdec.training.ema.EMA"]
VALIDATED = [
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=1",
    "--trainer.num_sanity_val_steps=0",
]


@pytest.mark.parametrize(
    "more",
    [
        [],
        EMA,
        VALIDATED,
        ["--trainer.accumulate_grad_batches=2"],
        ["--checkpoint.every_n_train_steps=0"],
        ["--trainer.log_every_n_steps=2"],
        ["--trainer.gradient_clip_val=null"],
        ["--trainer.precision=bf16-mixed"],
    ],
    ids=str,
)
def test_a_learning_rate_that_is_far_too_high(
    more: list[str], base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No end is written, no drafter, and no checkpoint without numbers."""
    out = tmp_path / "run"
    assert main(["fit", *base, "--model.optimizer.lr=1e30", *more, f"--out={out}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert SAID in line and "Traceback" not in line
    assert not (out / "DONE.json").exists() and not (out / "drafter").exists()
    for path in out.rglob("*.ckpt"):
        assert all(
            bool(value.isfinite().all())
            for value in read_training_checkpoint(path)["state_dict"].values()
        )


@pytest.mark.slow
def test_the_last_sound_checkpoint_stays_and_goes_on(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    with monkeypatch.context() as patch:
        spoil(patch, 3)
        assert main(["fit", *base, f"--out={out}"]) == 2
    assert "by step 3 the loss" in capsys.readouterr().err
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "last.ckpt",
        "step-2.ckpt",
    ]
    assert read_training_checkpoint(out / "checkpoints" / "last.ckpt")["global_step"] == 2
    assert (
        main(["fit", *base, f"--out={out}", "--ckpt_path=auto"])
        == main(["fit", *base, f"--out={whole}"])
        == 0
    )
    one, two = (load_file(run / "drafter" / "model.safetensors") for run in (out, whole))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_lower_learning_rate_lets_a_resumed_run_go_on(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run has the present config's learning rate, not the checkpoint's."""
    out, high = tmp_path / "run", ["--model.optimizer.lr=1e30"]
    assert main(["fit", *base, "--trainer.max_steps=2", f"--out={out}"]) == 0
    auto = [*base, f"--out={out}", "--ckpt_path=auto", "--allow_changes=[model.optimizer]"]
    before = (out / "drafter" / "config.json").read_text()
    assert main(["fit", *auto, *high]) == 2 and SAID in capsys.readouterr().err
    assert (out / "drafter" / "config.json").read_text() == before and not (
        out / "DONE.json"
    ).exists()
    assert main(["fit", *auto, "--model.optimizer.lr=1e-3"]) == 0
    assert json.loads((out / "DONE.json").read_text())["steps"] == 6
    last = read_training_checkpoint(out / "checkpoints" / "last.ckpt")
    assert set(last["lr_schedulers"][0]["base_lrs"]) == {1e-3}
    assert {group["initial_lr"] for group in last["optimizer_states"][0]["param_groups"]} == {1e-3}


def test_an_interruption_after_a_nan_loss_saves_nothing(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1)
    inner = DrafterModule.training_step

    def training_step(self: DrafterModule, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise KeyboardInterrupt
        return inner(self, batch, batch_idx)

    monkeypatch.setattr(DrafterModule, "training_step", training_step)
    out = tmp_path / "run"
    assert main(["fit", *base, "--checkpoint.every_n_train_steps=0", f"--out={out}"]) != 0
    assert (
        not (out / "DONE.json").exists()
        and not (out / "drafter").exists()
        and not list(out.rglob("*.ckpt"))
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_without_checkpoints_or_logged_steps_ends_at_a_nan(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpoints, and without a step that is logged."""
    spoil(monkeypatch, 1)
    run = trainer(log_every_n_steps=0, accumulate_grad_batches=accumulate)
    with pytest.raises(ValueError, match=rf"^by step 1 {SAID}"):
        run.fit(learner(), datamodule=InMemory(sample([12] * 6), 1))
    spoil(monkeypatch, NO_STEP)
    again = learner()  # nor does a module remember another fit's
    again.nonfinite.first_step = torch.tensor(0)
    monkeypatch.undo()
    trainer().fit(again, datamodule=InMemory(sample([12] * 2), 1))


def test_a_weight_that_the_last_update_made_infinite_is_refused() -> None:
    """After a single step whose loss was fine."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=math.inf)

    given = learner()
    given.make_optimizer = optimizer  # type: ignore[assignment]
    with pytest.raises(ValueError, match=rf"^by step 1 {SAID}"):
        trainer(max_steps=1, precision="32-true").fit(given, datamodule=InMemory(sample([12]), 1))


class NoWait(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_a_step_is_noted_without_waiting_for_the_device() -> None:
    steps = NonFiniteSteps()
    with NoWait():
        for step, loss in enumerate((1.0, math.nan, math.inf)):
            steps.record_nonfinite(torch.tensor(loss), step)
    assert int(steps.first_step) == 1
    with NoWait(), pytest.raises(AssertionError, match="local_scalar"):
        bool(torch.tensor(math.nan).isfinite())
