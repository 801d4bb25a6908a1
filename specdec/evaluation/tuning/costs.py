"""What the parts of a round cost on this machine, in plain passes of the same batch and kind."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from specdec.decoding import Generation, PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.tuning.shape import Shape
from specdec.target import Target

TIMED_TOKENS = 17
# each width at two depths, so that steps and the rest can be told apart, and numbers of nodes all over the range
EAGER = (
    *(Shape(1, depth, depth) for depth in (1, 2, 3, 5, 7)),
    Shape(2, 3, 7), Shape(2, 6, 11),
    Shape(3, 3, 15), Shape(3, 6, 23),
    Shape(4, 3, 19), Shape(4, 6, 31),
    Shape(8, 2, 27), Shape(8, 6, 48),
)  # fmt: skip
COMPILED = (*(Shape(1, depth, depth) for depth in (1, 3, 7)), Shape(4, 3, 15), Shape(4, 6, 31))


class Timing(NamedTuple):
    """Milliseconds of one shape's parts, medians over passes."""

    shape: Shape
    draft_ms: float
    verify_ms: float


class Costs(NamedTuple):
    """Parts of a round over a plain pass, all at one batch size."""

    batch: int
    plain_ms: float
    verify: dict[int, float]
    """v at the measured numbers of verified nodes, the root included; v(1) is 1."""
    step: dict[int, float]
    """c: a draft step of so many nodes."""
    rest: float
    """o: what drafting takes beside its steps."""
    misfit: float
    """Largest gap between a shape's drafting and what steps and rest come to, in plain passes."""

    def v(self, nodes: int) -> float:
        """Verifying so many nodes, the root included: measured, or on the line between the two next to it."""
        return _between(self.verify, nodes)

    def c(self, top_k: int) -> float:
        """A draft step of so many nodes, likewise."""
        return _between(self.step, top_k)

    def drafting(self, shape: Shape) -> float:
        """d steps, the first of them of the last token alone: d * c."""
        return self.c(1) + (shape.depth - 1) * self.c(shape.top_k)

    @property
    def most_nodes(self) -> int:
        """The most draft nodes whose verification was measured."""
        return max(self.verify) - 1


def ladder(compiled: bool, draft_vocab_size: int) -> list[Shape]:
    """The shapes to time; fewer where each is a graph to compile."""
    return [shape for shape in (COMPILED if compiled else EAGER) if shape.top_k <= draft_vocab_size]


def fit_costs(batch: int, plain_ms: float, timings: Sequence[Timing]) -> Costs:
    """Least squares for the draft steps: drafting = o + c_1 + (depth - 1) c_K, in plain passes.

    Args:
        timings: of chains of two depths at least; each other width adds a step cost.
    """
    verify: dict[int, list[float]] = {}
    for timing in timings:
        verify.setdefault(timing.shape.nodes + 1, []).append(timing.verify_ms / plain_ms)
    widths = sorted({1, *(timing.shape.top_k for timing in timings)})
    rows = []
    for shape in (timing.shape for timing in timings):
        row = {"rest": 1.0, 1: 1.0}
        row[shape.top_k] = row.get(shape.top_k, 0.0) + shape.depth - 1
        rows.append([row.get(name, 0.0) for name in ("rest", *widths)])
    steps = torch.tensor(rows, dtype=torch.float64)
    times = torch.tensor([timing.draft_ms / plain_ms for timing in timings], dtype=torch.float64)
    found = torch.linalg.lstsq(steps, times[:, None], driver="gelsd").solution[:, 0]
    return Costs(
        batch,
        plain_ms,
        {1: 1.0} | {nodes: median(times) for nodes, times in sorted(verify.items())},
        {k: max(0.0, c) for k, c in zip(widths, found[1:].tolist(), strict=True)},
        float(found[0]),
        float((steps @ found - times).abs().max()),
    )


def measure_costs(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    plain: PlainDecoder,
    repeats: int,
    on_call: Callable[[], None] = lambda: None,
    longest: int = 0,
) -> Costs:
    """Time every shape of the ladder and plain decoding in turn, ``repeats`` times after a call that does not count.

    Args:
        requests: one for each sequence of the batch.
        plain: whose batch and kind are meant.
        on_call: called after each call of a decoder.
        longest: tokens of a text that compiled decoders are to have room for.
    """
    order = ladder(plain.compiled, drafter.config.draft_vocab_size)
    decoders = [
        SpeculativeDecoder(target, drafter, shape.growth, batch=plain.batch, compiled=plain.compiled) for shape in order
    ]
    for decoder in (plain, *decoders):
        decoder.prepare(longest)
    plain_ms: list[float] = []
    draft_ms: list[list[float]] = [[] for _ in order]
    verify_ms: list[list[float]] = [[] for _ in order]
    for repeat in range(repeats + 1):
        parts = _times(plain, requests)
        on_call()
        if repeat:
            plain_ms += map(sum, zip(*parts, strict=True))
        for decoder, drafts, passes in zip(decoders, draft_ms, verify_ms, strict=True):
            parts = _times(decoder, requests)
            on_call()
            if repeat:
                drafts += parts[0]
                passes += parts[1]
    timings = [Timing(*row) for row in zip(order, map(median, draft_ms), map(median, verify_ms), strict=True)]
    return fit_costs(plain.batch, median(plain_ms), timings)


def timed_requests(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], batch: int, max_new_tokens: int
) -> list[Request]:
    """Texts to time a batch on, from short prompts to long, of one the middle one; with half of the answer."""
    timed = min(TIMED_TOKENS, max_new_tokens)
    given = (max_new_tokens - timed) // 2
    texts = sorted(
        (prompt + answer[:given] for prompt, answer in zip(prompts, answers, strict=True)), key=lambda ids: len(ids)
    )
    return [Request(texts[(2 * b + 1) * len(texts) // (2 * batch)], timed) for b in range(batch)]


def _times(decoder: PlainDecoder, requests: Sequence[Request]) -> tuple[list[float], list[float]]:
    """Milliseconds of drafting and of verification, pass by pass."""
    made: list[Generation] = [generation for _, generation in decoder.generate_all(requests)]
    longest = max(made, key=lambda generation: len(generation.verify_ms))  # it was there in all passes
    return list(longest.draft_ms), list(longest.verify_ms)


def _between(points: dict[int, float], at: int) -> float:
    known = sorted(points)
    if not known[0] <= at <= known[-1]:
        raise ValueError(f"{at} lies outside what was measured, {known[0]} to {known[-1]}")
    right = next(x for x in known if x >= at)
    left = max(x for x in known if x <= at)
    part = 0.0 if left == right else (at - left) / (right - left)
    return points[left] + part * (points[right] - points[left])
