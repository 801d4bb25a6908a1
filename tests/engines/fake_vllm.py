"""A stand-in for vLLM, of the standard library: answers, counts, and misbehaves where it is told to.

With a drafter three tokens are drafted a pass, of which 2, 0, 3, 1, 2, ... are accepted. As an executable it is
``vllm serve``, whose misbehaviour ``$FAKE_VLLM`` names, and ``vllm bench serve``.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ACCEPTED, DRAFTS = (2, 0, 3, 1), 3
LABELS = 'engine="0",model_name="/tmp/a{b},c"'


def pieces(
    tokens: int, drafting: bool, of_each: Sequence[int] = ()
) -> Iterator[tuple[int, int | None]]:
    """How an answer of so many tokens comes: tokens of each piece, and how many drafts its pass accepted."""
    yield 1, None
    left = tokens - 1
    for accepted in itertools.cycle((of_each or ACCEPTED) if drafting else (0,)):
        if left <= 0:
            return
        yield min(left, accepted + 1), accepted if drafting else None
        left -= accepted + 1


class FakeVllm(ThreadingHTTPServer):
    """Serves on a free port unless one is given.

    Attributes:
        failures: of each question, what happens to it before it is answered: a status, or "cut", and the connection
            is closed in the middle of the answer; bytes are the answer's whole body; a list of bytes is sent with
            neither length nor haste, its last entry again and again.
        models: the body of what it serves, instead of its own; bytes, or a list of them as above.
        away: whether every other request is left without an answer.
        finish: of each question, why the answer ends.
        message: more of every chat message.
        messages: of each question, what is answered: more of its chat message.
        ids: the token ids of every answer, where they are asked for; None for a server that gives none.
        switch: the chat template's switch of thinking, of which the prompt's token ids depend.
        reads_calls: whether it was started with a parser of tool calls.
        delay: seconds before an answer, or before each of its pieces.
    """

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
        # by prompt: tokens, and accepted drafts
        self.plans: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        self.failures: dict[str, list] = {}
        self.finish: dict[str, str] = {}
        self.away = False
        self.message: dict[str, object] = {}
        self.messages: dict[str, dict[str, object]] = {}
        self.ids: list[int] | None = [5, 6, 7]
        self.switch: str | None = None
        self.reads_calls = True
        self.models: bytes | list[bytes] | None = None
        self.haste = 0.01  # seconds before each entry of a list of bytes
        self.seen: list[tuple[str, dict, dict[str, str]]] = []
        self.times: dict[str, list[float]] = {}
        self.joined = 0  # answers, from the next on, whose first two pieces come as one

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        rows = [
            f"vllm:generation_tokens_total{{{LABELS}}} {float(self.generated)}",
            "# a comment",
            "python_gc 7",
        ]
        if self.drafting:
            counts = {
                "num_drafts": self.passes,
                "num_draft_tokens": DRAFTS * self.passes,
                "num_accepted_tokens": sum(self.accepted_at),
            }
            rows += [
                f"vllm:spec_decode_{name}_total{{{LABELS}}} {float(value)}"
                for name, value in counts.items()
            ]
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
        if self.server.away:
            self.close_connection = True
        elif self.path == "/health":
            self._whole(200, "")
        elif self.path == "/metrics":
            self._whole(200, self.server.metrics())
        elif self.path == "/v1/models" and self.server.models is not None:
            self._raw(self.server.models)
        elif self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": "the-target"}]}))
        else:
            self._whole(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.server
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        with fake.lock:
            fake.bodies.append(body)
            fake.seen.append((self.path, body, dict(self.headers)))
            fake.times.setdefault(str(prompt), []).append(time.monotonic())
            fake.at_once += 1
            self.running = True
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
            failure = (
                fake.failures[prompt].pop(0)
                if isinstance(prompt, str) and fake.failures.get(prompt)
                else None
            )
        try:
            if len(prompt) > 100:
                self._whole(
                    400, json.dumps({"error": {"message": "the prompt\nis too long", "code": 400}})
                )
            elif body.get("tool_choice") == "auto" and not fake.reads_calls:
                why = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
                self._whole(400, json.dumps({"error": {"message": why, "code": 400}}))
            elif body.get("stream") and not isinstance(failure, bytes | list):
                self._stream(prompt, body, chat)
            else:
                time.sleep(fake.delay)
                self._done()  # before the answer: whoever reads it may ask again at once
                # whoever asked has left
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._answer(prompt, body, failure)
        finally:
            self._done()

    def _answer(self, prompt: str, body: dict, failure: Any) -> None:
        if failure == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
            self.close_connection = True
        elif isinstance(failure, bytes | list):
            self._raw(failure)
        elif failure is not None:
            self._whole(failure, json.dumps({"error": {"message": "not now"}}))
        else:
            self._whole(200, json.dumps(self._response(prompt, body)))

    def _response(self, prompt: str, body: dict) -> dict:
        fake, text = self.server, f"<{prompt}>"
        if "messages" not in body:
            return {
                "choices": [{"text": text, "finish_reason": "stop"}],
                "usage": _usage(len(text)),
            }
        message = {
            "role": "assistant",
            "content": text,
            **fake.message,
            **fake.messages.get(prompt, {}),
        }
        choice = {"message": message, "finish_reason": fake.finish.get(prompt, "stop")}
        if not body.get("return_token_ids") or fake.ids is None:
            return {"choices": [choice], "usage": _usage(len(text))}
        switched = body.get("chat_template_kwargs", {}).get(fake.switch)
        prompt_ids = [len(turn["content"] or "") for turn in body["messages"]] + (
            [] if switched is None else [switched]
        )
        choice["token_ids"] = fake.ids
        return {
            "choices": [choice],
            "prompt_token_ids": list(map(int, prompt_ids)),
            "usage": _usage(len(fake.ids)),
        }

    def _raw(self, body: bytes | list[bytes]) -> None:
        self.send_response(200)
        self.close_connection = True
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # whoever asked has left
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ValueError):
            for piece in (
                [body]
                if isinstance(body, bytes)
                else itertools.chain(body, itertools.repeat(body[-1]))
            ):
                self.wfile.write(piece)
                time.sleep(self.server.haste)

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
            self._event(
                {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": _usage(0)}
            )
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


def measure(argv: list[str]) -> None:
    """``vllm bench serve``: asks one prompt after another, and tells of it in vLLM's words."""
    parser = argparse.ArgumentParser()
    for name in (
        "base-url",
        "model",
        "dataset-path",
        "result-dir",
        "result-filename",
        "extra-body",
    ):
        parser.add_argument(f"--{name}")
    for name in ("custom-output-len", "num-prompts", "max-concurrency"):
        parser.add_argument(f"--{name}", type=int)
    args, _ = parser.parse_known_args(argv)
    with open(args.dataset_path) as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    prompts = list(itertools.islice(itertools.cycle(prompts), args.num_prompts))

    def counted() -> dict[str, float]:
        with urllib.request.urlopen(f"{args.base_url}/metrics") as response:
            lines = [
                line.rsplit(" ", 1) for line in response.read().decode().splitlines() if "{" in line
            ]
        return {name.replace(LABELS, ""): float(value) for name, value in lines}

    before, begin, texts, errors, ttfts, itls = counted(), time.perf_counter(), [], [], [], []
    for prompt in prompts:
        body = {
            "prompt": prompt,
            "max_tokens": args.custom_output_len,
            "stream": True,
            **json.loads(args.extra_body),
        }
        request = urllib.request.Request(
            f"{args.base_url}/v1/completions", json.dumps(body).encode()
        )
        start, pieces_at, text = time.perf_counter(), [], ""
        try:
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                        pieces_at.append(time.perf_counter())
                        text += choices[0]["text"]
            errors.append("")
        except urllib.error.HTTPError as error:
            errors.append(error.read().decode())
            pieces_at = [start]
        texts.append(text)
        ttfts.append(pieces_at[0] - start)
        itls.append([b - a for a, b in itertools.pairwise(pieces_at)])
    after = counted()
    change = {name: after[name] - before[name] for name in after}
    tokens = [args.custom_output_len if not error else 0 for error in errors]
    seconds = time.perf_counter() - begin
    ends = [first + sum(rest) for first, rest in zip(ttfts, itls, strict=True)]
    between = [sum(rest) / max(1, number - 1) for rest, number in zip(itls, tokens, strict=True)]
    result = {
        "completed": errors.count(""), "total_output_tokens": sum(tokens), "duration": seconds,
        "output_throughput": sum(tokens) / seconds, "mean_e2el_ms": 1e3 * sum(ends) / len(ends),
        "generated_texts": texts, "errors": errors, "max_concurrency": args.max_concurrency,
    }  # fmt: skip
    for name, values in (("ttft", ttfts), ("tpot", between)):
        result |= {
            f"median_{name}_ms": 1e3 * sorted(values)[len(values) // 2],
            f"p95_{name}_ms": 1e3 * max(values),
        }
    if passes := int(change.get("vllm:spec_decode_num_drafts_total{}", 0)):
        accepted = int(change["vllm:spec_decode_num_accepted_tokens_total{}"])
        positions = [value for name, value in change.items() if "per_pos" in name]
        result |= {
            "spec_decode_num_drafts": passes, "spec_decode_draft_tokens": DRAFTS * passes,
            "spec_decode_accepted_tokens": accepted, "spec_decode_acceptance_length": 1 + accepted / passes,
            "spec_decode_per_position_acceptance_rates": [value / passes for value in positions],
        }  # fmt: skip
    (Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))


def main() -> None:
    """``vllm serve TARGET ...``; what it was told, and its processes, go to the file that $FAKE_VLLM_SAID names."""
    if sys.argv[1:3] == ["bench", "serve"]:
        measure(sys.argv[3:])
        return
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
    draft.write_text(
        json.dumps({"argv": sys.argv[1:], "pids": [os.getpid(), worker.pid], "drafter": files})
    )
    draft.rename(said)
    if how in ("never", "deaf"):
        time.sleep(600)
    time.sleep(0.3)
    server = FakeVllm(drafting=args.speculative_config is not None, port=args.port, delay=0.005)
    if how == "differs" and not server.drafting:
        server.words = "other "
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if how == "fall":
        time.sleep(0.6)
        say("ValueError: fell")
        os._exit(4)
    while True:
        time.sleep(60)
