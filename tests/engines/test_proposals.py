"""The child process that records what vLLM proposes; tests/engines/test_vllm.py has the real one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.engines.proposals import (
    INSIDE,
    ProposalEngine,
    RecordedAnswer,
    RecordedPass,
)
from specdec.utils.vllm import VllmRefusedError
from tests.engines.conftest import fake_proposals

__all__ = ["fake_proposals"]
PASSES = [{"place": 2, "last": 9, "drafts": [4, 5]}]


def test_an_answer_has_its_passes(fake_proposals: Path) -> None:
    answer = {"answers": [{"ids": [9, 8], "passes": PASSES}, {"ids": [7], "passes": []}]}
    (fake_proposals / "answer.json").write_text(json.dumps(answer))
    with ProposalEngine.started() as engine:
        assert engine.version == "0.0.fake"
        answers = engine.ask(["target", "--flag"], [[1, 2], [3]], 2)
        process = engine.child.process
    first = RecordedAnswer([1, 2], [9, 8], [RecordedPass(2, 9, [4, 5])])
    assert answers == [first, RecordedAnswer([3], [7], [])]
    (job,) = json.loads((fake_proposals / "jobs.json").read_text())
    assert job == {"serve": ["target", "--flag"], "prompts": [[1, 2], [3]], "tokens": 2}
    assert process.poll() is not None


def test_what_vllm_refuses_is_an_error_and_another_may_follow(fake_proposals: Path) -> None:
    (fake_proposals / "answer.json").write_text('{"refused": "ValueError: no such model"}')
    with ProposalEngine.started() as engine:
        for _ in range(2):
            with pytest.raises(VllmRefusedError, match="vLLM refuses: ValueError: no such model"):
                engine.ask(["target"], [[1]], 1)


def test_a_process_that_ends_is_told_with_its_log(fake_proposals: Path) -> None:
    with (
        ProposalEngine.started() as engine,
        pytest.raises(ValueError, match=r"ended by itself: .*did not start"),
    ):
        engine.ask(["target"], [[1]], 1)


class Worker:
    """What vLLM's worker has, as far as the recorder looks."""

    def __init__(self, drafter: Any) -> None:
        self.model_runner = SimpleNamespace(
            drafter=drafter, input_batch=SimpleNamespace(req_ids=["0-a", "1-b"])
        )


class Drafter:
    """Proposes the next two numbers."""

    def propose(self, **given: Any) -> torch.Tensor:
        given["common_attn_metadata"].query_start_loc.zero_()  # vLLM changes what it was given
        return given["next_token_ids"][:, None] + torch.tensor([1, 2])


@pytest.mark.parametrize("several_rows", [False, True])
def test_the_recorder_notes_place_and_token_of_every_request(
    several_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(INSIDE))
    from specdec_recorder import ProposalRecorder

    worker = type("Recording", (ProposalRecorder, Worker), {})(Drafter())
    assert worker.start_recording() is None
    positions = torch.tensor([0, 1, 2, 5, 6])
    given = {
        "target_positions": positions.expand(3, 5) if several_rows else positions,
        "next_token_ids": torch.tensor([10, 20]),
        "common_attn_metadata": SimpleNamespace(query_start_loc=torch.tensor([0, 3, 5])),
    }
    worker.model_runner.drafter.propose(**given, token_indices_to_sample=None)
    worker.model_runner.drafter.propose(**given, token_indices_to_sample=torch.tensor([1, 3]))
    records = worker.take_proposals()
    assert [record["place"] for record in records] == [3, 7, 2, 6]
    assert records[0] == {"request": "0-a", "place": 3, "last": 10, "drafts": [11, 12]}
    assert worker.take_proposals() == []
    assert (
        "no drafter whose proposals"
        in type("Bare", (ProposalRecorder, Worker), {})(None).start_recording()
    )
    sys.modules.pop("specdec_recorder")
