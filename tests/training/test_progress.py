"""How far a run is: a line now and then, or one bar over the whole run on a terminal."""

import io
import re
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from specdec.training import progress
from specdec.training.progress import ProgressLine, RunBar, progress_callback


class Walk(pl.LightningModule):
    """Logs its loss at every step, and the other figures on the steps that are logged, as a drafter's module does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        step = self.global_step + 1
        self.log("train/loss", 4.0 + step / 100)
        if step % self.trainer.log_every_n_steps == 0:
            figures = {
                "train/prefix_proxy": 1.5 + step / 100, "train/accuracy_0": 0.414, "memory/peak_mb": 1811.6,
                "speed/tokens_per_second": 5912.3, "depth": 1.0,
            }  # fmt: skip
            self.log_dict(figures)
        return self.weight * batch[0].sum()

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", 4.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SHOWS_CURSOR = "\x1b[?25h"


def fit(
    callback: pl.Callback,
    module: pl.LightningModule | None = None,
    batches: int = 4,
    **trainer: Any,
) -> None:
    rows = DataLoader(TensorDataset(torch.ones(batches)), batch_size=1)
    settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1} | trainer
    pl.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **settings,
    ).fit(module or Walk(), rows, rows)


def lines(monkeypatch: pytest.MonkeyPatch, seconds: float, **trainer: Any) -> list[str]:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    fit(ProgressLine(), **trainer)
    return [line for line in stream.getvalue().splitlines() if line.startswith("step ")]


def test_every_step_has_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = lines(monkeypatch, 0.0, max_steps=6)
    for step, line in enumerate(printed, start=1):
        figures = f"train/loss 4.0{step}0, train/accuracy_0 0.41, train/prefix_proxy 1.5{step}"
        assert line.startswith(f"step {step}/6, {figures}, 5,912 tokens/s, 1,812 MB, ")
        assert line.endswith(" left")


def test_figures_that_are_logged_now_and_then_are_said_once_with_their_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = lines(monkeypatch, 0.0, max_steps=6, log_every_n_steps=3)
    assert ["prefix_proxy" in line for line in printed] == [False, False, True] * 2


def test_first_and_last_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.split(",")[0] for line in lines(monkeypatch, 1e6, max_steps=6)] == [
        "step 1/6",
        "step 6/6",
    ]


def test_a_figure_between_two_lines_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = lines(monkeypatch, 1e6, max_steps=4, log_every_n_steps=3)
    assert "prefix_proxy" not in printed[0]
    assert "; step 3: train/accuracy_0 0.41, train/prefix_proxy 1.53, 5,912" in printed[1]


@pytest.mark.parametrize(
    ("trainer", "last"),
    [
        ({"max_epochs": 2}, "step 8/8, "),
        ({"max_epochs": 1, "accumulate_grad_batches": 3}, "step 2/2, "),
        ({"max_epochs": 9, "max_steps": 3}, "step 3/3, "),
        ({"max_epochs": -1, "max_time": {"seconds": 1}, "limit_train_batches": 1}, "step "),
    ],
)
def test_a_run_of_known_length_has_a_total(
    trainer: dict[str, Any], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = lines(monkeypatch, 0.0, **trainer)[-1]
    assert printed.startswith(last) and ("left" in printed) == ("/" in printed.split(",")[0])


def test_accumulated_batches_print_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = lines(monkeypatch, 1e6, batches=6, max_steps=2, accumulate_grad_batches=3)
    assert [line.split(",")[0] for line in printed] == ["step 0/2", "step 2/2"]


def test_a_validation_prints_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = lines(monkeypatch, 0.0, max_steps=4, limit_val_batches=1, val_check_interval=2)
    assert [line for line in printed if "validation" in line] == [
        "step 2/4, validation: val/loss 4.500",
        "step 4/4, validation: val/loss 4.500",
    ]


def shown(**trainer: Any) -> list[str]:
    """What stands on the terminal at the end of a run: the bar, and the lines below it."""
    stream = io.StringIO()
    fit(RunBar(Console(file=stream, force_terminal=True, width=100)), **trainer)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "Epoch" not in text and "v_num" not in text
    return text.rstrip().split("\r")[-1].splitlines()


def test_a_terminal_has_one_bar_over_all_epochs_with_the_figures_below() -> None:
    bar, trained, validated = shown(max_epochs=3, limit_val_batches=1, log_every_n_steps=4)
    assert re.fullmatch(r"step 12/12 ━+ 0:00 left train/loss 4\.120", bar.strip())
    assert trained.startswith("  step 12: train/accuracy_0 0.41, train/prefix_proxy 1.62, 5,912")
    assert validated == "  step 12: val/loss 4.500"


def test_a_bar_shows_a_figure_with_the_step_that_logged_it() -> None:
    bar, trained = shown(max_steps=7, log_every_n_steps=3)
    assert bar.startswith("step 7/7 ") and trained.startswith("  step 6: train/accuracy_0 0.41")


def test_a_bar_of_unknown_length_has_no_time_left() -> None:
    bar, *_ = shown(max_epochs=-1, max_time={"seconds": 1}, limit_train_batches=1)
    assert re.match(r"step \d+ ", bar) and "left" not in bar


def test_a_bar_ends_with_an_error() -> None:
    class Fails(Walk):
        def training_step(self, batch: Any) -> Tensor:
            raise ValueError("full disk")

    stream = io.StringIO()
    with pytest.raises(ValueError, match="full disk"):
        fit(RunBar(Console(file=stream, force_terminal=True)), Fails(), max_steps=2)
    assert stream.getvalue().endswith(SHOWS_CURSOR)


def test_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(progress_callback(), ProgressLine)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert isinstance(progress_callback(), RunBar)
