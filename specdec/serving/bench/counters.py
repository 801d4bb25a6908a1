"""What vLLM counts of speculative decoding, from ``/metrics``: Prometheus' text.

A pass is a verification that had a draft to judge. Drafts that were accepted behind an answer's last token count too.
"""

import re
import time
from itertools import pairwise
from typing import Any, NamedTuple, Self

from specdec.serving.bench.endpoint import Endpoint

SETTLED = 5.0  # seconds: the server counts a little after it has answered
_LINE = re.compile(r"(vllm:\w+?)(?:_total)?(?:\{(.*)\})? (\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


class Counters(NamedTuple):
    """Since the server's start, over all its engines; differences of two of them are what happened between."""

    generated: int
    """Tokens of answers."""
    passes: int
    drafts: int
    accepted: int
    per_position: tuple[int, ...]
    """Passes that accepted at least so many drafts, from one on; empty without a drafter."""

    def since(self, before: Self) -> "Counters":
        """What was counted after ``before``."""
        old = before.per_position or (0,) * len(self.per_position)  # there are none before the first draft
        return Counters(
            self.generated - before.generated,
            self.passes - before.passes,
            self.drafts - before.drafts,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, old, strict=True)),
        )

    def told(self) -> dict[str, Any] | None:
        """Acceptance, JSON-ready, in the words of ``specdec evaluate``; None if nothing was drafted."""
        if not self.passes:
            return None
        return {
            "acceptance_length": 1 + self.accepted / self.passes,
            "draft_acceptance_rate": self.accepted / self.drafts,
            "accepted_per_position": {
                "joint": [count / self.passes for count in self.per_position],
                "conditional": [b / a if a else None for a, b in pairwise((self.passes, *self.per_position))],
            },
            "passes": self.passes,
            "drafts": self.drafts,
            "accepted": self.accepted,
            "accepted_at": list(self.per_position),
        }


def parse(text: str) -> Counters:
    """The counters in Prometheus' text; what is not there was not counted.

    Raises:
        ValueError: there is not even vLLM's counter of generated tokens.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        position = _POSITION.search(labels)
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos" and position:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if "vllm:generation_tokens" not in sums:
        raise ValueError("no counter vllm:generation_tokens in /metrics: is this vLLM, with its statistics on?")
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    passes, drafts, accepted = (int(sums.get(f"vllm:spec_decode_{name}", 0)) for name in names)
    per_position = tuple(int(positions[position]) for position in sorted(positions))
    return Counters(int(sums["vllm:generation_tokens"]), passes, drafts, accepted, per_position)


def read(endpoint: Endpoint) -> Counters:
    """The server's counters now.

    Raises:
        ValueError: it has none, or cannot be reached.
    """
    return parse(endpoint.text("/metrics"))


def settled(endpoint: Endpoint, before: Counters, tokens: int, patience: float = SETTLED) -> Counters:
    """The counters once they hold ``tokens`` generated ones more than before, or as they are after a while."""
    end = time.monotonic() + patience
    while (now := read(endpoint)).generated - before.generated < tokens and time.monotonic() < end:
        time.sleep(0.05)
    return now
