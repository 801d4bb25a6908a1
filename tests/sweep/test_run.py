"""A sweep ends with every job done once or told why not, whatever is killed meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.files import write_json
from specdec.sweep.job import Job
from specdec.sweep.local import Local
from specdec.sweep.run import Entry, Phase, failures, run
from specdec.sweep.state import Folder
from specdec.sweep.worker import Worker
from tests.serving.conftest import LONG, alive, soon
from tests.sweep.conftest import WAY, children, pids

Make = Callable[..., Job]
Runs = Callable[[str], list[list[str]]]


def test_a_failing_job_is_told_and_the_others_go_on(study: Path, job: Make, runs: Runs) -> None:
    jobs = [
        job("score", needs=("fit",), label="arm=good: evaluate"),  # before what it needs
        job("fit"),
        job("bad", "fail", label="arm=bad: fit"),
        job("next", needs=("bad",), label="arm=bad: evaluate"),
        job("last", needs=("next", "fit"), label="arm=bad: drift"),
    ]
    outcome = run(study, jobs, Local(workers=2, cores=2), way=WAY)
    assert outcome.status == 1 and set(outcome.done) == {"score", "fit"} and outcome.left == ()
    assert failures(outcome, {one.key: one for one in jobs}) == [
        "arm=bad: fit: failed: specdec fit: error: the data is wrong",
        "arm=bad: evaluate: not run: needs arm=bad: fit, which failed",
        "arm=bad: drift: not run: needs arm=bad: fit, which failed",
    ]
    assert len(runs("bad")) == 1 and not runs("next")
    again = run(study, [job("bad"), *jobs[:2], *jobs[3:]], Local(cores=2), way=WAY)  # mended
    assert again.status == 0 and len(again.done) == 5
    assert {key: len(runs(key)) for key in ("fit", "score", "bad", "last")} == {
        "fit": 1,
        "score": 1,
        "bad": 2,
        "last": 1,
    }


def test_what_was_lost_is_begun_anew_but_not_for_ever(study: Path, job: Make, runs: Runs) -> None:
    jobs = [job("once", "die", 1), job("always", "die", 99)]
    outcome = run(study, jobs, Local(), way=WAY, retries=2)
    assert outcome.done == ("once",) and outcome.failed == {
        "always": "ended by SIGKILL: was there memory enough?, 3 times in this sweep"
    }
    assert len(runs("once")) == 2 and len(runs("always")) == 3
    run(study, jobs, Local(), way=WAY, retries=0)  # the next sweep counts anew
    assert len(runs("always")) == 4


def test_bounded_by_workers_cores_memory_and_gpus(
    study: Path, job: Make, go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(engine: Local, jobs: list[Job]) -> int:
        engine.open(study, WAY, 0)
        started = 0
        for one in jobs:
            if engine.has_room(one):
                engine._running[one.key] = one, None  # as if it were started
                started += 1
        return started

    jobs = [job(str(n), memory_bytes=4 * 10**9, threads=2) for n in range(8)]
    monkeypatch.setattr("specdec.host.free_memory", lambda: 17 * 10**9)
    monkeypatch.setattr("specdec.host.memory", lambda: 20 * 10**9)
    assert at_once(Local(cores=64), jobs) == 4
    assert at_once(Local(cores=64, memory_gb=9), jobs) == 2
    monkeypatch.setattr("specdec.host.free_memory", lambda: 10**9)
    assert at_once(Local(cores=64), jobs) == 1  # alone, rather than never
    monkeypatch.setattr("specdec.host.free_memory", lambda: 17 * 10**9)
    assert at_once(Local(cores=6), jobs) == 3
    assert at_once(Local(cores=1), jobs) == 1  # all cores there are
    assert at_once(Local(cores=64, workers=2), jobs) == 2
    assert Local().refuses(jobs[0]) == "" and Local().refuses(job("a")) == ""
    outcome = run(study, [job("big", memory_bytes=30 * 10**9), job("small")], Local(), way=WAY)
    assert outcome.failed == {"big": "needs 30.0 GB of memory, of which there are 20.0 GB here"}
    assert outcome.done == ("small",)
    with pytest.raises(ValueError, match="workers of the local engine must be above 0, not 0"):
        Local(workers=0)


def test_every_job_has_a_gpu_of_its_own(study: Path, job: Make) -> None:
    engine = Local(cores=8, gpus=["3", "5"])
    seen: list[list[str]] = []

    def watch(entries: list[Entry], ended: bool) -> None:
        seen.append([entry.job.key for entry in entries if entry.phase is Phase.RUNNING])

    assert run(study, [job(key) for key in "abc"], engine, way=WAY, watch=watch).status == 0
    devices = [(study / "fits" / key / "done").read_text() for key in "abc"]
    assert set(devices[:2]) == {"3", "5"} and devices[2] in ("3", "5")
    assert max(map(len, seen)) <= 2 and engine.describe() == "this machine, 8 cores, 2 GPUs"


def test_ctrl_c_leaves_every_job_to_go_on_with(
    study: Path, job: Make, runs: Runs, go: Path, end: Callable[..., None]
) -> None:
    jobs = [job("a", "wait", go), job("b", "wait", go), job("c", needs=("a",))]
    end(lambda: all((study / "fits" / key / "pids").exists() for key in "ab"), signal.SIGINT)
    outcome = run(study, jobs, Local(cores=2), way=WAY)
    assert outcome.status == 130 and outcome.left == ("a", "b", "c")
    assert not any(alive(pid) for key in "ab" for pid in pids(study, key))
    assert all((study / "fits" / key / "saved").exists() for key in "ab")
    go.touch()
    assert run(study, jobs, Local(cores=2), way=WAY).status == 0
    assert [len(runs(key)) for key in "abc"] == [2, 2, 1]


def test_another_runner_s_jobs_are_waited_for(study: Path, job: Make, runs: Runs, go: Path) -> None:
    jobs = [job("a", "wait", go), job("b")]
    other = Worker(Folder.of(study, jobs[0]).path, WAY)
    pids(study, "a")
    seen: list[Phase] = []

    def watch(entries: list[Entry], ended: bool) -> None:
        seen.append(entries[0].phase)
        if entries[1].phase is Phase.DONE:
            go.touch()

    assert run(study, jobs, Local(), way=WAY, watch=watch).status == 0
    assert seen[0] is Phase.ELSEWHERE and len(runs("a")) == 1
    assert other.wait(LONG) == 0
    other.stop()


SWEEP = """
import sys
from pathlib import Path
from specdec.files import read_json
from specdec.sweep.job import Job
from specdec.sweep.local import Local
from specdec.sweep.run import run
from specdec.sweep.worker import Way

