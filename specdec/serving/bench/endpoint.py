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


class Endpoint:
    """A server by its URL, with or without the final ``/v1``; $VLLM_API_KEY is its key, if it wants one.

    Raises:
        ValueError: it is no URL of http or https; every method, if the server cannot be reached, or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urlsplit(self.url)
        if self._parts.scheme not in ("http", "https") or not self._parts.netloc:
            raise ValueError(f"{url}: no URL of a server: give one as http://127.0.0.1:8000")

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
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        connection = kind(self._parts.netloc, timeout=PATIENCE)
        try:
            connection.request(method, self._parts.path + path, body, headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise ValueError(f"{self.url}{path}: status {response.status}: {_said(response.read())}")
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"{self.url}{path}: {error or type(error).__name__}: is the server up?") from error
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
