"""An OpenAI-compatible server as its clients see it."""

import contextlib
import http.client
import json
import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

KEY = "VLLM_API_KEY"  # vLLM's own variable
PATIENCE = 600.0  # seconds for one line
REASON = 240  # letters


class RequestError(ValueError):
    """A request without an answer.

    Args:
        status: HTTP's; None if the server could not be reached, or its answer broke off.
        retry_after: the header of that name: seconds, or a date.
    """

    def __init__(self, message: str, status: int | None = None, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Endpoint:
    """A server by its URL, with or without the final ``/v1``; its key, if it wants one, is in the environment.

    Args:
        key: the name of the variable that holds the key.
        patience: seconds that the server may be silent.

    Raises:
        ValueError: it is no URL of http or https, or holds a user or password.
        RequestError: from every method, if the server cannot be reached, or refuses.
    """

    def __init__(self, url: str, key: str = KEY, patience: float = PATIENCE) -> None:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if "@" in parts.netloc or parts.query:
            raise ValueError(f"a URL of a server must not hold a password or a key: give a key in ${key}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{url}: no URL of a server: give one as http://127.0.0.1:8000")
        self.url, self._parts, self._key, self._patience = parts.geturl(), parts, key, patience

    def text(self, path: str) -> str:
        """What ``GET`` gives."""
        with self._response("GET", path) as response:
            return response.read().decode("utf-8", errors="replace")

    def model(self) -> str:
        """The name of the first model that it serves."""
        try:
            return str(json.loads(self.text("/v1/models"))["data"][0]["id"])
        except (json.JSONDecodeError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{self.url}/v1/models names no model: is this an OpenAI-compatible server?") from error

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object that ``POST`` of a body gives."""
        with self._response("POST", path, json.dumps(body)) as response:
            try:
                answer = json.loads(response.read())
            except ValueError as error:
                raise RequestError(f"{self.url}{path}: the answer is not JSON") from error
        if not isinstance(answer, dict):
            raise RequestError(f"{self.url}{path}: the answer is no JSON object")
        return answer

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The server-sent events that ``POST`` of a body with ``stream`` gives, each as it comes."""
        with self._response("POST", path, json.dumps(body)) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == line.strip():  # a comment, or the line between two events
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"{self.url}{path}: {_said(data)}")
                yield event
        raise ValueError(f"{self.url}{path}: the stream ended before its end mark: did the server fall?")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._key):
            headers["Authorization"] = f"Bearer {key}"
        connection = kind(self._parts.netloc, timeout=self._patience)
        try:
            connection.request(method, self._parts.path + path, body, headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    said, after = _said(response.read()), response.headers.get("Retry-After")
                    raise RequestError(f"{self.url}{path}: status {response.status}: {said}", response.status, after)
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self.url}{path}: {error or type(error).__name__}: is the server up?") from error
        finally:
            connection.close()


def _said(body: bytes) -> str:
    """The message of an error, however it is wrapped."""
    text = body.decode("utf-8", errors="replace")
    with contextlib.suppress(json.JSONDecodeError):
        said = json.loads(text)
        while isinstance(said, dict):
            said = said.get("error", said.get("message", said.get("detail", str(said))))
        text = str(said)
    return " ".join(text.split())[:REASON]
