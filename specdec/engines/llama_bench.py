"""``specdec serve --bench --engine llama.cpp``: users ask a server for the same prompts, and its own times are read."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specdec.engines.client import Endpoint
from specdec.engines.llama import KEY, LlamaLaunch, complete
from specdec.engines.scrape import Counters, read_counters
from specdec.utils.files import write_json

ROUNDS = 4  # requests of each user, at least
ROOM = (
    80  # tokens of a slot's context beyond prompt and answer: drafts, and what llama.cpp keeps free
)


def for_bench(launch: LlamaLaunch, users: int, longest: int) -> LlamaLaunch:
    """Return the launch with a slot for each user, and the server's counters open."""
    extra = ("--metrics", *launch.extra)
    return replace(launch, slots=users, context=longest + ROOM, extra=extra)


@dataclass(frozen=True)
class LlamaBench:
    """Measures a llama.cpp server."""

    launch: LlamaLaunch
    prompts: Sequence[list[int]]  # as token ids
    max_new_tokens: int
    temperature: float
    ignore_eos: bool

    title: ClassVar[str] = "llama.cpp"

    def __call__(self, url: str, users: int, file: Path, scratch: Path) -> dict[str, Any]:
        """Return the results under this many users at a time, under the names of ``vllm bench serve``.

        Every prompt is asked at least once, and every user asks at least :data:`ROUNDS` times, after one request each
        that does not count.

        Args:
            file: gets the results, too.

        Raises:
            RequestError: a request has no answer.
        """
        endpoint = Endpoint(url, key=KEY)
        number = max(len(self.prompts), ROUNDS * users)
        asked = [self.prompts[n % len(self.prompts)] for n in range(number)]
        with ThreadPoolExecutor(users) as pool:
            list(pool.map(lambda prompt: self._ask(endpoint, prompt), asked[:users]))
            warm = read_counters(endpoint)
            begin = time.monotonic()
            answers = list(pool.map(lambda prompt: self._ask(endpoint, prompt), asked))
            seconds = time.monotonic() - begin
        results = summarize(answers, seconds)
        results |= acceptance(warm, read_counters(endpoint))
        results |= {
            "engine": self.launch.engine_name(endpoint),
            "target_gguf": str(self.launch.file),
        }
        write_json(file, results)
        return results

    def _ask(self, endpoint: Endpoint, prompt: list[int]) -> dict[str, Any]:
        return complete(endpoint, prompt, self.max_new_tokens, self.temperature, self.ignore_eos)


def summarize(answers: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return throughput and latencies; the times of each request are llama.cpp's own, without its wait for a slot."""
    first = [answer["timings"]["prompt_ms"] for answer in answers]
    between = [answer["timings"]["predicted_per_token_ms"] for answer in answers]
    tokens = sum(len(answer["tokens"]) for answer in answers)
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(answers),
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds,
        "generated_texts": [answer["content"] for answer in answers],
        "generated_tokens": [answer["tokens"] for answer in answers],
        "errors": ["" for _ in answers],
    }
    for kind, times in (("ttft", first), ("tpot", between)):
        results[f"median_{kind}_ms"] = float(np.median(times))
        results[f"p95_{kind}_ms"] = float(np.percentile(times, 95))
    return results


def acceptance(first: Counters, last: Counters) -> dict[str, Any]:
    """Return the acceptance length with the bonus token, and the accepted share by draft position.

    Empty without drafts.
    """
    grown = last.since(first)
    if grown is None or not grown.passes:
        return {}
    return {
        "spec_decode_acceptance_length": grown.length,
        "spec_decode_per_position_acceptance_rates": grown.shares(),
    }
