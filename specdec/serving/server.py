"""A server as a child process: healthy inside the ``with`` block, gone after it."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec import keeper
from specdec.files import explain
from specdec.serving import said

TIMEOUT = 1800.0  # seconds until it is healthy: large weights take long to load
GRACE = 20.0  # seconds to end by itself
HURRY = 2.0  # the same before it is healthy: vLLM does not listen while it loads, and nobody waits for an answer
PATIENCE = 10.0  # seconds more, until what was killed is gone
POLL = 0.1
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerError(ValueError):
    """The server did not come up, or ended by itself; ``tail`` is the end of its log."""

    def __init__(self, message: str, tail: list[str]) -> None:
        super().__init__(message)
        self.tail = tail


class Server:
    """A server that answers ``GET /health``::

        with Server(command, port=8000, log=Path("server.log")) as server:
            ask(server.url)

    Whatever becomes of this process, the server and all processes that it started end with it.

    Args:
        command: it must listen on ``host`` and ``port``.
        log: a new file for what the server says.
        name: for messages.
        timeout: seconds until it must be healthy.
        grace: seconds to end by itself when it is stopped.
        environment: variables besides this process's own.
        on_wait: called every now and then with the seconds waited and the log's last line.

    Raises:
        ServerError: on entering, if it ends or takes longer than ``timeout``; nothing of it is left then.
        ValueError: the port is taken, or the log exists or cannot be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        log: Path,
        name: str = "the server",
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        environment: Mapping[str, str] | None = None,
        on_wait: Callable[[float, str], None] = lambda seconds, line: None,
    ) -> None:
        self.command, self.host, self.port, self.log = list(command), host, port, log
        self.name, self.timeout, self.grace, self.on_wait = name, timeout, grace, on_wait
        self.environment = dict(environment or {})
        self._keeper: subprocess.Popen[bytes] | None = None
        self._up = False

    @property
    def url(self) -> str:
        """Where it can be asked from here."""
        host = ANYWHERE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        _check_free(self.host, self.port)
        try:
            with self.log.open("xb") as out:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", keeper.__file__, str(self.grace), *self.command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C goes to us alone
                    env=os.environ | self.environment,
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
        """Wait for as long as it serves.

        Raises:
            ServerError: it has ended by itself.
        """
        assert self._keeper is not None
        raise self._ended(self._keeper.wait())

    def check(self) -> None:
        """Raise ServerError if it has ended by itself."""
        assert self._keeper is not None
        if (status := self._keeper.poll()) is not None:
            raise self._ended(status)

    def stop(self) -> None:
        """End it and everything it started; nothing happens if it has ended."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        grace = self.grace if self._up else min(self.grace, HURRY)
        if not self._keeper.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self._keeper.stdin.write(str(grace).encode())
                self._keeper.stdin.close()
        try:
            self._keeper.wait(self.grace + PATIENCE)
        except subprocess.TimeoutExpired:  # a process that the kernel cannot end: nobody can wait for it
            self._keeper.kill()
            self._keeper.wait()

    def _wait_until_healthy(self) -> None:
        assert self._keeper is not None
        begin = time.monotonic()
        while not healthy(self.url):
            waited = time.monotonic() - begin
            if (status := self._keeper.poll()) is not None:
                raise self._ended(status)
            if waited > self.timeout:
                raise self._error(f"was not healthy after {self.timeout:g} s: {said.last(self.log)}")
            self.on_wait(waited, said.last(self.log))
            time.sleep(POLL)

    def _ended(self, status: int) -> ServerError:
        return self._error(f"ended by itself with status {status}: {said.reason(self.log)}")

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{self.name} {what}", said.tail(self.log))


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


def _check_free(host: str, port: int) -> None:
    """Raise ValueError if the port is taken: whoever answers there would pass for our server."""
    try:
        _listen(host, port).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {port} of {host} cannot be had ({error}): choose another --port") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
