"""A stand-in for ``vllm serve``, of the standard library: answers, counts, and misbehaves where ``$FAKE_VLLM`` says so.

With a drafter three tokens are drafted a pass, of which 2, 0, 3, 1, 2, ... are accepted.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ACCEPTED, DRAFTS = (2, 0, 3, 1), 3
LABELS = 'engine="0",model_name="/tmp/a{b},c"'


def pieces(tokens: int, drafting: bool, of_each: Sequence[int] = ()) -> Iterator[tuple[int, int | None]]:
    """How an answer of so many tokens comes: tokens of each piece, and how many drafts its pass accepted."""
    yield 1, None
    left = tokens - 1
    for accepted in itertools.cycle((of_each or ACCEPTED) if drafting else (0,)):
        if left <= 0:
            return
        yield min(left, accepted + 1), accepted if drafting else None
        left -= accepted + 1


class FakeVllm(ThreadingHTTPServer):
    """Serves on a free port unless one is given."""

    daemon_threads = True

    def __init__(self, drafting: bool, port: int = 0, delay: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.drafting, self.delay = drafting, delay
        self.lock = threading.Lock()
        self.generated, self.passes, self.accepted_at = 0, 0, [0] * DRAFTS
        self.bodies: list[dict] = []
        self.at_once, self.most_at_once = 0, 0
        self.words: str | None = None  # of every token, instead of the prompt's own
        self.breaks = ""
        self.plans: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}  # by prompt: tokens, and accepted drafts
        self.joined = 0  # answers, from the next on, whose first two pieces come as one

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        rows = [f"vllm:generation_tokens_total{{{LABELS}}} {float(self.generated)}", "# a comment", "python_gc 7"]
        if self.drafting:
            counts = {
                "num_drafts": self.passes,
                "num_draft_tokens": DRAFTS * self.passes,
                "num_accepted_tokens": sum(self.accepted_at),
            }
            rows += [f"vllm:spec_decode_{name}_total{{{LABELS}}} {float(value)}" for name, value in counts.items()]
            rows += [f"vllm:spec_decode_{name}_created{{{LABELS}}} 1.7e+09" for name in counts]
            rows += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="{k}"}} {float(value)}'
                for k, value in enumerate(self.accepted_at)
            ]
        return "\n".join(rows) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeVllm

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._whole(200, "")
        elif self.path == "/metrics":
            self._whole(200, self.server.metrics())
        elif self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": "the-target"}]}))
        else:
            self._whole(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.server
        with fake.lock:
            fake.bodies.append(body)
            fake.at_once += 1
            self.running = True
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        try:
            chat = "messages" in body
            prompt = body["messages"][-1]["content"] if chat else body["prompt"]
            if len(prompt) > 100:
                self._whole(400, json.dumps({"error": {"message": "the prompt\nis too long", "code": 400}}))
            elif not body.get("stream"):
                said = {"message": {"content": f"<{prompt}>"}} if chat else {"text": f"<{prompt}>"}
                self._whole(200, json.dumps({"choices": [{**said, "finish_reason": "stop"}], "usage": _usage(3)}))
            else:
                self._stream(prompt, body, chat)
        finally:
            self._done()

    def _done(self) -> None:
        """Count this answer as over, once."""
        with self.server.lock:
            self.server.at_once -= self.running
            self.running = False

    def _stream(self, prompt: str, body: dict, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        fake, made = self.server, 0
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": _usage(0)})
        ids, accepted_of_each = fake.plans.get(tuple(prompt), (None, None))
        coming = list(pieces(body["max_tokens"], fake.drafting, accepted_of_each or ()))
        for number, accepted in coming:
            with fake.lock:
                fake.generated += number
                if accepted is not None:
                    fake.passes += 1
                    for k in range(accepted):
                        fake.accepted_at[k] += 1
        if fake.joined > 0:
            fake.joined -= 1
            coming[:2] = [(coming[0][0] + coming[1][0], None)]
        for number, _ in coming:
            time.sleep(fake.delay)
            if fake.breaks and made:
                break
            text = "".join(fake.words or f"{prompt[:3]}{made + i} " for i in range(number))
            choice = {"delta": {"content": text}} if chat else {"text": text}
            if ids is not None and body.get("return_token_ids"):
                choice["token_ids"] = ids[made : made + number]
            made += number
            self._event({"choices": [choice], "usage": _usage(made)})
        if fake.breaks == "told":
            self._event({"error": {"message": "the engine fell"}})
        if not fake.breaks:
            self._event({"choices": [], "usage": _usage(made)})
            self._done()  # whoever reads the end may ask again before it is written
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        self._chunk(data[:9])  # a line need not come in one piece
        self._chunk(data[9:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": tokens}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """``vllm serve TARGET ...``; what it was told, and its processes, go to the file that $FAKE_VLLM_SAID names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("target")
    parser.add_argument("--speculative-config")
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args()
    how = os.environ.get("FAKE_VLLM", "")
    say("fake vLLM starts")
    if how == "crash":
        say("RuntimeError: the engine did not start")
        sys.exit(3)
    if how in ("hang", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    said = Path(os.environ["FAKE_VLLM_SAID"])
    draft = said.with_suffix(".part")
    drafter = json.loads(args.speculative_config)["model"] if args.speculative_config else None
    files = sorted(path.name for path in Path(drafter).iterdir()) if drafter else []
    draft.write_text(json.dumps({"argv": sys.argv[1:], "pids": [os.getpid(), worker.pid], "drafter": files}))
    draft.rename(said)
    if how in ("never", "deaf"):
        time.sleep(600)
    time.sleep(0.3)
    server = FakeVllm(drafting=args.speculative_config is not None, port=args.port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if how == "fall":
        time.sleep(0.6)
        say("ValueError: fell")
        os._exit(4)
    while True:
        time.sleep(60)
