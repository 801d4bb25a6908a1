"""Metrics of two processes are those of one; this file is also the program that they run."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.evaluation.metrics import decoding_metrics
from specdec.evaluation.record import Answer
from tests.evaluation.made import answer
from tests.two_processes import launch

PROCESSES = 2
CATEGORIES = ["code", "math"]
ANSWERS = [
    answer("a", (3, 1, 0), category="math", context=(5, 9, 200), draft_ms=(1.0, 2.0, 3.0), verify_ms=(4.0, 4.0, 5.0)),
    answer("b", (2,), category="code", seconds=0.3),
    answer("a", (0, 0), category="math", depth=5),  # the second turn, on the other process
    answer("c", (1, 3), seconds=0.7),
    answer("d", (0,), category="code", plain_seconds=0.0, plain_tokens=0),
]
# which answers a process has; None: it never updates
CASES: dict[str, list[list[int] | None]] = {
    "in turns": [[0, 2, 4], [1, 3]],
    "in another order": [[3, 1], [4, 0, 2]],
    "one has none": [[0, 1, 2, 3, 4], []],
    "one never updates": [None, [0, 1, 2, 3, 4]],
    "none has any": [[], []],
}


def figures(chosen: list[Answer] | None) -> Any:
    metrics = decoding_metrics(CATEGORIES)
    if chosen is not None:
        metrics.update(chosen)
    return metrics.compute()


def program(out: Path) -> None:
    """Every case, one after another; each process writes what it computes."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    chosen = {name: case[rank] for name, case in CASES.items()}
    found = {
        name: figures(None if numbers is None else [ANSWERS[n] for n in numbers]) for name, numbers in chosen.items()
    }
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("distributed")
    launch("tests.evaluation.test_distributed", out, PROCESSES)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(found: list[dict[str, Any]], name: str) -> None:
    """To the last bit, on both."""
    wanted = json.loads(json.dumps(figures([] if name == "none has any" else ANSWERS)))
    assert found[0][name] == found[1][name] == wanted
    assert name == "none has any" or wanted["acceptance_length"][0] == pytest.approx(1 + 10 / 9)


if __name__ == "__main__":
    program(Path(sys.argv[1]))
