"""The learning rate over a run, and which rows a run draws."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from specdec.data import Batch, TokenData
from specdec.data.module import Splits
from specdec.training.schedule import WarmupCosine, check_rows, drawn_rows


def test_then_half_a_cosine() -> None:
    schedule = WarmupCosine(warmup=0.1, floor=0.2)
    assert schedule.factor(4, 40) == 1.0
    assert schedule.factor(22, 40) == pytest.approx(0.6)  # halfway, halfway between one and the floor
    assert schedule.factor(13, 40) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(40, 40) == pytest.approx(0.2)
    assert [schedule.factor(step, 40) for step in (58, 76, 400)] == pytest.approx([0.2] * 3)  # it does not rise again
    falling = [schedule.factor(step, 40) for step in range(4, 41)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("values", [{"warmup": -0.1}, {"warmup": 1.0}, {"floor": -0.1}, {"floor": 1.1}])
def test_shares_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"warmup must lie in \[0, 1\) and floor in \[0, 1\]"):
        WarmupCosine(**values)


ROWS = 23


class Made(TokenData):
    """Rows of different lengths, each of its own number."""

    def __init__(self, batch_size: int, **trainer: Any) -> None:
        super().__init__(seq_len=32, batch_size=batch_size)
        ids_RT = torch.arange(ROWS)[:, None].expand(-1, 32).clone()
        documents_RT = torch.where(torch.arange(32) < 1 + torch.arange(ROWS)[:, None] % 31, 0, -1)
        rows = Batch(ids_RT, documents_RT == 0, documents_RT)
        self._splits = Splits(rows, rows, rows)
        self.trainer = run(**trainer)


def run(**changes: Any) -> Any:
    usual = {"state": SimpleNamespace(fn="fit"), "world_size": 1, "global_rank": 0, "callbacks": [], "max_steps": 3,
             "max_epochs": -1, "overfit_batches": 0, "limit_train_batches": 1.0,
             "accumulate_grad_batches": 1}  # fmt: skip
    return SimpleNamespace(**usual | changes)


def drawn(data: Made, batches: int) -> set[int]:
    """By all processes in so many batches."""
    found: set[int] = set()
    for rank in range(data.trainer.world_size):
        data.trainer.global_rank = rank
        found |= set(data.train_dataloader().numbers(0)[: batches * data.batch_size].tolist())
    return found - {-1}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_first_rows_are_those_that_the_processes_draw(world_size: int) -> None:
    for steps in (1, 2, 3):
        data = Made(2, world_size=world_size, max_steps=steps)
        rows = drawn_rows(data.trainer, data)
        assert rows == steps * 2 * world_size
        assert set(data.first_rows(rows).ids_BT[:, 0].tolist()) == drawn(data, steps)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"max_steps": 2, "accumulate_grad_batches": 3}, ROWS),  # 6 batches of 4
        ({"max_steps": 1, "accumulate_grad_batches": 4}, 16),
        ({"max_steps": 2, "accumulate_grad_batches": 4}, ROWS),  # the epoch's last step has two batches
        ({"max_steps": 3, "accumulate_grad_batches": 4}, None),
        ({"max_steps": 2, "limit_train_batches": 5, "accumulate_grad_batches": 4}, 20),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 2}, 8),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 0.5}, 12),
        ({"max_steps": -1, "max_epochs": 2}, None),
        ({"max_steps": 9, "max_epochs": 1}, ROWS),
        ({"overfit_batches": 2}, None),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, None),
    ],
)
def test_what_a_run_draws(changes: dict[str, Any], rows: int | None) -> None:
    data = Made(4, **changes)
    assert drawn_rows(data.trainer, data) == rows
    check_rows(data.trainer, data, None)
    few = 15 if rows is None else rows - 1
    hint = "no --first_rows" if rows is None else f"--first_rows {rows}"
    with pytest.raises(ValueError, match=f"the first {few} training rows alone.*with {hint}, into"):
        check_rows(data.trainer, data, few)
    if rows is not None:
        check_rows(data.trainer, data, rows)
    data.trainer.state.fn = "validate"
    check_rows(data.trainer, data, 1)
