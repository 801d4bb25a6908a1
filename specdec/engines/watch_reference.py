"""What a drafter's acceptance is compared with: an evaluation, or the first passes of the server itself.

Legend: P prompts, or windows of a server; K draft positions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.decoding.parse import parse_shape
from specdec.evaluation.compare import evaluations_in, read_evaluation
from specdec.evaluation.metrics import (
    Answer,
    histogram,
    passes_reaching,
    per_prompt,
    target_passes,
)
from specdec.report.statistics import LENGTH, SHARE, Array, Interval, interval
from specdec.report.tables import with_interval


class Reference(NamedTuple):
    """Acceptance with 95 % intervals."""

    name: str
    length: Interval  # tokens per pass, bonus token included
    by_position: list[Interval]  # (K,) shares of passes that accepted at least 1, ..., K drafts
    variance: float  # of the mean of accepted drafts per pass, times the passes

    @property
    def low(self) -> float:
        """The least number of accepted drafts per pass that the interval holds."""
        assert self.length.low is not None
        return self.length.low - 1

    def __str__(self) -> str:
        shares = " ".join(
            with_interval(*share, lambda part: f"{100 * part:.0f}") for share in self.by_position
        )
        positions = f"; by position, %: {shares}" if shares else ""
        return f"{self.name}: {with_interval(*self.length, '{:.2f}'.format)} tokens per pass{positions}"


def reference_of(name: str, sums_PF: Array) -> Reference:
    """Return the reference that sums over prompts, or over windows, give.

    Args:
        sums_PF: passes, accepted drafts, and passes that accepted at least 1, ..., K; (P, 2 + K).

    Raises:
        ValueError: there are fewer than two rows with a pass, or next to nothing was accepted.
    """
    sums_PF = sums_PF[sums_PF[:, 0] > 0]
    passes_P = sums_PF[:, 0]
    accepted_P = sums_PF[:, 1]
    length = interval(np.stack([passes_P + accepted_P, passes_P], axis=1), bounds=LENGTH)
    if length is None or length.low is None:
        raise ValueError(
            f"{name}: an interval takes at least two prompts that came to a target pass"
        )
    if length.low <= 1:
        shown = with_interval(*length, "{:.2f}".format)
        raise ValueError(
            f"{name}: acceptance length {shown}: it cannot fall below an interval that begins at 1"
        )
    positions = [interval(sums_PF[:, [k, 0]], bounds=SHARE) for k in range(2, sums_PF.shape[1])]
    # of a ratio of sums, linearized: passes of one prompt are alike, prompts are not
    residual_P = accepted_P - (length.mean - 1) * passes_P
    variance = len(passes_P) / (len(passes_P) - 1) * float((residual_P**2).sum() / passes_P.sum())
    return Reference(name, length, [share for share in positions if share], variance)


def read_reference(directory: Path, shape: str | None) -> Reference:
    """Return the reference that an evaluation gives.

    Args:
        directory: of ``specdec evaluate``, or one that holds one such.
        shape: the draft shape, as ``chain:depth=3``; None if there is one alone.

    Raises:
        ValueError: there is no evaluation, or several, or none of this shape; or this is no shape.
    """
    places = evaluations_in(directory)
    if len(places) > 1:
        names = ", ".join(str(place) for place in places.values())
        raise ValueError(f"--reference {directory} holds several evaluations, give one: {names}")
    (place,) = places.values()
    answers = read_evaluation(place).answers
    if shape is None and len(answers) > 1:
        raise ValueError(
            f"{place} has several draft shapes: choose one with --reference_shape: {', '.join(answers)}"
        )
    chosen = shape or next(iter(answers))
    if chosen not in answers:
        chosen = parse_shape(chosen).name
    if chosen not in answers:
        raise ValueError(f"{place} has no draft shape {chosen}: it has {', '.join(answers)}")
    return reference_of(f"{place}, {chosen}", _sums(answers[chosen]))


def _sums(answers: Sequence[Answer]) -> Array:
    """Return the sums over prompts that :func:`reference_of` takes."""
    positions = range(1, len(histogram(answers)))
    return per_prompt(
        answers,
        target_passes,
        lambda answer: sum(answer.accepted),
        *map(passes_reaching, positions),
    )
