"""Every batch's loss is kept exactly, once, whatever a resumed run did before."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from specdec.training.step_losses import StepLosses, read_lines


def trainer(step: int, every: int = 3, zero: bool = True) -> Any:
    return SimpleNamespace(global_step=step, log_every_n_steps=every, is_global_zero=zero)


def train(losses: StepLosses, steps: range, parts: int = 1, zero: bool = True) -> None:
    for step in steps:
        for part in range(parts):
            losses.on_train_batch_start(trainer(step, zero=zero))
            value = torch.tensor(1 / (3 + step + part / 8))
            losses.on_train_batch_end(trainer(step, zero=zero), None, {"loss": value})  # type: ignore[arg-type]


def test_no_bit_is_lost_and_a_batch_of_a_step_has_its_number(tmp_path: Path) -> None:
    losses = StepLosses(tmp_path / "losses.txt")
    losses.on_train_start(trainer(0), None)  # type: ignore[arg-type]
    train(losses, range(4), parts=2)
    assert len(read_lines(tmp_path / "losses.txt")) == 6  # three at a time
    losses.on_fit_end(trainer(4), None)  # type: ignore[arg-type]
    rows = [line.split() for line in read_lines(tmp_path / "losses.txt")]
    assert [row[:2] for row in rows] == [[str(step), str(part)] for step in range(4) for part in range(2)]
    assert float.fromhex(rows[3][2]) == float(torch.tensor(1 / (4 + 1 / 8)))


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    whole, killed = StepLosses(tmp_path / "whole.txt"), StepLosses(path)
    for losses, steps in ((whole, range(7)), (killed, range(5))):
        losses.on_train_start(trainer(0), None)  # type: ignore[arg-type]
        train(losses, steps)
    killed.on_save_checkpoint(trainer(5))
    with path.open("a") as file:
        file.write("5 0 0x1.8")  # cut short
    again = StepLosses(path)
    again.on_train_start(trainer(4), None)  # type: ignore[arg-type]
    train(again, range(4, 7))
    for losses in (whole, again):
        losses.on_exception(trainer(7), None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert path.read_text() == (tmp_path / "whole.txt").read_text()


def test_one_process_writes(tmp_path: Path) -> None:
    losses = StepLosses(tmp_path / "losses.txt")
    losses.on_train_start(trainer(0, zero=False), None)  # type: ignore[arg-type]
    train(losses, range(4), zero=False)
    losses.on_fit_end(trainer(4, zero=False), None)  # type: ignore[arg-type]
    assert not (tmp_path / "losses.txt").exists()
