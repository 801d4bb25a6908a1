"""A run's directory is its own; the claim, the names, and who cleans up."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.training import run_directory
from specdec.training.run_directory import CLAIM, RunDirectory, is_first
from specdec.utils.locks import is_held, release_claim, take_claim


def tree(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def fail(directory: RunDirectory) -> None:
    with pytest.raises(ZeroDivisionError), directory:
        raise ZeroDivisionError


@pytest.mark.parametrize("made", [False, True])
def test_one_run_has_a_directory_and_the_other_deletes_nothing_of_it(
    tmp_path: Path, made: bool
) -> None:
    """The first has written nothing yet; the second fails before its first step."""
    out = tmp_path / "some" / "run"
    if made:
        out.mkdir(parents=True)
    with RunDirectory() as first:
        assert first.choose(str(out)) == out
        second = RunDirectory()
        with (
            pytest.raises(
                ValueError, match=r"run is claimed by another run[^\n]*choose another --out"
            ),
            second,
        ):
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


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step-4.ckpt", "csv", "csv/metrics.csv"]
)
def test_a_run_with_a_link_out_of_it_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    """Step files behind the link would be removed, and logs be written."""
    out, behind = tmp_path / "run", tmp_path / "elsewhere"
    (out / name).parent.mkdir(parents=True)
    (out / CLAIM).touch()
    (behind / ".tmp-0123456789ab").mkdir(parents=True)
    (behind / "step-1.ckpt").write_text("another run's")
    (out / name).symlink_to(behind)
    before = tree(tmp_path)
    with (
        pytest.raises(ValueError, match=rf"run/{name}: it is a link out of "),
        RunDirectory() as run,
    ):
        run.choose(str(out), resumes=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_resumed_run_finds_is_claimed_and_kept(tmp_path: Path, begun: bool) -> None:
    """The claim of the killed run is void."""
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    kept = {"config.yaml", "checkpoints", *(["checkpoints/last.ckpt"] if begun else [])}
    for name in (*kept - {"checkpoints"}, CLAIM):
        (out / name).write_text("a")
    with pytest.raises(ValueError, match=r"never overwritten: .* --ckpt_path auto$"):
        RunDirectory().choose(str(out))
    directory = RunDirectory()
    assert directory.choose(str(out), resumes=True) == out
    assert tree(out) == {CLAIM, *kept}
    with pytest.raises(
        ValueError, match=rf"run is claimed by another run \(process {os.getpid()} on "
    ):
        RunDirectory().choose(str(out))
    fail(directory)
    assert tree(out) == kept


def test_runs_started_together_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


HOLD = (
    "import sys, time; from pathlib import Path; from specdec.utils.locks import take_claim; "
    "c = take_claim(Path(sys.argv[1]) / '.claimed'); print(c is not None, flush=True); time.sleep(60)"
)


@pytest.fixture
def other(tmp_path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    return process


def test_a_killed_runs_claim_is_void(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    assert is_held(tmp_path / CLAIM)
    assert take_claim(tmp_path / CLAIM) is None
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / CLAIM).exists() and not is_held(tmp_path / CLAIM)
    mine = take_claim(tmp_path / CLAIM)
    assert mine is not None
    release_claim(tmp_path / CLAIM, mine)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "foreign", [("thesis.tex",), ("config.yaml",), ("checkpoints/last.ckpt", "losses.txt")]
)
def test_a_folder_that_no_run_has_left_is_not_gone_on_with(
    foreign: tuple[str, ...], tmp_path: Path
) -> None:
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ValueError, match="holds files, and none of a run of specdec fit: choose another --out"
    ):
        RunDirectory().choose(str(tmp_path), resumes=True)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ".claimed").touch()  # a killed run leaves it
    with RunDirectory() as directory:
        assert directory.choose(str(tmp_path), resumes=True) == tmp_path
