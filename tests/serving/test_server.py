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

from specdec.serving.server import Server, ServerError, free_port, healthy
from tests.serving.conftest import alive, soon


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
    waits: list[tuple[float, str]] = []
    with server(on_wait=lambda *wait: waits.append(wait)) as running:
        assert healthy(running.url)
        processes = pids(tmp_path)
        assert len(processes) == 2 and all(map(alive, processes))
    assert not any(map(alive, processes)) and not healthy(running.url)
    assert waits[0][0] < waits[-1][0] and waits[-1][1] == "fake vLLM starts"
    running.stop()  # once more does nothing


def test_a_crash_is_told_with_its_log(server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    with pytest.raises(ServerError, match=r"status 3: RuntimeError: the engine did not start$") as found, server():
        pass
    assert found.value.tail == ["fake vLLM starts", "RuntimeError: the engine did not start"]


def test_what_cannot_be_run_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"status 127: /nowhere/vllm cannot be run: No such file"),
        Server(["/nowhere/vllm"], port=free_port(), log=tmp_path / "log"),
    ):
        pass


def test_one_that_never_gets_healthy_is_ended(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "never")
    with (
        pytest.raises(ServerError, match=r"^the server was not healthy after 0.7 s: fake vLLM starts"),
        server(timeout=0.7),
    ):
        pass
    assert gone(pids(tmp_path))


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
        pytest.raises(ServerError, match=r"^the server ended by itself with status 4: ValueError: fell"),
    ):
        running.wait()
    assert gone(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_whoever_started_it(fake: str, tmp_path: Path, number: int) -> None:
    port = free_port()
    code = (
        "import sys; from pathlib import Path; from specdec.serving.server import Server\n"
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


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_where_it_is_asked(host: str, url: str, tmp_path: Path) -> None:
    assert Server(["x"], host=host, port=1, log=tmp_path / "log").url == url
