"""One system's answers and its figures."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.decoding.systems import Entry
from benchmarks.serving import OTHERS

RESAMPLES = 5000


class Round(NamedTuple):
    """One of specdec's rounds after the prompt, on average, in ms."""

    count: int
    wall: float
    draft: float
    verify: float  # the target's pass with acceptance and commit
    accept: float | None  # of that, all but the model; None where it was not measured
    call: float | None  # of a graph of acceptance's tensors that does nothing; likewise
    host: float  # neither drafting nor verifying
    graphs: int  # drafting, if there is any, and verification

    @property
    def overhead(self) -> float | None:
        """Share of the round outside the two models' graphs, and so without the calls of these."""
        return None if self.accept is None else (self.accept + self.host) / self.wall

    @property
    def with_calls(self) -> float | None:
        """The same with them."""
        if self.overhead is None or self.call is None:
            return None
        return self.overhead + self.graphs * self.call / self.wall


class Ratio(NamedTuple):
    """How many times as fast, with its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass
class Measured:
    """What a worker said."""

    entry: Entry
    about: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)  # by set and prompt, of every repeat

    def add(self, name: str, prompt: int, answer: dict[str, Any]) -> None:
        """An answer to a prompt of a set; prompts come in order."""
        found = self.answers.setdefault(name, [])
        if prompt == len(found):
            found.append([])
        found[prompt].append(answer)

    def seconds(self, name: str, of: str = "seconds") -> list[float]:
        """Wall time of every prompt, the median of its repeats."""
        return [statistics.median(answer[of] for answer in answers) for answers in self.answers[name]]

    def ids(self, name: str) -> list[list[int]]:
        """The text of every prompt."""
        return [answers[0]["ids"] for answers in self.answers[name]]

    def rate(self, name: str) -> float:
        """Tokens/s, prompts included."""
        return sum(map(len, self.ids(name))) / sum(self.seconds(name))

    def rate_after(self, name: str) -> float:
        """Tokens/s of those after the first, in the time after it."""
        after = sum(self.seconds(name)) - sum(self.seconds(name, "first_seconds"))
        return sum(len(ids) - 1 for ids in self.ids(name)) / after

    def acceptance(self, name: str) -> float:
        """Tokens that a pass of the target gave."""
        every = self._all(name)
        return sum(a["committed"] for a in every) / sum(a["passes"] for a in every)

    def round(self, name: str) -> Round | None:
        """Where a round's time goes; None for systems that do not say."""
        every = self._all(name)
        count = sum(a["passes"] for a in every)
        if not count or every[0]["draft_ms"] is None:
            return None
        wall = sum(1e3 * a["seconds"] - a["prompt_ms"] for a in every) / count
        draft, verify = (sum(a[part] for a in every) / count for part in ("draft_ms", "verify_ms"))
        accept, call = (
            statistics.fmean(a[k] for a in every) if k in every[0] else None for k in ("accept_ms", "call_ms")
        )
        graphs = 1 + ("growth" in self.entry.options)
        return Round(count, wall, draft, verify, accept, call, wall - draft - verify, graphs)

    def disturbed(self, name: str) -> int:
        """Answers during which others used more than ``OTHERS`` of the machine."""
        return sum(a["others"] > OTHERS for a in self._all(name))

    def _all(self, name: str) -> list[dict[str, Any]]:
        return [answer for answers in self.answers[name] for answer in answers]

    def to_json(self, reference: "Measured") -> dict[str, Any]:
        """Everything but the texts; ``equal_tokens`` compares these with the reference's."""
        sets = {}
        for name, prompts in self.answers.items():
            raw = [[{k: v for k, v in answer.items() if k != "ids"} for answer in answers] for answers in prompts]
            found = self.round(name)
            sets[name] = {
                "tokens_per_second": self.rate(name),
                "tokens_per_second_after_first": self.rate_after(name),
                "acceptance_length": self.acceptance(name),
                "round": None if found is None else found._asdict() | {"overhead": found.overhead},
                "equal_tokens": equal_tokens(self.ids(name), reference.ids(name)),
                "answers": raw,
            }
        return {**self.entry._asdict(), "about": self.about, "sets": sets}


def equal_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[int]:
    """Of every text the tokens before the first that differs."""
    return [
        next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(ours, theirs, strict=True)
    ]


def ratio(one: Measured, other: Measured, name: str) -> Ratio:
    """How many times as fast ``one`` is, pooled over prompts; these are drawn anew in every resample, for both."""
    ours_P, theirs_P = np.array(one.seconds(name)), np.array(other.seconds(name))
    at_RP = np.random.default_rng(0).integers(len(ours_P), size=(RESAMPLES, len(ours_P)))
    low, high = np.percentile(theirs_P[at_RP].sum(1) / ours_P[at_RP].sum(1), [2.5, 97.5])
    return Ratio(float(theirs_P.sum() / ours_P.sum()), float(low), float(high))
