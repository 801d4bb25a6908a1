"""Every job is done once or told why not, whatever is killed meanwhile, and no process outlives what it belongs to."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from specdec.studies.schedulers import Local
from specdec.studies.sweep import Phase, SweepJob, run_jobs
from specdec.studies.worker import Job, JobFolder, run_job
from specdec.utils.files import write_json
from specdec.utils.journal import Journal
from tests.engines.conftest import LONG, alive, soon
from tests.studies.conftest import ROOT, MakeJob, Runs, children, parent, phases, pids


class Worker:
    """Works at a job in a thread."""

    def __init__(self, study: Path, job: Job) -> None:
        self.stop, self.found = threading.Event(), list[tuple[str, str | None]]()
        self.thread = threading.Thread(
            target=lambda: self.found.append(run_job(study, job, ROOT, {}, self.stop))
        )
        self.thread.start()

    def end(self) -> str:
        self.thread.join(LONG)
        return self.found[0][0]


def test_a_job_is_done_once(study: Path, job: MakeJob, runs: Runs) -> None:
    one = job("a", threads=3)
    assert run_job(study, one, ROOT) == run_job(study, one, ROOT) == ("done", None)
    assert [words[::2] for words in runs("a")] == [["write", "3"]]  # with its threads
    folder = JobFolder(study, "fit", "a")
    (attempt,) = folder.attempts()
    assert attempt["end"] == "done" and attempt["seconds"] and not folder.is_held()
    assert "attempt 1" in (folder.path / "log.txt").read_text()


def test_an_error_is_told(study: Path, job: MakeJob) -> None:
    assert run_job(study, job("a", "fail"), ROOT) == (
        "failed",
        "specdec fit: error: the data is wrong",
    )
    assert run_job(study, job("b", "empty"), ROOT) == (
        "failed",
        f"ended well, but made no {study}/fits/b/DONE.json",
    )


def test_two_workers_at_one_job(study: Path, job: MakeJob, runs: Runs, go: Path) -> None:
    one = job("a", "wait", go)
    first = Worker(study, one)
    pids(study, "a")
    assert JobFolder(study, "fit", "a").is_held() and run_job(study, one, ROOT) == ("busy", None)
    go.touch()
    assert first.end() == "done" and len(runs("a")) == 1


VICTIMS = [pytest.param("supervisor"), pytest.param("command", marks=pytest.mark.slow), "worker"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_outlives_a_killed_process(
    study: Path, job: MakeJob, runs: Runs, go: Path, victim: str
) -> None:
    """The next worker has the job as soon as all of the killed one is gone, and not before."""
    one = job("a", "wait", go)
    first = Worker(study, one)
    command, child = pids(study, "a")
    supervisor = parent(command)
    assert children(supervisor) == [command] and child in children(command)
    if victim == "worker":
        first.stop.set()
    else:
        os.kill({"supervisor": supervisor, "command": command}[victim], signal.SIGKILL)
    assert first.end() == ("stopped" if victim == "worker" else "died")
    assert soon(lambda: not any(map(alive, [supervisor, command, child])), LONG)
    assert not JobFolder(study, "fit", "a").is_held()
    assert (study / "fits" / "a" / "saved").exists() == (victim != "command")
    go.touch()
    assert run_job(study, one, ROOT) == ("done", None) and len(runs("a")) == 2


def test_what_a_killed_attempt_left_is_removed_where_it_does_not_go_on(
    study: Path, job: MakeJob
) -> None:
    rest = study / "measures" / "a" / "half"
    assert run_job(study, job("a", "fail", kind="evaluate"), ROOT)[0] == "failed"
    rest.write_text("")
    assert run_job(study, job("a", kind="evaluate"), ROOT)[0] == "done" and not rest.exists()


def test_an_attempt_that_was_killed_after_its_work_is_done(
    study: Path, job: MakeJob, runs: Runs
) -> None:
    """Between the work's last file and the note of it."""
    one, folder = job("a"), JobFolder(study, "fit", "a")
    with Journal(folder.path / "attempts.jsonl", "specdec.job", {"key": "a"}) as journal:
        journal.append({"begun": "2026-01-01T00:00:00.000+00:00", "host": "h"})
    with (folder.path / "attempts.jsonl").open("a") as stream:
        stream.write('{"en')  # cut short
    folder.output.mkdir(parents=True)
    folder.last_file.touch()
    assert run_job(study, one, ROOT) == ("done", None) and runs("a") == []
    assert [found["end"] for found in folder.attempts()] == ["done"]


def test_a_failing_job_is_told_and_the_others_go_on(study: Path, job: MakeJob, runs: Runs) -> None:
    jobs = [
        job("score", needs=("fit",), label="arm=good: evaluate"),  # before what it needs
        job("fit"),
        job("bad", "fail", label="arm=bad: fit"),
        job("next", needs=("bad",), label="arm=bad: evaluate"),
        job("last", needs=("next", "fit"), label="arm=bad: drift"),
    ]
    outcome = run_jobs(study, jobs, Local(workers=2))
    assert outcome[0] == 1 and phases(outcome) == {
        "score": Phase.DONE, "fit": Phase.DONE, "bad": Phase.FAILED, "next": Phase.NOT_RUN, "last": Phase.NOT_RUN,
    }  # fmt: skip
    assert {key: one.message for key, one in outcome[1].items() if one.message} == {
        "bad": "specdec fit: error: the data is wrong",
        "next": "needs arm=bad: fit, which failed",
        "last": "needs arm=bad: fit, which failed",
    }
    again = run_jobs(study, [job("bad"), *jobs[:2], *jobs[3:]], Local(workers=2))  # mended
    assert again[0] == 0 and set(phases(again).values()) == {Phase.DONE}
    assert [len(runs(key)) for key in ("fit", "score", "bad", "last")] == [1, 1, 2, 1]


