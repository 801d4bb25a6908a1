"""Two processes train what one process would on the same rows, with whole weights and with weights in shards.

This file is also the program that they run.
"""

import copy
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

import specdec.training.distributed  # noqa: F401  registers the strategy
from specdec.training.distributed import strategy_kind, unsharded
from tests.training.test_module import Begin, InMemory, fit, learner, moved, plain, sample, trainer
from tests.two_processes import launch


@pytest.mark.parametrize(
    "given", ["ddp_spawn", "fsdp", "deepspeed_stage_2", SimpleNamespace(class_path="my.DDP")]
)
def test_any_other_strategy_is_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^trainer\.strategy=[^\n]*set auto, ddp, ddp_fork, fsdp2$"
    ):
        strategy_kind(given)


PROCESSES = 2
STRATEGIES = ("ddp", "fsdp2")
pytestmark = pytest.mark.slow  # starts several processes
# answers in each row, rows of a process's batch, batches of a step, and the rows of every step
CASES: dict[str, tuple[list[int], int, int, list[slice]]] = {
    "different numbers of rows": ([12, 3, 4, 8], 1, 1, [slice(0, 2), slice(2, 4)]),
    "a process without any": ([12, 0, 9, 0], 1, 1, [slice(0, 2), slice(2, 4)]),
    "a step without any": ([12, 5, 0, 1, 6, 12], 1, 1, [slice(0, 2), slice(2, 4), slice(4, 6)]),
    "accumulated, the last window short": ([12, 0, 4, 0, 9, 5], 1, 2, [slice(0, 4), slice(4, 6)]),
    "a short last batch, and a blank row": ([12, 3, 4, 6, 9], 2, 2, [slice(0, 5)]),
}


def program(out: Path) -> None:
    """Every case, one after another; each process writes the weights that it ends with."""
    rank, found = int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for strategy, (name, (answers, batch_size, accumulate, _)) in itertools.product(
        STRATEGIES, CASES.items()
    ):
        begin, module = Begin(), learner(train_embed=True)
        more = {
            "strategy": strategy,
            "devices": PROCESSES,
            "accumulate_grad_batches": accumulate,
            "callbacks": [begin],
        }
        run = trainer(**more)
        run.fit(module, datamodule=InMemory(sample(answers), batch_size))
        assert (
            module.drafter is not None and run.world_size == PROCESSES and run.global_rank == rank
        )
        found[f"{strategy}: {name}"] = {
            "before": begin.drafter.state_dict(),
            "after": unsharded(module.drafter).state_dict(),
        }
    for strategy in STRATEGIES:
        found[f"{strategy}: spoiled"] = spoiled(strategy)
    torch.save(found, out / f"{rank}.pt")


class Spoiled(pl.Callback):
    """The second process's loss of the second step becomes NaN, or what it holds of a last weight."""

    def __init__(self, loss: bool) -> None:
        self.loss = loss

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        if self.loss and trainer.global_rank == 1 and trainer.global_step == 1:
            module._sums[1] = torch.nan

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
        if not self.loss and trainer.global_rank == 1 and trainer.global_step == trainer.max_steps:
            weight = module.drafter.lm_head.weight.detach()
            (weight.to_local() if isinstance(weight, DTensor) else weight).fill_(torch.nan)


def spoiled(strategy: str) -> list[str]:
    """What runs end with in this process."""
    said = []
    for loss in (True, False):
        more = {"strategy": strategy, "devices": PROCESSES, "log_every_n_steps": 0, "max_steps": 3}
        try:
            trainer(callbacks=[Spoiled(loss)], **more).fit(
                learner(), datamodule=InMemory(sample([12] * 8), 1)
            )
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("distributed")
    launch("tests.training.test_distributed", out, PROCESSES)
    return [torch.load(out / f"{i}.pt", weights_only=True) for i in range(PROCESSES)]


def test_processes_end_well_right_after_a_backward_pass(tmp_path: Path) -> None:
    """Without ``wait_for_gloo``, ten such jobs of ten aborted."""
    launch("tests.training.ends_at_once", tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_end_if_one_is_not_finite(found: list[dict[str, Any]], strategy: str) -> None:
    one, other = (rank[f"{strategy}: spoiled"] for rank in found)
    assert one == other
    assert [said.partition(" the loss")[0] for said in one] == ["by step 1", "by step 3"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_are_one(found: list[dict[str, Any]], strategy: str, name: str) -> None:
    """The same steps as plain descent over the rows of both, to float64's digits; and the same on both."""
    answers, _, _, windows = CASES[name]
    module, rows = learner(train_embed=True), sample(answers)
    fit(module, rows, 1, max_epochs=-1, max_steps=1)  # builds a drafter
    before, one, other = (copy.deepcopy(module.drafter) for _ in range(3))
    assert before is not None and one is not None and other is not None
    for drafter, rank, when in ((before, 0, "before"), (one, 0, "after"), (other, 1, "after")):
        drafter.load_state_dict(found[rank][f"{strategy}: {name}"][when])
    assert moved(one, other) == 0
    wanted = plain(copy.deepcopy(before), module.objective, rows, windows)
    assert moved(before, wanted) > 1e-3 and moved(one, wanted) < 1e-11


if __name__ == "__main__":
    program(Path(sys.argv[1]))
