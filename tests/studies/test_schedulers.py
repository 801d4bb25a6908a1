"""The same sweep under Ray on this machine, and through submitit, whose local executor stands for SLURM."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from specdec.studies.schedulers import Ray, Slurm, Task
from specdec.studies.sweep import Phase, SweepJob, run_jobs
from specdec.studies.worker import JobFolder
from specdec.utils.cluster import LOCAL
from tests.engines.conftest import alive
from tests.studies.conftest import ROOT, MakeJob, Runs, parent, phases, pids

# a sweep imports it first
with_ray = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="no ray")


@with_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_killed_ray_worker_is_replaced_and_ctrl_c_ends_all(
    study: Path, job: MakeJob, runs: Runs, go: Path, tmp_path: Path
) -> None:
    jobs = [
        job("a", "wait", go, kind="evaluate"), job("b", "fail"), job("c", needs=("a",)), job("d", needs=("b",)),
        job("long", "wait", tmp_path / "never"),
    ]  # fmt: skip
    killed: list[int] = []

    def watch(entries: Collection[SweepJob]) -> None:
        if not killed and (study / "measures" / "a" / "pids").exists():
            command, child = pids(study, "a")
            supervisor = parent(command)
            worker = parent(supervisor)
            assert b"ray::" in Path(f"/proc/{worker}/cmdline").read_bytes()
            killed.extend([worker, supervisor, command, child])
            os.kill(worker, signal.SIGKILL)
        if len(runs("a")) == 2:
            go.touch()
        phases = {entry.job.key: entry.phase for entry in entries}
        if [phases[key] for key in "acd"] == [Phase.DONE, Phase.DONE, Phase.NOT_RUN] and pids(
            study, "long"
        ):
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run_jobs(study, jobs, Ray(), watch=watch)
    assert killed and not any(map(alive, killed))
    told = {
        "a": Phase.DONE,
        "b": Phase.FAILED,
        "c": Phase.DONE,
        "d": Phase.NOT_RUN,
        "long": Phase.RUNNING,
    }
    assert outcome[0] == 130 and phases(outcome) == told
    assert outcome[1]["b"].message == "specdec fit: error: the data is wrong"
    assert [one["end"] for one in JobFolder(study, "evaluate", "a").attempts()] == [
        "killed",
        "done",
    ]
    assert len(runs("a")) == 2 and len(runs("c")) == 1
    assert not any(map(alive, pids(study, "long"))) and (study / "fits" / "long" / "saved").exists()


@pytest.mark.slow
def test_jobs_are_submitted_and_ended(
    study: Path, job: MakeJob, runs: Runs, go: Path, end: Callable[..., None]
) -> None:
    pytest.importorskip("submitit")
    jobs, engine = (
        [job("a", threads=2), job("b", "wait", go, needs=("a",))],
        Slurm(cluster="local", minutes=10),
    )
    end(lambda: (study / "fits" / "b" / "pids").exists(), signal.SIGTERM)
    outcome = run_jobs(study, jobs, engine)
    assert outcome[0] == 143 and phases(outcome) == {"a": Phase.DONE, "b": Phase.RUNNING}
    assert not any(map(alive, pids(study, "b"))) and (study / "fits" / "b" / "saved").exists()
    go.touch()
    again = run_jobs(study, [*jobs, job("c", "fail")], engine)
    assert phases(again) == {"a": Phase.DONE, "b": Phase.DONE, "c": Phase.FAILED}
    assert again[1]["c"].message == "specdec fit: error: the data is wrong"
    assert [len(runs(key)) for key in "abc"] == [1, 2, 1]


def test_what_sbatch_is_told(
    study: Path, job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(ValueError, match="there is no sbatch here"):
        Slurm().open(study)
    for name, line in (
        ("srun", ""), ("scancel", f"touch {tmp_path}/cancelled"),
        ("sacct", f"echo 'JobID|State'; [ -e {tmp_path}/cancelled ] && echo '12|CANCELLED' || echo '12|RUNNING'"),
        ("sbatch", f"cp $1 {tmp_path}/batch; echo Submitted batch job 12"),
    ):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = Slurm(partition="gpu", minutes=60, gpus=1, more={"constraint": "h100", "mem": "2G"})
    slurm.open(study)
    one = job("a", threads=4)
    slurm.running[one.key] = slurm.submit(one)
    assert slurm.ended(0) == {}
    words = (tmp_path / "batch").read_text().split()
    for word in (
        "--job-name=specdec-a", "--cpus-per-task=4", "--gpus-per-node=1", "--mem=2G", "--time=60", "--partition=gpu",
        "--constraint=h100", "--nodes=1", "--ntasks-per-node=1",
    ):  # fmt: skip
        assert word in words, words
    slurm.close()
    assert (tmp_path / "cancelled").exists()
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho sbatch: error: invalid partition specified: gpu >&2; exit 1\n"
    )
    with pytest.raises(
        ValueError, match="SLURM does not take arm=a seed=0: fit: sbatch: error: invalid partition"
    ):
        slurm.submit(one)
    again = Task().checkpoint("study", one, ROOT)
    assert isinstance(again.function, Task) and again.args == ("study", one, ROOT)


@with_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_ray_of_this_machine_listens_to_nobody_else(study: Path) -> None:
    code = """
import sys
from pathlib import Path
from specdec.studies.schedulers import Ray

def listening():
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A"}

before, engine = listening(), Ray()
engine.open(Path(sys.argv[1]))
try:
    found = {address.split(":")[0] for address in listening() - before}
finally:
    engine.close()
print(*found)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(study)], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert found and set(found) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1


@with_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_ray_that_would_listen_everywhere_is_refused(study: Path) -> None:
    code = "import sys, ray; from pathlib import Path; from specdec.studies.schedulers import Ray; "
    code += "engine = Ray(); engine.open(Path(sys.argv[1])); engine.close()"
    environment = {name: value for name, value in os.environ.items() if name != LOCAL}
    done = subprocess.run(
        [sys.executable, "-c", code, str(study)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: Ray was imported before") and f"{LOCAL}=0" in last
