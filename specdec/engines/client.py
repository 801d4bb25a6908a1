"""A client of OpenAI-compatible servers: requests, streams, and vLLM's counters of drafts."""

import contextlib
import functools
import http.client
import io
import json
import math
import os
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from specdec.utils.text import printable

KEY = "VLLM_API_KEY"  # vLLM's own variable
TIMEOUT = 600.0  # seconds for an answer, and for one piece of a stream
STREAM = 6  # timeouts for a whole stream
# Bytes at most; 16,000 tokens with a line each take 2**22.
BODY = 2**24
LINE = 2**20
STREAM_BODY = 2**26
REFUSAL = 2**16
POSITIONS = 256  # drafts a pass at most
_METRIC = re.compile(
    r"^vllm:(generation_tokens|spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE
)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


class RequestError(ValueError):
    """A request without an answer that can be used.

    ``status`` is HTTP's, 200 if what came is not as it should be; None if the server is away or its answer broke off.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class Endpoint:
    """A server by its URL, with or without the final ``/v1``; its key, if it wants one, is in ``$VLLM_API_KEY``.

    An answer may take ``timeout`` seconds, however it comes; a stream several times as long, if it is never silent for
    longer. Nothing that it sends is believed: an answer has a largest size, and is checked before it is returned.

    Raises:
        ValueError: this is no URL of http or https, or holds a user or password.
        RequestError: from every method, if the server cannot be reached, refuses, or answers with something else.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # half an IPv6 address, a port that is none
            sound = False
        printable_ascii = re.fullmatch(r"[!-~]*", url)
        if not sound or not printable_ascii or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                f"no URL of a server: give one as http://127.0.0.1:8000, and its key in ${KEY}"
            )
        self.url = parts.geturl()
        self._parts = parts
        self._timeout = timeout

    def text(self, path: str) -> str:
        """Return the body that ``GET`` gives."""
        with self._response("GET", path) as response:
            return self._body(path, response).decode("utf-8", errors="replace")

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
        """Raise RequestError if nobody answers at all; a refusal is an answer."""
        try:
            self.text("/v1/models")
        except RequestError as error:
            if error.status is None:
                raise

    def complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that ``POST`` of a body gives."""
        with self._response("POST", path, json.dumps(body)) as response:
            return self._object(path, self._body(path, response))

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the server-sent events that ``POST`` of a body with ``stream`` gives, each as it comes."""
        left = STREAM_BODY
        with self._response("POST", path, json.dumps(body), STREAM) as response:
            while line := response.readline(LINE + 1):
                left -= len(line)
                if len(line) > LINE or left < 0:
                    raise RequestError(
                        f"{self.url}{path}: the stream, or a line of it, is too long", 200
                    )
                if not line.startswith(b"data:"):  # a comment, or the line between two events
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = self._object(path, data)
                if "error" in event:
                    raise RequestError(f"{self.url}{path}: {_reason(data)}", 200)
                yield event
        raise ValueError(
            f"{self.url}{path}: the stream ended before its end mark: did the server fall?"
        )

    def _body(self, path: str, response: http.client.HTTPResponse) -> bytes:
        body = response.read(BODY + 1)
        if len(body) > BODY:
            raise RequestError(f"{self.url}{path}: the answer has more than {BODY:,} bytes", 200)
        if response.length:  # http.client raises by itself only where no size is given
            raise http.client.IncompleteRead(body, response.length)
        return body

    def _object(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            value = _parsed(data)
        except ValueError as error:
            raise RequestError(
                f"{self.url}{path}: the answer is no JSON object: {error}", 200
            ) from error
        if not isinstance(value, dict):
            raise RequestError(f"{self.url}{path}: the answer is no JSON object", 200)
        return value

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: str | None = None, timeouts: int = 1
    ) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            if re.search(r"[^!-~]", key):  # http.client would print it
                raise ValueError(
                    f"${KEY} holds a space, a line break or another character that no key has"
                )
            headers["Authorization"] = f"Bearer {key}"
        end = time.monotonic() + timeouts * self._timeout
        connection = connect(self._parts.netloc, timeout=self._timeout)
        response_class: Any = functools.partial(_Response, timeout=self._timeout, end=end)
        connection.response_class = response_class
        try:
            connection.request(method, self._parts.path + path, body, headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    why = f"status {response.status}: {_reason(response.read(REFUSAL))}"
                    raise RequestError(f"{self.url}{path}: {why}", response.status)
                yield response
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise RequestError(
                f"{self.url}{path}: {error or type(error).__name__}: is the server up?"
            ) from error
        finally:
            connection.close()


class _Response(http.client.HTTPResponse):
    """An answer that cannot be read after its ``end``, in ``time.monotonic()``.

    A socket's own timeout begins anew with every byte.
    """

    def __init__(
        self, sock: socket.socket, *args: Any, timeout: float, end: float, **options: Any
    ) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_UntilEnd(self.fp.detach(), sock, timeout, end))


