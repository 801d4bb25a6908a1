"""A run's directory is its own; the claim, the names, and who cleans up."""

import errno
import os
import threading
from pathlib import Path

import pytest

from specdec.compose import new_run, run_names
from specdec.training import run_directory
from specdec.training.callbacks import RunRecord
from specdec.training.run_directory import CLAIM, RunDirectory, is_first


def tree(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def fail(directory: RunDirectory) -> None:
    with pytest.raises(ZeroDivisionError), directory:
        raise ZeroDivisionError


@pytest.mark.parametrize("made", [False, True])
def test_one_run_has_a_directory_and_the_other_deletes_nothing_of_it(tmp_path: Path, made: bool) -> None:
    """The first has written nothing yet; the second fails before its first step."""
    out = tmp_path / "some" / "run"
    if made:
        out.mkdir(parents=True)
    with RunDirectory() as first:
        assert first.choose(str(out)) == out
        second = RunDirectory()
        with pytest.raises(ValueError, match=r"run is claimed by another run[^\n]*choose another --out"), second:
            second.choose(str(out))
        assert tree(out) == {CLAIM}
        (out / "config.yaml").write_text("a")
        fail(second)
        assert tree(out) == {CLAIM, "config.yaml"}
    assert tree(out) == {"config.yaml"}


@pytest.mark.parametrize("made", [False, True])
def test_a_failed_run_leaves_the_directory_as_it_was(tmp_path: Path, made: bool) -> None:
    out = tmp_path / "run"
    if made:
        out.mkdir()
    directory = RunDirectory()
    directory.choose(str(out))
    (out / "csv" / "version_0").mkdir(parents=True)
    (out / "csv" / "version_0" / "metrics.csv").write_text("a")
    (out / "config.yaml").write_text("a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "text").write_text("a")
    (out / "link").symlink_to(tmp_path / "elsewhere")
    fail(directory)
    assert (tree(out) == set()) if made else not out.exists()
    assert tree(tmp_path / "elsewhere") == {"text"}
    with RunDirectory() as corrected:
        corrected.choose(str(out))


def test_what_was_trained_is_kept(tmp_path: Path) -> None:
    out, directory = tmp_path / "run", RunDirectory()
    directory.choose(str(out))
    directory.record = RunRecord(out, "", {})
    directory.record.trained = True
    (out / "config.yaml").write_text("a")
    fail(directory)
    assert tree(out) == {"config.yaml"}


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_resumed_run_finds_is_claimed_and_kept(tmp_path: Path, begun: bool) -> None:
    """All but what killed saves have left, and the claim of the killed run, which is void."""
    out = tmp_path / "run"
    (out / "checkpoints" / ".tmp-sharded").mkdir(parents=True)
    kept = {"config.yaml", "checkpoints", *(["checkpoints/last.ckpt"] if begun else [])}
    for name in (*kept - {"checkpoints"}, CLAIM, "checkpoints/.tmp-1", "checkpoints/.tmp-sharded/part", ".tmp-2"):
        (out / name).write_text("a")
    with pytest.raises(ValueError, match=r"never overwritten: .* --ckpt_path auto$"):
        RunDirectory().choose(str(out))
    assert ".tmp-2" in tree(out)  # this run was not its
    directory = RunDirectory()
    assert directory.choose(str(out), resumes=True) == out
    assert tree(out) == {CLAIM, *kept}
    with pytest.raises(ValueError, match=rf"run is claimed by another run \(process {os.getpid()} on "):
        RunDirectory().choose(str(out))
    fail(directory)
    assert tree(out) == kept


def test_a_resumed_run_waits_for_no_living_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "PATIENCE", 0.2)
    with RunDirectory() as first:
        first.choose(str(tmp_path / "run"))
        (tmp_path / "run" / ".tmp-1").touch()
        with pytest.raises(ValueError, match="claimed by another run"):
            RunDirectory().choose(str(tmp_path / "run"), resumes=True)
        assert tree(tmp_path / "run") == {CLAIM, ".tmp-1"}


def test_a_run_that_was_killed_before_it_wrote_anything_leaves_the_directory_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CLAIM).write_text("process 1 on mars")
    with RunDirectory() as directory:
        directory.choose(str(tmp_path / "run"))
    assert tree(tmp_path / "run") == set()


def test_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file exists already and is never overwritten"):
        RunDirectory().choose(str(tmp_path / "file"))
    with pytest.raises(ValueError, match="run: a part of the path is a file"):
        RunDirectory().choose(str(tmp_path / "file" / "run"))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, mode: str) -> None:
        raise OSError(errno.ENOSPC, "full", str(self))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ValueError, match="run: no space left"):
        RunDirectory().choose(str(tmp_path / "run"))
    assert tree(tmp_path) == set()


def test_a_whole_run_between_the_look_and_the_claim_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, looked = tmp_path / "run", []
    inner = run_directory._holds_something

    def slow(path: Path) -> bool:
        found = inner(path)
        looked.append(path)
        if len(looked) == 1:  # within the claim
            (out / "DONE.json").touch()
        return found

    monkeypatch.setattr(run_directory, "_holds_something", slow)
    directory = RunDirectory()
    with pytest.raises(ValueError, match="never overwritten"), directory:
        directory.choose(str(out))
    assert tree(out) == {"DONE.json"}


def test_runs_started_together_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_RUNS", str(tmp_path))
    names = [tmp_path / name for name in ("fit-1", "fit-1-2", "fit-1-3", "fit-1-4")]
    monkeypatch.setattr(run_directory, "run_names", lambda kind: iter(names))
    names[1].mkdir()
    (names[1] / "precious").touch()
    barrier, found, directories = threading.Barrier(3), [], [RunDirectory() for _ in range(3)]

    def start(directory: RunDirectory) -> None:
        barrier.wait()
        found.append(directory.choose(None))

    threads = [threading.Thread(target=start, args=[each]) for each in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [names[0], *names[2:]]
    for directory in directories:
        fail(directory)
    assert tree(names[1]) == {"precious"}


def test_a_name_of_the_same_second_has_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_RUNS", str(tmp_path))
    names = run_names("evaluate")
    first, second = next(names), next(names)
    assert second.name == f"{first.name}-2"
    for _ in range(3):
        new_run("evaluate").mkdir()


def test_the_other_processes_of_a_job_share_the_firsts(tmp_path: Path) -> None:
    with RunDirectory() as first:
        first.choose(str(tmp_path / "run"))
        other = RunDirectory()
        assert other.choose(str(tmp_path / "run"), first=False) == tmp_path / "run"
        fail(other)
        assert tree(tmp_path / "run") == {CLAIM}


@pytest.mark.parametrize(
    ("environment", "devices", "first"),
    [
        ({}, 2, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, 2, True),  # torchrun
        ({"RANK": "1", "LOCAL_RANK": "1"}, 2, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, 2, False),  # of a second node
        ({"LOCAL_RANK": "1"}, "2", False),  # Lightning's own
        ({"NODE_RANK": "1"}, 2, False),
        ({"SLURM_PROCID": "3"}, "auto", False),
        ({"SLURM_PROCID": "3"}, 1, True),  # a job of its own among several
    ],
)
def test_the_first_process_of_a_job(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], devices: object, first: bool
) -> None:
    for name in (*run_directory.RANKS, "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    assert is_first(devices, 1) == first
