"""A measured run of one shape beside plain decoding, to hold the prediction against."""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from specdec.decoding import Generation, PlainDecoder, Request, SpeculativeDecoder


class Trial(NamedTuple):
    """Of one shape at one batch size."""

    predicted: float
    measured: float
    """Speed-up over the passes alone: tokens per pass times a plain pass over a pass with drafting, medians of both."""
    calls: float
    """Speed-up over whole calls: the prompts, the host's work and the batch's last, half-empty rounds too."""
    acceptance_length: float
    prompts: int
    passes: int

    @property
    def error(self) -> float:
        """Of the prediction, in percent of what was measured."""
        return 100 * (self.predicted / self.measured - 1)


def measure_trial(
    decoder: SpeculativeDecoder,
    plain: PlainDecoder,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    predicted: float,
    *,
    end: Sequence[int] = (),
    on_group: Callable[[], None] = lambda: None,
) -> Trial:
    """Decode group by group, plainly and with drafts in turn, after an untimed call of each.

    Args:
        prompts: token ids; those of :func:`groups`.
        on_group: called after each group.
    """
    requests = groups(prompts, decoder.batch, max_new_tokens)
    for one in (plain, decoder):
        if one.compiled:
            one.prepare(max(map(len, prompts)) + max_new_tokens)
        else:
            list(one.generate_all(requests[0][: one.batch]))
    plain_run, run = Run(), Run()
    for number, group in enumerate(requests):
        turns = [(plain, plain_run), (decoder, run)]
        for one, of in turns if number % 2 else turns[::-1]:
            begin = time.perf_counter()
            made = [generation for _, generation in one.generate_all(group, end)]
            of.add(made, time.perf_counter() - begin)
        on_group()
    return Trial(
        predicted,
        run.tokens / run.passes * median(plain_run.pass_ms) / median(run.pass_ms),
        run.new / run.seconds / (plain_run.new / plain_run.seconds),
        run.tokens / run.passes,
        sum(map(len, requests)),
        run.passes,
    )


class Run:
    """What one decoder did."""

    def __init__(self) -> None:
        self.new = self.tokens = self.passes = 0
        self.seconds = 0.0
        self.pass_ms: list[float] = []

    def add(self, made: Iterable[Generation], seconds: float) -> None:
        """A call that took so long; a pass counts once for each sequence in it."""
        self.seconds += seconds
        for one in made:
            self.new += len(one.ids)
            self.passes += len(one.accepted)
            self.tokens += sum(one.accepted) + len(one.accepted)
            self.pass_ms += map(sum, zip(one.draft_ms, one.verify_ms, strict=True))


def groups(prompts: Sequence[list[int]], batch: int, max_new_tokens: int) -> list[list[Request]]:
    """The prompts in groups of two for each sequence, two groups at least; where prompts run out they come again."""
    size = 2 * batch
    count = max(2, -(-len(prompts) // size))
    return [
        [Request(prompts[(number * size + i) % len(prompts)], max_new_tokens) for i in range(size)]
        for number in range(count)
    ]