jobs = [Job.from_json(data, "jobs") for data in read_json(sys.argv[2])]
way = Way(Path.cwd(), "tests.sweep.commands", 100.0)
sys.exit(run(Path(sys.argv[1]), jobs, Local(workers=2, cores=2), way=way).status)
"""


@pytest.mark.timeout(900)  # twelve processes are begun, one after the other
def test_killed_sweeps_end_as_undisturbed_ones(study: Path, job: Make, runs: Runs, go: Path, tmp_path: Path) -> None:
    """SIGKILL of the runner, of an attempt, of a keeper and of everything; every job is done exactly once."""
    jobs = [job("a", "wait", go), job("b", "wait", go), *(job(key, needs=("a",)) for key in "cd")]
    write_json(tmp_path / "jobs.json", [one.to_json() for one in jobs])

    def start() -> subprocess.Popen:
        for key in "ab":
            (study / "fits" / key / "pids").unlink(missing_ok=True)
        command = [sys.executable, "-c", SWEEP, str(study), str(tmp_path / "jobs.json")]
        process = subprocess.Popen(command, cwd=WAY.cwd, stderr=subprocess.DEVNULL)
        assert all(pids(study, key) for key in "ab")
        return process

    def everything(process: subprocess.Popen) -> list[int]:
        keepers = children(process.pid)
        under = [pid for keeper in keepers for pid in children(keeper)]
        return [*keepers, *under, *(pid for key in "ab" for pid in pids(study, key))]

    runner = start()
    all_of_it = everything(runner)
    assert len(all_of_it) == 8
    runner.kill()  # alone
    runner.wait()
    assert soon(lambda: not any(map(alive, all_of_it)), LONG)

    runner = start()
    all_of_it = everything(runner)
    for pid in [runner.pid, *all_of_it]:
        with contextlib.suppress(ProcessLookupError):  # those above have taken it with them
            os.kill(pid, signal.SIGKILL)
    runner.wait()
    assert soon(lambda: not any(map(alive, all_of_it)), LONG)

    runner = start()
    keepers = children(runner.pid)
    os.kill(keepers[0], signal.SIGKILL)
    os.kill(children(keepers[1])[0], signal.SIGKILL)
    assert soon(lambda: len(runs("a")) == 4 and len(runs("b")) == 4, LONG)  # the runner begins both anew
    go.touch()
    assert runner.wait(LONG) == 0
    for key in "abcd":
        ends = [one.end for one in Folder(study / "jobs" / key).attempts()]
        assert ends.count("done") == 1 and len(ends) == len(runs(key)) == (4 if key in "ab" else 1)


def test_needs_that_cannot_be(study: Path, job: Make) -> None:
    with pytest.raises(ValueError, match="job a needs b, which is not in the study"):
        run(study, [job("a", needs=("b",))], Local(), way=WAY)
    with pytest.raises(ValueError, match="needs itself"):
        run(study, [job("a", needs=("b",)), job("b", needs=("a",))], Local(), way=WAY)
    assert run(study, [], Local(), way=WAY).status == 0


def test_a_worker_that_cannot_begin_is_told(study: Path, job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.keeper.__file__", "/nowhere/keeper.py")
    outcome = run(study, [job("a")], Local(), way=WAY)
    assert outcome.failed["a"].startswith("its worker did not begin: ") and "/nowhere/keeper.py" in outcome.failed["a"]
    with pytest.raises(ValueError, match=r"directory \.\./b does not lie in the study"):
        run(study, [job("b", directory="../b")], Local(), way=WAY)
