import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.utils.config import new_run
from specdec.utils.files import cache_directory, staged_directory
from specdec.utils.locks import claim_of, is_held, locked
from specdec.utils.reading import SUMS

HOLD = """
import sys
from pathlib import Path
from specdec.utils.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_waits_for_another_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "folder" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        entered = threading.Event()

        def enter() -> None:
            with locked(path):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.3)
        assert "waiting for another process" in caplog.text
        holder.stdin.close()  # the holder ends, and its lock with it
        assert entered.wait(10)
        thread.join()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / "lock"):
            raise KeyboardInterrupt


def test_place_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"), locked(tmp_path / "file" / "lock"):
        pass


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_directory() == Path("/one")
    monkeypatch.delenv("SPECDEC_CACHE")
    assert cache_directory() == Path("/two/specdec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/three/.cache/specdec")


MAKE = """
import sys
from pathlib import Path
from specdec.utils.files import staged_directory
with staged_directory(Path(sys.argv[1])) as folder:
    (folder / "mine").touch()
    print("making", flush=True)
    sys.stdin.read()
"""


def make(path: Path) -> subprocess.Popen[str]:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None and maker.stdout.readline() == "making\n"
    return maker


def test_of_two_that_make_one_folder_the_second_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "out"
    with make(path) as first:
        message = (
            rf"^{path} is claimed by another run \(process {first.pid} on .*\): "
            "wait for its end, or choose another"
        )
        with pytest.raises(ValueError, match=message), staged_directory(path):
            pytest.fail("the block must not run")
        assert not path.exists() and is_held(claim_of(path))
        first.communicate()
    assert {file.name for file in path.iterdir()} == {"mine", SUMS} and [
        *path.parent.iterdir()
    ] == [path]


def test_what_a_killed_process_claimed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with make(path) as killed:
        killed.kill()
    assert claim_of(path).exists() and not is_held(claim_of(path))
    with staged_directory(path) as folder:
        (folder / "mine").touch()
    assert path.is_dir() and not claim_of(path).exists()


def test_a_run_without_a_name_takes_none_that_another_is_about_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specdec.utils.config.run_names", lambda kind: (tmp_path / f"{kind}-{n}" for n in range(3))
    )
    with staged_directory(new_run("x")):
        assert new_run("x") == tmp_path / "x-1"
