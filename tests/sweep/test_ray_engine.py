"""The same sweep under Ray on this machine."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specdec.sweep.job import Job
from specdec.sweep.ray_engine import Ray
from specdec.sweep.run import Entry, Phase, run
from specdec.sweep.state import Folder
from tests.serving.conftest import alive
from tests.sweep.conftest import WAY, pids

pytest.importorskip("ray")
Make = Callable[..., Job]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_killed_ray_worker_is_replaced_and_ctrl_c_ends_all(
    study: Path, job: Make, runs: Callable, go: Path, tmp_path: Path
) -> None:
    jobs = [
        job("a", "wait", go, resumes=False), job("b", "fail"), job("c", needs=("a",)), job("d", needs=("b",)),
        job("big", memory_bytes=10**16), job("long", "wait", tmp_path / "never"),
    ]  # fmt: skip
    killed: list[int] = []

    def watch(entries: Sequence[Entry], ended: bool) -> None:
        if not killed and (study / "fits" / "a" / "pids").exists():
            command, child = pids(study, "a")
            under = parent(command)
            worker = parent(parent(under))
            assert b"ray::" in Path(f"/proc/{worker}/cmdline").read_bytes()
            killed.extend([worker, parent(under), under, command, child])
            os.kill(worker, signal.SIGKILL)
        if len(runs("a")) == 2:
            go.touch()
        phases = {entry.job.key: entry.phase for entry in entries}
        if [phases[key] for key in "acd"] == [Phase.DONE, Phase.DONE, Phase.NOT_RUN] and pids(study, "long"):
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(study, jobs, Ray(cores=2), way=WAY, watch=watch)
    assert killed and not any(map(alive, killed))
    assert (
        outcome.status == 130
        and outcome.left == ("long",)
        and set(outcome.done) == {"a", "c"}
        and set(outcome.not_run) == {"d"}
    )
    assert outcome.failed == {
        "b": "specdec fit: error: the data is wrong",
        "big": "needs 10000000.0 GB of memory, which no node of the Ray cluster has",
    }
    assert [one.end for one in Folder(study / "jobs" / "a").attempts()] == ["stopped", "done"]
    assert len(runs("a")) == 2 and len(runs("c")) == 1
    assert [one.end for one in Folder(study / "jobs" / "long").attempts()] == ["stopped"]
    assert not any(map(alive, pids(study, "long"))) and (study / "fits" / "long" / "saved").exists()


def test_without_tasks_it_waits_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("specdec.sweep.ray_engine.time.sleep", slept.append)
    assert Ray().ended(0.5) == [] and slept == [0.5]


def test_cores_of_a_cluster_that_runs_are_its_own() -> None:
    with pytest.raises(ValueError, match="leave them or the address out"):
        Ray(address="auto", cores=2)
