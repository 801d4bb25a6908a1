"""A server is healthy inside its block and leaves no process, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.engines.server import Server, ServerError, failure_reason, free_port, healthy, last_log_line
from tests.engines.conftest import alive, soon


@pytest.fixture
def server(fake: str, tmp_path: Path) -> Callable[..., Server]:
    """Makes a server of the fake."""
    port = free_port()

    def make(**changes: object) -> Server:
        values = {"port": port, "log": tmp_path / "log", "timeout": 20.0, "grace": 5.0}
        return Server([fake, "serve", "target", "--port", str(port)], **values | changes)

    return make


def pids(tmp_path: Path) -> list[int]:
    assert soon((tmp_path / "said").exists)
    return json.loads((tmp_path / "said").read_text())["pids"]


def gone(processes: list[int]) -> bool:
    return soon(lambda: not any(map(alive, processes)))


def test_healthy_inside_and_gone_after(server: Callable[..., Server], tmp_path: Path) -> None:
    with server() as running:
        assert healthy(running.url)
        processes = pids(tmp_path)
        assert len(processes) == 2 and all(map(alive, processes))
    assert not any(map(alive, processes)) and not healthy(running.url)
    running.stop()  # once more does nothing


def test_a_crash_is_told_with_its_log(server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    with pytest.raises(ServerError, match=r"status 3: RuntimeError: the engine did not start$") as found, server():
        pass
    assert found.value.tail == ["fake vLLM starts", "RuntimeError: the engine did not start"]


def test_one_that_does_not_end_is_killed_with_its_workers(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    with server(grace=0.3):
        processes = pids(tmp_path)
    assert not any(map(alive, processes))


def test_one_that_is_not_healthy_yet_is_not_waited_for(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    begin = time.monotonic()
    with pytest.raises(ServerError, match="not healthy"), server(timeout=0.5, grace=60.0):
        pass
    assert time.monotonic() - begin < 20 and gone(pids(tmp_path))


def test_one_that_falls_is_noticed_and_its_workers_end(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fall")
    with (
        server() as running,
        pytest.raises(ServerError, match=r"^vLLM ended by itself with status 4: ValueError: fell"),
    ):
        running.wait()
    assert gone(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_it_does_not_outlive_whoever_started_it(fake: str, tmp_path: Path, number: int) -> None:
    port = free_port()
    code = (
        "import sys; from pathlib import Path; from specdec.engines.server import Server\n"
        f"command, log = [{fake!r}, 'serve', 'target', '--port', '{port}'], Path({str(tmp_path / 'log')!r})\n"
        f"with Server(command, port={port}, log=log):\n"
        "    print('up', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        processes = pids(tmp_path)
        os.kill(process.pid, number)
    assert gone(processes)


def test_a_taken_port_is_not_mistaken_for_ours(
    server: Callable[..., Server], served: Callable[..., object], tmp_path: Path
) -> None:
    other = served(False)
    with (
        pytest.raises(ValueError, match=r"port \d+ of 127\.0\.0\.1 cannot be had .*choose another --port"),
        server(port=other.server_address[1]),
    ):
        pass
    assert not (tmp_path / "log").exists()


def test_a_log_is_never_overwritten(server: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old")
    with pytest.raises(ValueError, match="exists already"), server():
        pass
    with pytest.raises(ValueError, match="no such file or directory"), server(log=tmp_path / "nowhere" / "log"):
        pass
    assert (tmp_path / "log").read_text() == "old"


LOG = """\
(APIServer pid=1) WARNING 11-21 This can cause errors like `OSError: [Errno 24] Too many open files`

(EngineCore pid=2) INFO 11-21 Initializing
(Worker pid=3) ERROR 11-21     raise ValueError(
(Worker pid=3) ERROR 11-21 ValueError: no room on node 0
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "ValueError: no room on node 0"),
        ("a.b.ValidationError: 1 error\n  Value error, too long. [x]\n  see https://c\n", "Value error, too long. [x]"),
        ("WARNING\n  Killed \n\n", "Killed"),
        (LOG.splitlines()[0], LOG.splitlines()[0]),
        ("", "it said nothing"),
    ],
)
def test_reasons(log: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert failure_reason(path) == reason


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    assert failure_reason(tmp_path / "nowhere") == last_log_line(tmp_path / "nowhere") == "it said nothing"
    (tmp_path / "log").write_bytes(b"line\n\xff\n\n")
    assert last_log_line(tmp_path / "log") == "\N{REPLACEMENT CHARACTER}"