class _UntilEnd(io.RawIOBase):
    def __init__(self, raw: Any, sock: socket.socket, timeout: float, end: float) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout = timeout
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out: the answer never ended")
        self._sock.settimeout(min(left, self._timeout))
        return self._raw.readinto(into)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _parsed(data: str | bytes) -> Any:
    """Parse JSON; ValueError if it is none, or nested too deeply."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _reason(body: bytes) -> str:
    """Return the message of an error, however it is wrapped."""
    text = body.decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError):
        value = _parsed(text)
        while isinstance(value, dict):
            value = value.get("error", value.get("message", value.get("detail", str(value))))
        text = str(value)
    return " ".join(printable(text).split())[:240]


class SpecDecodeCounters(NamedTuple):
    """The counts of vLLM since its start, over all its engines. A pass is a verification of at least one draft."""

    generated: int  # tokens of answers
    passes: int
    draft_tokens: int  # of a pass; 0 before the first, and without a drafter

    @classmethod
    def read(cls, endpoint: Endpoint) -> Self:
        """Return the server's counters now; ValueError if it lacks vLLM's counter of tokens, or cannot be reached."""
        counts = Counter[str]()
        positions = set[str]()
        for name, labels, value in _METRIC.findall(endpoint.text("/metrics")):
            number = float(value) if re.fullmatch(r"[\d.eE+]{1,40}", value) else math.nan
            if not number < 2**53:
                raise ValueError(
                    f"{endpoint.url}/metrics: {name} is {printable(value)[:40]}, no count"
                )
            counts[name] += int(number)
            positions.update(_POSITION.findall(labels))
        if len(positions) > POSITIONS:
            raise ValueError(
                f"{endpoint.url}/metrics counts {len(positions):,} drafts a pass, at most {POSITIONS} can be"
            )
        if "generation_tokens" not in counts:
            raise ValueError(
                "no counter vllm:generation_tokens in /metrics: is this vLLM, with its statistics on?"
            )
        return cls(counts["generation_tokens"], counts["spec_decode_num_drafts"], len(positions))

    def increase(self, endpoint: Endpoint, tokens: int, timeout: float = 5.0) -> Self:
        """Return the increase since these counters, once it has ``tokens`` generated ones: the server counts late."""
        end = time.monotonic() + timeout
        while True:
            now = self.read(endpoint)
            generated = now.generated - self.generated
            if generated >= tokens or time.monotonic() >= end:
                return now._replace(generated=generated, passes=now.passes - self.passes)
            time.sleep(0.05)


def streaming(model: str, max_new_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy, streamed request without its prompt; it goes on behind the end of a text."""
    return {
        "model": model, "max_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True,
        # Without it a prompt that was asked before would be answered from a cache.
        "cache_salt": uuid.uuid4().hex,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
