"""Rates under a clock that only moves when the test says so."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from specdec.training.callbacks import Throughput
from specdec.training.module import DrafterModule
from tests.training.test_module import InMemory, T, learner, sample, trainer

B = 2
STEP, FETCH, VALIDATION, CHECKPOINT, COMPILATION = 1.0, 0.25, 100.0, 50.0, 1000.0


class Clock:
    now = 17.0

    def __call__(self) -> float:
        return self.now


class Fetching(pl.Callback):
    """What happens between batches takes time too."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.now += FETCH


class SlowFiles(TorchCheckpointIO):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.clock.now += CHECKPOINT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, inner, validate = Clock(), DrafterModule.training_step, DrafterModule.validation_step

    def step(self: DrafterModule, batch: Any, batch_idx: int) -> torch.Tensor:
        clock.now += STEP + (COMPILATION if self.global_step < 2 else 0)
        return inner(self, batch, batch_idx)

    def validation(self: DrafterModule, batch: Any, batch_idx: int) -> None:
        clock.now += VALIDATION
        validate(self, batch, batch_idx)

    monkeypatch.setattr(DrafterModule, "training_step", step)
    monkeypatch.setattr(DrafterModule, "validation_step", validation)
    return clock


def reports(
    clock: Clock, callbacks: tuple[pl.Callback, ...] = (), **more: Any
) -> dict[int, dict[str, float]]:
    """What is logged in eight steps, by step."""
    module, found = learner(), dict[int, dict[str, float]]()
    log = module.log_dict

    def record(figures: Any, *args: Any, **kwargs: Any) -> None:
        if "speed/step_seconds" in figures:
            found[module.global_step] = dict(figures)
        log(figures, *args, **kwargs)

    module.log_dict = record  # type: ignore[method-assign]
    own = [*callbacks, Throughput(clock=clock), Fetching(clock)]
    run = trainer(callbacks=own, max_epochs=-1, max_steps=8, log_every_n_steps=2, **more)
    run.fit(module, datamodule=InMemory(sample([12, 6] * 4), B))
    assert sorted(found) == [4, 6, 8]  # the first two steps compile
    return found


def test_rates_of_whole_steps(clock: Clock) -> None:
    for report in reports(clock).values():
        assert report["speed/tokens_per_second"] == pytest.approx(B * T / (STEP + FETCH))
        assert report["speed/step_seconds"] == pytest.approx(STEP + FETCH)
        assert report["memory/peak_mb"] > 10


def test_validations_and_checkpoints_do_not_count(clock: Clock, tmp_path: Path) -> None:
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    slow = {"plugins": SlowFiles(clock), "enable_checkpointing": True}
    for report in reports(
        clock, (writer,), limit_val_batches=1, val_check_interval=2, **slow
    ).values():
        assert 2 * STEP <= 2 * report["speed/step_seconds"] <= 2 * (STEP + FETCH)
