"""A client of OpenAI-compatible servers."""

import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from specdec.utils.text import printable

KEY = "VLLM_API_KEY"  # vLLM's own variable
TIMEOUT = 600.0  # seconds for an answer
# Bytes at most; 16,000 tokens with a line each take 2**22.
BODY = 2**24
REFUSAL = 2**16


class RequestError(ValueError):
    """A request without an answer that can be used.

    ``status`` is HTTP's, 200 if what came is not as it should be; None if the server is away or its answer broke off.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class Endpoint:
    """A server by its URL, with or without the final ``/v1``; its key, if it needs one, is in the environment.

    An answer may take ``timeout`` seconds, however it comes. Nothing that it sends is believed: an answer has a largest
    size, and is checked before it is returned.

    Args:
        key: the variable that has the server's key.

    Raises:
        ValueError: this is no URL of http or https, or holds a user or password.
        RequestError: from every method, if the server cannot be reached, refuses, or answers with something else.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT, key: str = KEY) -> None:
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # half an IPv6 address, a port that is none
            sound = False
        printable_ascii = re.fullmatch(r"[!-~]*", url)
        if not sound or not printable_ascii or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                f"no URL of a server: give one as http://127.0.0.1:8000, and its key in ${key}"
            )
        self.url = parts.geturl()
        self._parts = parts
        self._timeout = timeout
        self.key = key

    def text(self, path: str) -> str:
        """Return the body that ``GET`` gives."""
        return self._answer("GET", path).decode("utf-8", errors="replace")

    def model(self) -> str:
        """Return the name of the first model that it serves."""
        text = self.text("/v1/models")
        try:
            name = _parsed(text)["data"][0]["id"]
            if not isinstance(name, str) or name != printable(name):
                raise ValueError(name)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{self.url}/v1/models names no model: is this an OpenAI-compatible server?"
            ) from error
        return name

    def check_alive(self) -> None:
        """Raise RequestError if there is no answer at all; a refusal is an answer."""
        try:
            self.text("/v1/models")
        except RequestError as error:
            if error.status is None:
                raise

    def complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that ``POST`` of a body gives."""
        data = self._answer("POST", path, json.dumps(body))
        try:
            return _parsed(data)
        except ValueError as error:
            raise RequestError(
                f"{self.url}{path}: the answer is no JSON object: {error}", 200
            ) from error

    def _answer(self, method: str, path: str, body: str | None = None) -> bytes:
        """Return the body of the answer, at most :data:`BODY` bytes, which has to end within the timeout."""
        secure = self._parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key):
            if re.search(r"[^!-~]", key):  # http.client would print it
                raise ValueError(
                    f"${self.key} holds a space, a line break or another character that no key has"
                )
            headers["Authorization"] = f"Bearer {key}"
        connection = connect(self._parts.netloc, timeout=self._timeout)
        end = time.monotonic() + self._timeout
        with contextlib.closing(connection), contextlib.ExitStack() as stack:
            try:
                connection.connect()
                # the socket's own timeout begins again with every byte
                timer = threading.Timer(self._timeout, _cut, [connection.sock])
                timer.start()
                stack.callback(timer.cancel)
                connection.request(method, self._parts.path + path, body, headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        why = f"status {response.status}: {_reason(response.read(REFUSAL))}"
                        raise RequestError(f"{self.url}{path}: {why}", response.status)
                    data = response.read(BODY + 1)
                    if len(data) > BODY:
                        why = f"the answer has more than {BODY:,} bytes"
                        raise RequestError(f"{self.url}{path}: {why}", 200)
                    # http.client raises by itself only where no size is given
                    if response.length or time.monotonic() >= end:
                        raise http.client.IncompleteRead(data, response.length)
                    return data
            except (OSError, UnicodeError, http.client.HTTPException) as error:
                late = time.monotonic() >= end
                why = "timed out" if late else str(error) or type(error).__name__
                raise RequestError(f"{self.url}{path}: {why}: is the server up?") from error


def _cut(connection: socket.socket) -> None:
    """End what somebody waits for."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _parsed(data: str | bytes) -> dict[str, Any]:
    """Parse JSON; ValueError if it is none or no object, or nested too deeply."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        value = json.loads(data, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is another value")
    return value


def _reason(body: bytes) -> str:
    """Return the message of an error, however it is wrapped."""
    text = body.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError):
        value: Any = _parsed(text)
        while isinstance(value, dict):
            value = value.get("error", value.get("message", value.get("detail", str(value))))
        text = str(value)
    return " ".join(printable(text).split())[:240]
