"""The same sweep through submitit, whose local executor stands for SLURM."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.sweep.job import Job
from specdec.sweep.run import run
from specdec.sweep.slurm import Slurm, Task
from specdec.sweep.state import Folder
from tests.serving.conftest import alive
from tests.sweep.conftest import WAY, pids

submitit = pytest.importorskip("submitit")
Make = Callable[..., Job]


def engine() -> Slurm:
    return Slurm(cluster="local", minutes=10, at_once=2)


def test_jobs_are_submitted_and_ended(
    study: Path, job: Make, runs: Callable, go: Path, end: Callable[..., None]
) -> None:
    jobs = [job("a", threads=2), job("b", "wait", go, needs=("a",))]
    end(lambda: (study / "fits" / "b" / "pids").exists(), signal.SIGTERM)
    outcome = run(study, jobs, engine(), way=WAY)
    assert outcome.status == 143 and outcome.done == ("a",) and outcome.left == ("b",)
    assert not any(map(alive, pids(study, "b"))) and (study / "fits" / "b" / "saved").exists()
    go.touch()
    again = run(study, [*jobs, job("c", "fail")], engine(), way=WAY)
    assert again.done == ("a", "b") and again.failed == {"c": "specdec fit: error: the data is wrong"}
    assert [len(runs(key)) for key in "abc"] == [1, 2, 1]
    assert [one.end for one in Folder(study / "jobs" / "b").attempts()] == ["stopped", "done"]


def test_what_sbatch_is_told(study: Path, job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (
        ("srun", ""), ("scancel", f"touch {tmp_path}/cancelled"),
        ("sacct", f"echo 'JobID|State'; [ -e {tmp_path}/cancelled ] && echo '12|CANCELLED' || echo '12|RUNNING'"),
        ("sbatch", f"cp $1 {tmp_path}/batch; echo Submitted batch job 12"),
    ):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = Slurm(partition="gpu", minutes=60, gpus=1, at_once=1, more={"constraint": "h100"}).open(study, WAY, 3)
    one = job("a", threads=4, memory_bytes=10**9 + 1)
    assert slurm.has_room(one) and slurm.refuses(one) == "" and slurm.describe() == "SLURM, partition gpu"
    slurm.start(Folder.of(study, one).path, one)
    assert not slurm.has_room(one) and slurm.ended(0) == []
    words = (tmp_path / "batch").read_text().split()
    for word in (
        "--job-name=specdec-a", "--cpus-per-task=4", "--gpus-per-node=1", "--mem=2GB", "--time=60", "--partition=gpu",
        "--constraint=h100", "--nodes=1", "--ntasks-per-node=1",
    ):  # fmt: skip
        assert word in words, words
    slurm.close()
    assert (tmp_path / "cancelled").exists()
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: gpu >&2; exit 1\n")
    with pytest.raises(ValueError, match="SLURM does not take arm=a seed=0: fit: sbatch: error: invalid partition"):
        slurm.start(Folder.of(study, one).path, one)
    again = Task().checkpoint("folder", WAY)
    assert isinstance(again.function, Task) and again.args == ("folder", WAY)


def test_without_slurm(study: Path) -> None:
    with pytest.raises(ValueError, match="there is no sbatch here"):
        Slurm().open(study, WAY, 0)
    with pytest.raises(ValueError, match="at_once of the SLURM engine must be above 0"):
        Slurm(at_once=0)