def test_what_was_lost_is_begun_anew_but_not_for_ever(
    study: Path, job: MakeJob, runs: Runs
) -> None:
    jobs = [job("once", "die", 1), job("always", "die", 99)]
    outcome = run_jobs(study, jobs, Local())
    message = "ended by SIGKILL: was there memory enough?, 4 times in this sweep"
    assert phases(outcome) == {"once": Phase.DONE, "always": Phase.FAILED}
    assert (
        outcome[1]["always"].message == message
        and len(runs("once")) == 2
        and len(runs("always")) == 4
    )


def test_bounded_by_workers_cores_and_gpus(
    study: Path, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(engine: Local) -> int:
        engine.open(study)
        for number in range(8):
            if engine.has_room(one := job(str(number), threads=2)):
                engine.running[one.key] = None
        return len(engine.running)

    monkeypatch.setattr("specdec.utils.machine.cores", lambda: 6)
    assert (
        at_once(Local()) == 3 and at_once(Local(workers=5)) == 5 and at_once(Local(gpus=["3"])) == 1
    )
    assert (
        at_once(Local(workers=1, gpus=["3", "4"])) == 1
        and at_once(Local(workers=9, gpus=["3", "4"])) == 2
    )
    monkeypatch.setattr("specdec.utils.machine.cores", lambda: 1)
    assert at_once(Local()) == 1  # all cores there are
    assert run_jobs(study, [job("a"), job("b")], Local(gpus=["5"]))[0] == 0
    assert (study / "fits" / "b" / "DONE.json").read_text() == "5"
    with pytest.raises(ValueError, match=r"Local\.workers must be at least 1, not 0"):
        Local(workers=0)


def test_ctrl_c_leaves_every_job_to_go_on_with(
    study: Path, job: MakeJob, runs: Runs, go: Path, end: Callable[..., None]
) -> None:
    jobs = [job("a", "wait", go), job("b", "wait", go), job("c", needs=("a",))]
    end(lambda: all((study / "fits" / key / "pids").exists() for key in "ab"), signal.SIGINT)
    outcome = run_jobs(study, jobs, Local(workers=2))
    assert outcome[0] == 130 and set(phases(outcome).values()) == {Phase.RUNNING, Phase.WAITING}
    assert not any(alive(pid) for key in "ab" for pid in pids(study, key))
    assert all((study / "fits" / key / "saved").exists() for key in "ab")
    go.touch()
    assert run_jobs(study, jobs, Local(workers=2))[0] == 0
    assert [len(runs(key)) for key in "abc"] == [2, 2, 1]


def test_another_runner_s_jobs_are_waited_for(
    study: Path, job: MakeJob, runs: Runs, go: Path
) -> None:
    jobs = [job("a", "wait", go), job("b")]
    other = Worker(study, jobs[0])
    pids(study, "a")
    seen: list[Phase] = []

    def watch(entries: Collection[SweepJob]) -> None:
        first, second = entries
        seen.append(first.phase)
        if second.phase is Phase.DONE:
            go.touch()

    assert run_jobs(study, jobs, Local(), watch=watch)[0] == 0
    assert seen[0] is Phase.WAITING and len(runs("a")) == 1 and other.end() == "done"


SWEEP = """
import sys
from pathlib import Path
from specdec.utils.reading import read_json
from specdec.studies.schedulers import Local
from specdec.studies.sweep import run_jobs
from specdec.studies.worker import Job

jobs = [Job(**data | {"command": tuple(data["command"])}) for data in read_json(sys.argv[2])]
sys.exit(run_jobs(Path(sys.argv[1]), jobs, Local(workers=2))[0])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # twelve processes are begun, one after the other
def test_killed_sweeps_end_as_undisturbed_ones(
    study: Path, job: MakeJob, runs: Runs, go: Path, tmp_path: Path
) -> None:
    """SIGKILL of the runner, of everything, and of a supervisor and a command; every job is done exactly once."""
    jobs = [job("a", "wait", go), job("b", "wait", go), *(job(key, needs=("a",)) for key in "cd")]
    write_json(tmp_path / "jobs.json", [dataclasses.asdict(one) for one in jobs])

    def start() -> tuple[subprocess.Popen, list[int]]:
        for key in "ab":
            (study / "fits" / key / "pids").unlink(missing_ok=True)
        command = [sys.executable, "-c", SWEEP, str(study), str(tmp_path / "jobs.json")]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        below = [pid for key in "ab" for pid in pids(study, key)]
        return process, [*children(process.pid), *below]

    runner, all_of_it = start()
    assert len(all_of_it) == 6
    runner.kill()  # alone
    runner.wait()
    assert soon(lambda: not any(map(alive, all_of_it)), LONG)

    runner, all_of_it = start()
    for pid in [runner.pid, *all_of_it]:
        with contextlib.suppress(ProcessLookupError):  # those above have taken it with them
            os.kill(pid, signal.SIGKILL)
    runner.wait()
    assert soon(lambda: not any(map(alive, all_of_it)), LONG)

    runner, all_of_it = start()
    os.kill(all_of_it[0], signal.SIGKILL)  # a supervisor
    os.kill(pids(study, "b")[0], signal.SIGKILL)
    # the runner begins both anew
    assert soon(lambda: len(runs("a")) == 4 and len(runs("b")) == 4, LONG)
    go.touch()
    assert runner.wait(LONG) == 0
    for key in "abcd":
        ends = [one["end"] for one in JobFolder(study, "fit", key).attempts()]
        assert ends.count("done") == 1 and len(ends) == len(runs(key)) == (4 if key in "ab" else 1)
