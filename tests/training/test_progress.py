"""How far a run is: a line now and then, or Lightning's bar on a terminal."""

import io
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from specdec.training import callbacks
from specdec.training.callbacks import ProgressLine, progress_callback


class Walk(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        figures = {
            "train/prefix_proxy": 1.6249, "train/accuracy_0": 0.414, "memory/peak_mb": 1811.6,
            "speed/tokens_per_second": 5912.3, "train/loss": 4.25, "depth": 1.0,
        }  # fmt: skip
        self.log_dict(figures)
        return self.weight * batch[0].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lines(monkeypatch: pytest.MonkeyPatch, seconds: float, **trainer: Any) -> list[str]:
    monkeypatch.setattr(callbacks, "SECONDS_BETWEEN_LINES", seconds)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    pl.Trainer(
        accelerator="cpu",
        callbacks=[ProgressLine()],
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **trainer,
    ).fit(Walk(), DataLoader(TensorDataset(torch.ones(4)), batch_size=1))
    return [line for line in stream.getvalue().splitlines() if line.startswith("step ")]


FIGURES = "train/loss 4.250, accuracy_0 0.41, prefix 1.62, 5,912 tokens/s, 1,812 MB"


def test_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = lines(monkeypatch, 0.0, max_steps=6)
    assert len(printed) == 6
    for number, line in enumerate(printed, start=1):
        assert line.startswith(f"step {number}/6, {FIGURES}, ") and line.endswith(" left")
    assert printed[-1].endswith("0:00 left")


def test_first_and_last_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.split(",")[0] for line in lines(monkeypatch, 1e6, max_steps=6)] == [
        "step 1/6",
        "step 6/6",
    ]


def test_without_total(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 0.0, max_epochs=1)[-1] == f"step 4, {FIGURES}"


def test_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(progress_callback(), ProgressLine)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert isinstance(progress_callback(), RichProgressBar)
