"""One job is run once, whoever works on it, and no process outlives what it belongs to."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.sweep import attempt
from specdec.sweep.job import Job
from specdec.sweep.state import Folder
from specdec.sweep.worker import Worker, main, work
from tests.serving.conftest import LONG, alive, soon
from tests.sweep.conftest import WAY, children, pids

Make = Callable[..., Job]
Runs = Callable[[str], list[list[str]]]


def gone(processes: list[int]) -> bool:
    return soon(lambda: not any(map(alive, processes)), LONG)


def test_a_job_is_done_once(study: Path, job: Make, runs: Runs) -> None:
    folder = Folder.of(study, job("a", threads=3))
    assert work(folder.path, WAY) == 0 and work(folder.path, WAY) == 0
    assert [words[::2] for words in runs("a")] == [["write", "3"]]  # with its threads
    state = folder.state()
    assert state is not None and (state.state, state.attempt, state.status, state.message) == ("done", 1, 0, None)
    assert state.seconds and state.ended and state.begun < state.ended and state.peak_memory_bytes > 10**6
    assert [(one.number, one.end, one.status) for one in folder.attempts()] == [(1, "done", 0)]
    assert "attempt 1" in folder.log.read_text() and not folder.is_held()


def test_an_error_is_told_and_tried_again_when_asked(study: Path, job: Make) -> None:
    folder = Folder.of(study, job("a", "fail"))
    assert work(folder.path, WAY) == 1
    state = folder.state()
    assert state is not None and (state.state, state.status) == ("failed", 2)
    assert state.message == "specdec fit: error: the data is wrong"
    assert work(Folder.of(study, job("b", "empty")).path, WAY) == 1
    assert Folder(study / "jobs" / "b").state().message == "ended well, but made no fits/b/done"


def test_two_workers_at_one_job(study: Path, job: Make, runs: Runs, go: Path, capsys: pytest.CaptureFixture) -> None:
    folder = Folder.of(study, job("a", "wait", go))
    first = Worker(folder.path, WAY)
    pids(study, "a")
    assert folder.is_held() and work(folder.path, WAY) == attempt.BUSY
    go.touch()
    assert first.wait(LONG) == 0 and len(runs("a")) == 1 and len(folder.attempts()) == 1
    first.stop()
    assert main([str(folder.path)]) == 0 and capsys.readouterr().err.endswith(f"{folder.path}: done\n")


@pytest.mark.parametrize("victim", ["keeper", "attempt", "command", "starter"])
def test_nothing_outlives_a_killed_process(study: Path, job: Make, runs: Runs, go: Path, victim: str) -> None:
    """The next worker has the job as soon as all of the killed one is gone, and not before."""
    folder = Folder.of(study, job("a", "wait", go))
    worker = Worker(folder.path, WAY)
    command, child = pids(study, "a")
    keeper = worker._keeper.pid
    (under,) = children(keeper)
    assert children(under) == [command] and child in children(command)
    if victim == "starter":
        worker.stop()  # the kernel closes what it held
    else:
        os.kill({"keeper": keeper, "attempt": under, "command": command}[victim], signal.SIGKILL)
    assert worker.wait(LONG) != 0 and gone([keeper, under, command, child])
    worker.stop()
    assert soon(lambda: not folder.is_held(), LONG)
    go.touch()
    assert work(folder.path, WAY) == 0 and len(runs("a")) == 2
    ends = {"keeper": "stopped", "attempt": "killed", "command": "died", "starter": "stopped"}
    assert [one.end for one in folder.attempts()] == [ends[victim], "done"]
    assert (study / "fits" / "a" / "saved").exists() == (victim in ("keeper", "starter"))
    state = folder.state()
    assert state is not None and state.seconds == pytest.approx(sum(one.seconds for one in folder.attempts()))


def test_a_worker_that_is_asked_to_end_says_so(
    study: Path, job: Make, go: Path, end: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.of(study, job("a", "wait", go))
    monkeypatch.setattr("specdec.sweep.worker.Way", lambda cwd, grace: WAY)
    end(lambda: (study / "fits" / "a" / "pids").exists(), signal.SIGINT)
    assert main([str(folder.path)]) == 130
    state = folder.state()
    assert state is not None and (state.state, state.status, state.message) == ("stopped", 143, None)
    assert (study / "fits" / "a" / "saved").exists()


def test_what_a_killed_attempt_left_is_removed_where_it_does_not_go_on(study: Path, job: Make, go: Path) -> None:
    folder = Folder.of(study, job("a", resumes=False))
    rest = study / "fits" / "a" / "half"
    rest.parent.mkdir(parents=True)
    rest.write_text("")
    assert work(folder.path, WAY) == 1 and rest.exists()
    assert "no attempt at this job has made it" in folder.state().message
    assert work(folder.path, WAY) == 0 and not rest.exists()
    outside = Folder.of(study, job("b", directory="../b"))
    assert work(outside.path, WAY) == 1 and "does not lie in the study" in outside.log.read_text()


def test_an_attempt_that_was_killed_after_its_work_is_done(study: Path, job: Make, runs: Runs) -> None:
    """Between the work's last file and the note of it."""
    one = job("a")
    folder = Folder.of(study, one)
    folder.note(1, begun="2026-01-01T00:00:00.000+00:00", host="h", pid=1)
    with (folder.path / "attempts.jsonl").open("a") as stream:
        stream.write('{"attempt": 1, "en')  # cut short
    folder.output(one).mkdir(parents=True)
    (folder.output(one) / "done").touch()
    with folder.locked():
        attempt.settle(folder, one)
        assert folder.state() is None  # somebody else has it
    os.utime(folder.path / "lock", (0, 1767225600 + 60))  # a minute later
    attempt.settle(folder, one)
    attempt.settle(folder, one)
    assert [(found.end, found.seconds) for found in folder.attempts()] == [("done", 60.0)]
    assert folder.state().state == "done" and folder.state().seconds == 60.0
    assert work(folder.path, WAY) == 0 and runs("a") == []


def test_a_folder_without_locks_is_refused(study: Path, job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.of(study, job("a"))

    def none(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("specdec.shared.fcntl.flock", none)
    with pytest.raises(ValueError, match=r"no locks .*put the study elsewhere"), folder.locked():
        pass


def test_a_state_of_something_else_is_refused(study: Path, job: Make) -> None:
    folder = Folder.of(study, job("a"))
    (folder.path / "state.json").write_text(json.dumps({"state": "done"}))
    with pytest.raises(ValueError, match=r"state.json: not the state of a job"):
        folder.state()
