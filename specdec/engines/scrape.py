"""What a running server's ``/metrics`` page says of its drafter, in vLLM, SGLang and llama.cpp alike.

Legend: K drafts a pass. A pass is one verification by the target: what vLLM and llama.cpp call a draft.
"""

import itertools
import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from specdec.engines.client import KEY, Endpoint, RequestError

LLAMA_KEY = "LLAMA_API_KEY"  # llama.cpp's own variable
TIMEOUT = 10.0  # seconds for a page
PREFIXES = {"vLLM": "vllm:", "llama.cpp": "llamacpp:"}
SGLANG = "sglang:"
# a sample of https://prometheus.io/docs/instrumenting/exposition_formats: a label's value may hold braces
SAMPLE = re.compile(
    r'^([\w:]+)(?:\{((?:[^"}\n]|"(?:\\.|[^"\\\n])*")*)\})? +([-+.\w]+)(?: -?\d+)?$', re.MULTILINE
)
LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
HOW = (
    "vLLM counts drafts when it serves a --speculative-config, llama.cpp with --metrics, SGLang with --enable-metrics "
    "and a --speculative-algorithm"
)


class Counters(NamedTuple):
    """What a server has counted since it started, or between two pages."""

    engine: str
    passes: float
    accepted: float  # drafts, bonus tokens excluded
    # (K,) passes that accepted at least 1, ..., K drafts; empty if not counted
    by_position: tuple[float, ...]
    started: float = 0.0  # Unix time; 0 where the page does not say

    @property
    def length(self) -> float:
        """Acceptance length: tokens per pass, the target's own (bonus) token included; NaN without a pass."""
        return 1 + self.accepted / self.passes if self.passes else math.nan

    def shares(self) -> list[float]:
        """Return the share of passes that accepted at least 1, ..., K drafts."""
        return [count / self.passes for count in self.by_position if self.passes]

    def add(self, more: "Counters") -> "Counters":
        """Return the sum of two spans of time."""
        return self._combined(more, 1)

    def since(self, before: "Counters") -> "Counters | None":
        """Return what was counted since an earlier page; None if the server has started again in between."""
        grown = self._combined(before, -1)
        same = (self.engine, self.started) == (before.engine, before.started)
        if not same or min((grown.passes, *grown.by_position)) < 0:
            return None
        # SGLang's is a difference of counters: it falls when a request ends without a token
        return grown._replace(accepted=max(0.0, grown.accepted))

    def _combined(self, other: "Counters", sign: int) -> "Counters":
        positions = itertools.zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return self._replace(
            passes=self.passes + sign * other.passes,
            accepted=self.accepted + sign * other.accepted,
            by_position=tuple(a + sign * b for a, b in positions),
        )


def metrics_endpoint(url: str) -> Endpoint:
    """Return the server, with the key that the environment has for vLLM, else for llama.cpp."""
    key = KEY if os.environ.get(KEY) or not os.environ.get(LLAMA_KEY) else LLAMA_KEY
    return Endpoint(url.rstrip("/").removesuffix("/metrics"), TIMEOUT, key)


def read_counters(endpoint: Endpoint) -> Counters:
    """Ask a server for its counters.

    Raises:
        RequestError: there is no answer.
        ValueError: the server needs another key, or its page has no counters of speculative decoding.
    """
    try:
        counters = parse_page(endpoint.text("/metrics"))
    except RequestError as error:
        if error.status == 404:
            raise ValueError(f"{endpoint.url} has no page /metrics: {HOW}") from error
        if error.status in (401, 403):
            if os.environ.get(endpoint.key):
                raise ValueError(f"{error}; ${endpoint.key} is another server's key") from error
            raise ValueError(f"{error}; set ${KEY} or ${LLAMA_KEY} to the server's key") from error
        raise
    if counters is None:
        raise ValueError(f"{endpoint.url}/metrics has no counters of speculative decoding: {HOW}")
    return counters


def parse_page(text: str) -> Counters | None:
    """Return the counters on a page of any of the engines, summed over replicas; None if there are none.

    Raises:
        ValueError: a counter is no number that a counter can have.
    """
    sums: dict[tuple[str, int | None], float] = {}
    for name, labels, value in SAMPLE.findall(text):
        if not name.startswith((*PREFIXES.values(), SGLANG)):
            continue
        position = dict(LABEL.findall(labels)).get("position", "")
        key = (name, int(position) if position.isdecimal() else None)
        sums[key] = sums.get(key, 0.0) + _number(value)
    for engine, prefix in PREFIXES.items():
        if (f"{prefix}spec_decode_num_drafts_total", None) in sums:
            return _checked(_drafts(engine, f"{prefix}spec_decode_num_", sums))
    if any(name.startswith(SGLANG) for name, _ in sums):
        counters = _sglang(sums)
        return _checked(counters) if counters else None
    return None


def _number(text: str) -> float:
    """Return a sample's value; NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _drafts(engine: str, prefix: str, sums: Mapping[tuple[str, int | None], float]) -> Counters:
    """Return the counters of vLLM or llama.cpp, which have one set of names."""
    per_position = f"{prefix}accepted_tokens_per_pos_total"
    positions = sorted(
        position for name, position in sums if name == per_position and position is not None
    )
    return Counters(
        engine,
        sums[f"{prefix}drafts_total", None],
        sums.get((f"{prefix}accepted_tokens_total", None), 0.0),
        tuple(sums[per_position, position] for position in positions),
        sums.get((f"{prefix}drafts_created", None), 0.0),
    )


def _sglang(sums: Mapping[tuple[str, int | None], float]) -> Counters | None:
    """Return SGLang's counters, which grow when a request ends; it has none by position.

    None if it generates tokens without a verification: it does not speculate, or is too old to count it.

    A request's first token comes from its prompt, each further one from a pass, which gives its bonus token and the
    accepted drafts.
    """
    tokens, requests, passes = (
        sums.get((f"{SGLANG}{name}_total", None), 0.0)
        for name in ("generation_tokens", "num_requests", "spec_verify_calls")
    )
    if not passes and tokens > requests:
        return None
    accepted = max(0.0, tokens - requests - passes) if passes else 0.0
    return Counters("SGLang", passes, accepted, ())


def _checked(counters: Counters) -> Counters:
    numbers = (counters.passes, counters.accepted, *counters.by_position)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"a counter of {counters.engine} is negative or no number: {numbers}")
    return counters
