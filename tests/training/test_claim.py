"""A claim ends with the process that has it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec.training.claim import CLAIM, Claim, holder, is_held

HOLD = (
    "import sys, time; from pathlib import Path; from specdec.training.claim import Claim; "
    "c = Claim.take(Path(sys.argv[1])); print(c is not None, flush=True); time.sleep(60)"
)


@pytest.fixture
def other(tmp_path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    return process


def test_a_killed_runs_claim_is_void(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    assert is_held(tmp_path) and holder(tmp_path).startswith(f"process {other.pid} on ")
    assert Claim.take(tmp_path) is None
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / CLAIM).exists() and not is_held(tmp_path)
    mine = Claim.take(tmp_path)
    assert mine is not None and holder(tmp_path).startswith(f"process {os.getpid()} on ")
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_gets_it(tmp_path: Path) -> None:
    """A child that a killed run left behind holds on for a moment: a claim outlives no process that came of the run."""
    mine = Claim.take(tmp_path)
    assert mine is not None
    child = os.fork()
    if child == 0:
        time.sleep(0.5)
        os._exit(0)
    mine._stream.close()  # as the end of this process alone would
    assert Claim.take(tmp_path) is None
    begin = time.monotonic()
    again = Claim.take(tmp_path, patience=10)
    assert again is not None and 0.2 < time.monotonic() - begin < 5
    os.waitpid(child, 0)
    again.release()


def test_a_claim_given_back_is_free_though_a_child_lives(tmp_path: Path) -> None:
    mine = Claim.take(tmp_path)
    assert mine is not None
    child = os.fork()
    if child == 0:
        time.sleep(2)
        os._exit(0)
    mine.release()
    again = Claim.take(tmp_path)
    assert again is not None
    again.release()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_claim_removed_between_the_look_and_the_lock_is_not_ours(tmp_path: Path) -> None:
    """The last holder removes the file that we have opened: whoever comes next makes another of its name."""
    from specdec.training import claim

    with (tmp_path / CLAIM).open("a+") as stream:
        (tmp_path / CLAIM).unlink()
        assert claim._lock(stream) and not claim._same(stream, tmp_path / CLAIM)
        (tmp_path / CLAIM).touch()
        assert not claim._same(stream, tmp_path / CLAIM)
