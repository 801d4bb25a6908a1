import io
import sys
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from specdec.training.progress import Bar, PlainProgress, progress


class Walk(pl.LightningModule):
    tokens_per_step: int

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        self.log("train_loss", 4.25)
        self.log("depth", 1.0)
        return self.weight * batch[0].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lines(module: pl.LightningModule, seconds: float, **trainer: Any) -> list[str]:
    stream = io.StringIO()
    callback = PlainProgress(seconds, Console(file=stream, width=20))
    pl.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **trainer,
    ).fit(module, DataLoader(TensorDataset(torch.ones(4)), batch_size=1))
    return stream.getvalue().splitlines()


def test_every_step() -> None:
    module = Walk()
    module.tokens_per_step = 512
    printed = lines(module, 0.0, max_steps=6)
    assert len(printed) == 6
    for number, line in enumerate(printed, start=1):
        assert line.startswith(f"step {number}/6, train_loss 4.250, ")
        assert " tokens/s, " in line and line.endswith(" left")
    assert printed[-1].endswith("0:00 left")


def test_first_and_last_step_only() -> None:
    assert [line.split(",")[0] for line in lines(Walk(), 1e6, max_steps=6)] == ["step 1/6", "step 6/6"]


def test_without_total_and_rate() -> None:
    assert lines(Walk(), 0.0, max_epochs=1)[-1] == "step 4, train_loss 4.250"


class Figured(Walk):
    tokens_per_step = 512

    def training_step(self, batch: Any) -> Tensor:
        self.log("train/prefix_proxy", 1.6249, prog_bar=True)
        self.log("train/accuracy_0", 0.414)
        self.log("memory/peak_mb", 1811.6)
        self.log("speed/data_wait_share", 0.011)
        self.log("speed/tokens_per_second", 5912.3)
        self.log("speed/mfu", 0.378)
        self.log("speed/step_seconds", 0.5)
        return super().training_step(batch)


FIGURES = "accuracy_0 0.41, prefix 1.62, 5,912 tokens/s, mfu 38 %, data wait 1 %, 1,812 MB"


def test_figures_that_are_logged() -> None:
    printed = lines(Figured(), 0.0, max_steps=6)
    assert len(printed) == 6
    for number, line in enumerate(printed, start=1):
        assert line.startswith(f"step {number}/6, train_loss 4.250, {FIGURES}, ") and line.endswith(" left")
    assert lines(Figured(), 0.0, max_epochs=1)[-1] == f"step 4, train_loss 4.250, {FIGURES}"


def test_the_bar_shows_the_figures_and_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    items = {"v_num": 0, "train/loss": 4.25, "train/prefix_proxy": 1.6249}
    monkeypatch.setattr(RichProgressBar, "get_metrics", lambda *_: dict(items))
    now = [100.0]
    monkeypatch.setattr("specdec.training.progress.time.monotonic", lambda: now[0])
    trainer = SimpleNamespace(callback_metrics={"train/prefix_proxy": torch.tensor(1.6249), "speed/mfu": 0.378})
    bar = Bar()
    first = bar.get_metrics(trainer, Walk())  # type: ignore[arg-type]
    assert first == {"train/loss": 4.25, "prefix": "1.62", "mfu": "38 %"}
    items["train/loss"], now[0] = 3.0, 100.9
    assert bar.get_metrics(trainer, Walk()) == first  # type: ignore[arg-type]
    now[0] = 101.0
    assert bar.get_metrics(trainer, Walk())["train/loss"] == 3.0  # type: ignore[arg-type]


def test_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(progress(), PlainProgress)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert isinstance(progress(), Bar)
