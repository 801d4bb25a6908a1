"""What a resumed run could forget: the comparison with a run that nothing interrupted finds each."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from specdec.commands.fit import run_fit
from specdec.data.loader import ResumableLoader
from specdec.drafter import load_drafter
from specdec.training.losses_file import read_losses
from specdec.training.module import DrafterModule
from tests.data.families import in_default_run
from tests.short_run import short_run

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
STEPS = 6


@pytest.fixture
def argv(target_directory: Path, text_file: Path) -> list[str]:
    """A run whose every part matters: a schedule, and steps of several batches."""
    return short_run(
        target_directory, text_file,
        model__ttt_steps=1,
        trainer__limit_val_batches=0,
        trainer__log_every_n_steps=1,
        trainer__enable_progress_bar="false",
        trainer__accumulate_grad_batches=2,
        checkpoint__every_n_train_steps=2,
        checkpoint__save_top_k=-1,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def no_optimizer(patch: Patch) -> None:
    """Adam begins anew."""
    patch.setattr(_CheckpointConnector, "restore_optimizers", lambda self: None)


def no_schedule(patch: Patch) -> None:
    """The learning rate begins anew."""
    patch.setattr(_CheckpointConnector, "restore_lr_schedulers", lambda self: None)


def no_weights(patch: Patch) -> None:
    """The drafter begins anew."""
    patch.setattr(DrafterModule, "load_state_dict", lambda self, *of, **more: None)


def loader(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """The data go on elsewhere."""

    def plant(patch: Patch) -> None:
        right = ResumableLoader.load_state_dict
        patch.setattr(
            ResumableLoader, "load_state_dict", lambda self, state: right(self, change(state))
        )

    return plant


FAULTS: dict[str, Plant] = {
    "the optimizer's state": no_optimizer,
    "the schedule's state": no_schedule,
    "the weights": no_weights,
    "the place in the data, one batch back": loader(lambda s: s | {"batches": s["batches"] - 1}),
    "the place in the data, one batch on": loader(lambda s: s | {"batches": s["batches"] + 1}),
    "the place in the data, from the beginning": loader(lambda s: s | {"batches": 0}),
    "the epoch": loader(lambda s: s | {"epoch": s["epoch"] + 1}),
}


def is_the_same(one: Path, two: Path) -> bool:
    """Whether two runs have every loss and weight in common, to the last bit: the proof of a resumed run."""
    a, b = (load_drafter(out / "drafter").state_dict() for out in (one, two))
    losses = [read_losses(out / "losses.txt") for out in (one, two)]
    return losses[0] == losses[1] and all(torch.equal(a[name], b[name]) for name in a)


def whole_and_resumed(argv: list[str], folder: Path, plant: Plant | None, patch: Patch) -> bool:
    """Compare a run with one that resumes from an earlier checkpoint of it, with a fault."""
    whole, killed = folder / "whole", folder / "killed"
    argv = [*argv, f"--trainer.max_steps={STEPS}"]
    assert run_fit("fit", [*argv, f"--out={whole}"]) == 0
    shutil.copytree(whole, killed)
    for name in (
        "DONE.json",
        "SHA256SUMS",
        "checkpoints/last.ckpt",
        f"checkpoints/step-{STEPS}.ckpt",
    ):
        (killed / name).unlink()
    if plant is not None:
        plant(patch)
    assert run_fit("fit", [*argv, f"--out={killed}", "--ckpt_path=auto"]) == 0
    return is_the_same(whole, killed)


def test_without_a_fault_they_are_equal(
    argv: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    assert whole_and_resumed(argv, tmp_path, None, monkeypatch)


@pytest.mark.parametrize("fault", in_default_run(FAULTS, "the weights"))
def test_what_is_forgotten_is_found(
    fault: str, argv: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    assert not whole_and_resumed(argv, tmp_path, FAULTS[fault], monkeypatch)
