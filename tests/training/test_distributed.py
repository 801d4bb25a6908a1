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

import pytest
import torch

import specdec.training.distributed  # noqa: F401  registers the strategy
from specdec.training.distributed import strategy_kind, unsharded
from tests.training.test_module import Begin, InMemory, fit, learner, moved, plain, sample, trainer
from tests.two_processes import launch


@pytest.mark.parametrize("given", ["ddp_spawn", "fsdp", "deepspeed_stage_2", SimpleNamespace(class_path="my.DDP")])
def test_any_other_strategy_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy=[^\n]*set auto, ddp, ddp_fork, fsdp2$"):
        strategy_kind(given)


PROCESSES = 2
STRATEGIES = ("ddp", "fsdp2")
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
    for strategy, (name, (answers, batch_size, accumulate, _)) in itertools.product(STRATEGIES, CASES.items()):
        begin, module = Begin(), learner(train_embed=True)
        more = {"strategy": strategy, "devices": PROCESSES, "accumulate_grad_batches": accumulate, "callbacks": [begin]}
        run = trainer(**more)
        run.fit(module, datamodule=InMemory(sample(answers), batch_size))
        assert module.drafter is not None and run.world_size == PROCESSES and run.global_rank == rank
        found[f"{strategy}: {name}"] = {
            "before": begin.drafter.state_dict(),
            "after": unsharded(module.drafter).state_dict(),
        }
    torch.save(found, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("distributed")
    launch("tests.training.test_distributed", out, PROCESSES)
    return [torch.load(out / f"{i}.pt", weights_only=True) for i in range(PROCESSES)]


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
