"""A server as a child process: healthy inside the ``with`` block, gone after it."""

import contextlib
import http.client
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.utils import supervise
from specdec.utils.files import explain

log = logging.getLogger(__name__)

TIMEOUT = 1800.0  # seconds until it is healthy: large weights take long to load
GRACE = 20.0  # seconds to end by itself
HURRY = 2.0  # the same before it is healthy: vLLM does not listen while it loads, and nobody waits for an answer
PATIENCE = 10.0  # seconds more, until what was killed is gone
POLL = 0.1
TOLD_EVERY = 30.0  # seconds between two lines about a server that starts
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# the last of them: an engine's processes pass an error on, the first of them with a hint at the real one
_ERROR = re.compile(r"(?:\w+Error|Value error)[:,] (?!.*See root cause above).+")


class ServerError(ValueError):
    """The server did not come up, or ended by itself; ``tail`` is the end of its log."""

    def __init__(self, message: str, tail: list[str]) -> None:
        super().__init__(message)
        self.tail = tail


class Server:
    """A server that answers ``GET /health`` inside its ``with`` block; ``url`` is where it is asked from here.

    Whatever becomes of this process, the server and all processes that it started end with it.

    Args:
        command: it must listen on ``host`` and ``port``.
        log: a new file for what the server says.
        timeout: seconds until it must be healthy.
        grace: seconds to end by itself when it is stopped.

    Raises:
        ServerError: on entering, if it ends or takes longer than ``timeout``; nothing of it is left then.
        ValueError: the port is taken, or the log exists or cannot be written.
    """

    def __init__(
        self, command: Sequence[str], *, host: str = "127.0.0.1", port: int, log: Path, timeout: float = TIMEOUT,
        grace: float = GRACE,
    ) -> None:  # fmt: skip
        self.command, self.host, self.port, self.log = list(command), host, port, log
        self.timeout, self.grace = timeout, grace
        near = ANYWHERE.get(host, host)
        self.url = f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._up = False

    def __enter__(self) -> Self:
        try:  # whoever answers at a taken port would pass for our server
            _listen(self.host, self.port).close()
        except (OSError, OverflowError) as error:
            taken = f"port {self.port} of {self.host} cannot be had ({error}): choose another --port"
            raise ValueError(taken) from error
        try:
            with self.log.open("xb") as out:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", supervise.__file__, str(self.grace), *self.command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C goes to us alone
                    env=os.environ | {"VLLM_NO_USAGE_STATS": "1"},
                )
        except FileExistsError as error:
            raise ValueError(f"{self.log} exists already and is never overwritten: choose another log") from error
        except OSError as error:
            raise explain(error, self.log) from error
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        self._up = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait for as long as it serves; raise ServerError once it has ended by itself."""
        assert self._supervisor is not None
        self._supervisor.wait()
        self.check()

    def check(self) -> None:
        """Raise ServerError if it has ended by itself."""
        assert self._supervisor is not None
        if (status := self._supervisor.poll()) is not None:
            raise self._error(f"ended by itself with status {status}: {failure_reason(self.log)}")

    def stop(self) -> None:
        """End it and everything it started; nothing happens if it has ended."""
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        if not self._supervisor.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self._supervisor.stdin.write(str(self.grace if self._up else min(self.grace, HURRY)).encode())
                self._supervisor.stdin.close()
        try:
            self._supervisor.wait(self.grace + PATIENCE)
        except subprocess.TimeoutExpired:  # a process that the kernel cannot end: nobody can wait for it
            self._supervisor.kill()
            self._supervisor.wait()

    def _wait_until_healthy(self) -> None:
        begin = told = time.monotonic()
        while not healthy(self.url):
            now = time.monotonic()
            self.check()
            if now - begin > self.timeout:
                raise self._error(f"was not healthy after {self.timeout:g} s: {last_log_line(self.log)}")
            if now - told >= TOLD_EVERY:
                told = now
                log.info("starting vLLM, %.0f s: %s", now - begin, last_log_line(self.log)[:100])
            time.sleep(POLL)

    def _error(self, what: str) -> ServerError:
        return ServerError(f"vLLM {what}", _lines(self.log)[-40:])


def healthy(url: str) -> bool:
    """Whether ``GET /health`` is answered with 200."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with _listen(host, 0) as found:
        return int(found.getsockname()[1])


def last_log_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    return next(iter(_lines(path)[-1:]), "it said nothing").strip()


def failure_reason(path: Path) -> str:
    """The last error that a log tells of, else its last line."""
    errors = [found[0] for line in _lines(path) if " WARNING " not in line and (found := _ERROR.search(line))]
    return (errors[-1] if errors else last_log_line(path))[:400]


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return []


def _listen(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
