"""An OpenAI-compatible server as its clients see it: requests, streams, and vLLM's counters of drafts."""

import contextlib
import http.client
import json
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

KEY = "VLLM_API_KEY"  # vLLM's own variable
PATIENCE = 600.0  # seconds for one line of an answer
_METRIC = re.compile(r"^vllm:(generation_tokens|spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


class RequestError(ValueError):
    """A request without an answer; ``status`` is HTTP's, or None if the server is away or its answer broke off."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """A server by its URL, with or without the final ``/v1``; its key, if it wants one, is in ``$VLLM_API_KEY``.

    It may be silent for ``patience`` seconds. ValueError if it is no URL of http or https, or holds a user or password;
    RequestError from every method if the server cannot be reached, or refuses.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc or parts.query:
            raise ValueError(f"no URL of a server: give one as http://127.0.0.1:8000, and its key in ${KEY}")
        self.url, self._parts, self._patience = parts.geturl(), parts, patience

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

    def complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object that ``POST`` of a body gives."""
        with self._response("POST", path, json.dumps(body)) as response:
            try:
                return dict(json.loads(response.read()))
            except (TypeError, ValueError) as error:
                raise RequestError(f"{self.url}{path}: the answer is no JSON object") from error

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The server-sent events that ``POST`` of a body with ``stream`` gives, each as it comes."""
        with self._response("POST", path, json.dumps(body)) as response:
            for line in response:
                if not line.startswith(b"data:"):  # a comment, or the line between two events
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"{self.url}{path}: {_reason(data)}")
                yield event
        raise ValueError(f"{self.url}{path}: the stream ended before its end mark: did the server fall?")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        connection = kind(self._parts.netloc, timeout=self._patience)
        try:
            connection.request(method, self._parts.path + path, body, headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    why = f"status {response.status}: {_reason(response.read())}"
                    raise RequestError(f"{self.url}{path}: {why}", response.status)
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self.url}{path}: {error or type(error).__name__}: is the server up?") from error
        finally:
            connection.close()


def _reason(body: bytes) -> str:
    """The message of an error, however it is wrapped."""
    text = body.decode("utf-8", errors="replace")
    with contextlib.suppress(json.JSONDecodeError):
        value = json.loads(text)
        while isinstance(value, dict):
            value = value.get("error", value.get("message", value.get("detail", str(value))))
        text = str(value)
    return " ".join(text.split())[:240]


class SpecDecodeCounters(NamedTuple):
    """What vLLM counts since its start, over all its engines. A pass is a verification that had a draft to judge."""

    generated: int  # tokens of answers
    passes: int
    draft_tokens: int  # of a pass; 0 before the first, and without a drafter

    @classmethod
    def read(cls, endpoint: Endpoint) -> Self:
        """The server's counters now; ValueError if it has not even vLLM's of generated tokens, or cannot be reached."""
        counts, positions = Counter[str](), set[str]()
        for name, labels, value in _METRIC.findall(endpoint.text("/metrics")):
            counts[name] += int(float(value))
            positions.update(_POSITION.findall(labels))
        if "generation_tokens" not in counts:
            raise ValueError("no counter vllm:generation_tokens in /metrics: is this vLLM, with its statistics on?")
        return cls(counts["generation_tokens"], counts["spec_decode_num_drafts"], len(positions))

    def increase(self, endpoint: Endpoint, tokens: int, patience: float = 5.0) -> Self:
        """What came since these, once ``tokens`` generated ones are among it: the server counts a little late."""
        end = time.monotonic() + patience
        while (now := self.read(endpoint)).generated - self.generated < tokens and time.monotonic() < end:
            time.sleep(0.05)
        return now._replace(generated=now.generated - self.generated, passes=now.passes - self.passes)


def streaming(model: str, max_new_tokens: int) -> dict[str, Any]:
    """What a greedy, streamed request says beside its prompt; it goes on behind the end of a text."""
    return {
        "model": model, "max_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True,
        "cache_salt": uuid.uuid4().hex,  # else a prompt that was asked before would be answered from a cache
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
