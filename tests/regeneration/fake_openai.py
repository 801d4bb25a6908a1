"""An OpenAI-compatible server that answers each question with what it was asked, and fails where it is told to."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI(ThreadingHTTPServer):
    """Serves on a free port.

    Attributes:
        failures: of each question, what happens to it before it is answered: a status, a status with a Retry-After,
            or "cut", and the connection is closed in the middle of the answer.
        finish: of each question, why the answer ends.
        delay: seconds before an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.failures: dict[str, list[Any]] = {}
        self.finish: dict[str, str] = {}
        self.message: dict[str, Any] = {}
        self.delay = 0.0
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.times: dict[str, list[float]] = {}
        self.at_once, self.most_at_once = 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.seen]


class Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._say(200, {"data": [{"id": "the-target"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake, chat = self.server, "messages" in body
        asked = body["messages"][-1]["content"] if chat else body["prompt"]
        with fake.lock:
            fake.seen.append((self.path, body, dict(self.headers)))
            fake.times.setdefault(asked, []).append(time.monotonic())
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
            failure = fake.failures[asked].pop(0) if fake.failures.get(asked) else None
        time.sleep(fake.delay)
        with fake.lock:  # before the answer: whoever reads it may ask again at once
            fake.at_once -= 1
        self._answer(asked, chat, failure)

    def _answer(self, asked: str, chat: bool, failure: Any) -> None:
        if failure == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
        elif failure is not None:
            status, after = failure if isinstance(failure, tuple) else (failure, None)
            self._say(status, {"error": {"message": "not now"}}, {"Retry-After": after} if after else {})
        else:
            text = f"<{asked}>"
            message = {"role": "assistant", "content": text, **self.server.message} if chat else None
            choice = {"message": message} if chat else {"text": text}
            usage = {"prompt_tokens": 7, "completion_tokens": len(text)}
            finish = self.server.finish.get(asked, "stop")
            self._say(200, {"choices": [{**choice, "finish_reason": finish}], "usage": usage})

    def _say(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, content)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asked has left
            self.end_headers()
            self.wfile.write(data)
