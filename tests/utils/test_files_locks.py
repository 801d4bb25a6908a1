import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.utils.files import cache_directory, locked

HOLD = """
import sys
from pathlib import Path
from specdec.utils.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_waits_for_another_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "folder" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
