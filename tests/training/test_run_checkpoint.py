"""Which checkpoints are kept is decided by what lies in the folder."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from specdec.training.run_checkpoint import RunCheckpoint


class Saves(pl.Trainer):
    """Writes nothing but names."""

    step = 0

    @property
    def global_step(self) -> int:
        return self.step

    def save_checkpoint(self, filepath: Any, *rest: Any, **more: Any) -> None:
        Path(filepath).touch()


def saved(folder: Path, top: int, steps: list[int]) -> set[str]:
    """What lies there after a process has saved at these steps, and was killed."""
    trainer = Saves(logger=False, accelerator="cpu", enable_checkpointing=False)
    checkpoint = RunCheckpoint(every_n_train_steps=1, save_top_k=top)
    checkpoint.dirpath = str(folder)
    for step in steps:
        trainer.step = step
        candidates = checkpoint._monitor_candidates(trainer)
        checkpoint._save_topk_checkpoint(trainer, candidates)
        checkpoint._save_last_checkpoint(trainer, candidates)
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("top", [0, 1, 2, -1])
def test_as_many_are_kept_after_any_number_of_kills(tmp_path: Path, top: int) -> None:
    everything = [2, 4, 6, 8, 10, 12]
    for begin in range(0, 6, 2):  # every process knows nothing of those before
        found = saved(tmp_path, top, everything[begin : begin + 2])
    kept = everything if top == -1 else everything[len(everything) - top :]
    assert found == {"last.ckpt", *(f"step-{step}.ckpt" for step in kept)}


def test_those_of_later_steps_and_other_names_are_left_alone(tmp_path: Path) -> None:
    """A run that goes on from an older checkpoint comes to the later ones again."""
    for name in ("step-20.ckpt", "step-3.ckpt", "mine.ckpt", "step-x.ckpt"):
        (tmp_path / name).touch()
    assert saved(tmp_path, 1, [4]) == {"step-20.ckpt", "step-4.ckpt", "mine.ckpt", "step-x.ckpt", "last.ckpt"}
    assert saved(tmp_path, 1, [22]) == {"step-22.ckpt", "mine.ckpt", "step-x.ckpt", "last.ckpt"}


def test_a_run_that_was_killed_before_it_removed_one_removes_it_at_its_end(tmp_path: Path) -> None:
    """It goes on from its last step, with nothing left to save."""
    for step in (2, 4, 6):
        (tmp_path / f"step-{step}.ckpt").touch()
    trainer, checkpoint = Saves(logger=False, accelerator="cpu", enable_checkpointing=False), RunCheckpoint(2, 2)
    checkpoint.dirpath, trainer.step = str(tmp_path), 6
    checkpoint.on_fit_end(trainer, pl.LightningModule())
    assert {path.name for path in tmp_path.iterdir()} == {"step-4.ckpt", "step-6.ckpt"}


def test_its_defaults() -> None:
    assert isinstance(RunCheckpoint(), ModelCheckpoint) and RunCheckpoint().save_top_k == 1
    assert RunCheckpoint(every_n_train_steps=5).state_key == RunCheckpoint().state_key
