"""The benchmark of a killed sweep in small: real SIGKILLs, and what it says where something differs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faulting.scene import Scene
from benchmarks.sweeping.campaign import Campaign, Swept, _told_of
from benchmarks.sweeping.report import faults, markdown, to_json
from benchmarks.sweeping.results import Compared, compare
from benchmarks.sweeping.scene import jobs
from specdec.files import write_json
from specdec.sweep.job import Job
from specdec.sweep.state import Folder
from tests.benchmarks.test_faults import ABOUT
from tests.sweep.conftest import go as go  # a fixture

WELL = Swept("undisturbed", 0, (), 2, 2, 0, 0, 0, 9.0, 10.0, {
    "workers_seconds": 10.1, "slots_seconds": 10.2, "cpu_seconds": 0.1,
})  # fmt: skip
SAME = Compared("killed", 12, 12, 700, 0, 12, 12)


def test_a_killed_sweep_is_told_of(tmp_path: Path, go: Path) -> None:
    def make(study: Path) -> list[Job]:
        command = ("wait", str(study / "fits" / "a"), str(go))
        return [Job(key="a", kind="fit", label="a", command=command, directory="fits/a", done="done", resumes=True)]

    said: list[str] = []

    def told(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            go.touch()

    campaign = Campaign(tmp_path, make, module="tests.sweep.commands", grace=10.0, told=told)
    found = campaign.killed(["everything", "attempt", "command"])
    assert found.strikes[0].startswith("everything (5 processes) after 0 of 1 jobs") and found.kills == 7
    assert (found.done_once, found.begun_again, found.at_once, found.left_alive) == (1, 3, 0, 0)
    assert faults([found], []) == [] and found.own_seconds > 0
    whole = campaign.undisturbed()
    assert whole.begun_again == 0 and 0 < whole.runner["workers_seconds"] <= whole.runner["slots_seconds"]
    with pytest.raises(RuntimeError, match="ended before it could be killed 1 times"):
        campaign.killed(["everything"])  # all is done already


def test_every_kind_of_fault_is_said() -> None:
    assert faults([WELL], [SAME]) == []
    slow = WELL.runner | {"workers_seconds": 10.4}
    for change in ({"done_once": 1}, {"at_once": 1}, {"left_alive": 2}, {"runner": slow}):
        assert len(faults([WELL._replace(**change)], [])) == 1
    assert faults([WELL._replace(name="killed", runner=slow)], []) == []  # what was killed has no overhead to tell
    for change in ({"weights": 11}, {"differing": 1}, {"losses": 0}, {"answers": 0}):
        assert len(faults([], [SAME._replace(**change)])) == 1
    text = markdown(ABOUT, [WELL], [SAME])
    assert (
        "12 of 12 drafters bit-equal, **0** of 700 losses differ" in text and "**1.0%** of the jobs' own 10 s" in text
    )
    assert to_json(ABOUT, [WELL], [SAME])["sweeps"][0]["overhead"] == pytest.approx(0.01)


def test_attempts_at_one_time_are_seen(tmp_path: Path) -> None:
    one = Job(key="a", kind="fit", label="a", command=("x",), directory="fits/a", done="done")
    folder = Folder.of(tmp_path, one)
    for number, (second, end) in enumerate([("00", "killed"), ("04", "killed"), ("30", "done")], 1):
        folder.note(number, begun=f"2026-01-01T00:00:{second}.000+00:00", host="h", pid=1)
        folder.note(number, end=end, seconds=5.0)
    write_json(tmp_path / "outcome.json", {"seconds": 40.0, "workers_seconds": 16.0})
    (folder.path / "state.json").write_text(json.dumps({
        "state": "done", "attempt": 3, "begun": "2026-01-01T00:00:30.000+00:00",
        "ended": "2026-01-01T00:00:35.000+00:00", "host": "h", "pid": 1, "seconds": 15.0, "status": 0,
        "message": None, "peak_memory_bytes": 1,
    }))  # fmt: skip
    found = _told_of("killed", tmp_path, [one], 0, (), 0, 40.0, 1)
    assert (found.at_once, found.begun_again, found.done_once, found.own_seconds) == (1, 2, 1, 15.0)


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Path]:
    """What two jobs have left."""

    def make(name: str) -> Path:
        for file, text in {
            "fits/a/drafter/model.safetensors": "w",
            "fits/a/csv/version_0/metrics.csv": "step,train/loss\n0,4.25\n1,4.125\n",
            "fits/a/csv/version_1/metrics.csv": "step,train/loss\n1,4.125\n1,\n2,4.0\n",
            "measures/b/answers.jsonl": json.dumps({
                "prompt_id": "1", "growth": "chain", "tokens": 4, "accepted": [1], "drafted": [3], "context": [9],
                "plain_tokens": 4, "identical": True, "seconds": len(name),
            }) + "\n",
        }.items():  # fmt: skip
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / name

    return make


def test_what_differs_between_two_sweeps_is_counted(made: Callable[[str], Path]) -> None:
    base = {"label": "x", "command": ("x",), "done": "done"}
    two = [
        Job(key="a", kind="fit", directory="fits/a", **base),
        Job(key="b", kind="evaluate", directory="measures/b", **base),
    ]
    whole, other = made("whole"), made("other one")
    assert compare("other", two, whole, other) == Compared("other", 1, 1, 4, 0, 1, 1)
    for file, old, new, changed in (
        ("fits/a/drafter/model.safetensors", "w", "v", {"weights": 0}),
        ("fits/a/csv/version_0/metrics.csv", "4.125", "4.126", {"differing": 1}),
        ("fits/a/csv/version_1/metrics.csv", "2,4.0\n", "", {"differing": 1, "losses": 3}),
        ("measures/b/answers.jsonl", "[1]", "[2]", {"answers": 0}),
    ):
        path = other / file
        before = path.read_text()
        path.write_text(before.replace(old, new))
        found = compare("other", two, whole, other)
        assert found == Compared("other", 1, 1, 4, 0, 1, 1)._replace(**changed) and not found.holds
        path.write_text(before)


def test_the_sweep_is_of_twelve_runs(tmp_path: Path) -> None:
    found = jobs(Scene(tmp_path / "target", tmp_path / "text", tmp_path / "features"), tmp_path / "study", 60, 10)
    assert [job.kind for job in found] == ["fit"] * 12 + ["evaluate"] * 12
    assert len({job.command for job in found}) == 24 and all(job.resumes == (job.kind == "fit") for job in found)
