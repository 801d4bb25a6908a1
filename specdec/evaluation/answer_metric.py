"""The base of the decoding metrics: answers of every batch, turn and process, and what is counted in them.

Legend: P prompts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import RESAMPLES, SEED, Array, Interval, Statistic, interval, ratio
from specdec.evaluation.table import Passes, Turns, per_prompt, tabulate

STATES = ("passes", "turns")


class AnswerMetric(Metric):
    """Base: what was decoded, gathered from all processes. All of these metrics keep the same.

    A process without an answer takes part. ``compute`` gives None, or an empty list, where nothing was measured.

    Args:
        categories: all categories of all processes' prompts; None tells none apart.
        seed: of the bootstrap.
        resamples: of the bootstrap.
    """

    full_state_update = False
    passes: list[Tensor] | Tensor
    turns: list[Tensor] | Tensor

    def __init__(self, categories: Sequence[str] | None = None, seed: int = SEED, resamples: int = RESAMPLES) -> None:
        super().__init__()
        self.categories = None if categories is None else list(categories)
        self.seed, self.resamples = seed, resamples
        for name in STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, answers: Sequence[Answer]) -> None:
        """Add answers, if any.

        Raises:
            ValueError: a category is not one of ``categories``.
        """
        for rows, name in zip(tabulate(answers, self.categories), STATES, strict=True):
            getattr(self, name).append(torch.from_numpy(rows).to(self.device))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather; torchmetrics would gather one dimension from a process that never had an answer, others two."""
        for rows, name in zip(tabulate([]), STATES, strict=True):
            if isinstance(state := getattr(self, name), list) and not state:
                state.append(torch.from_numpy(rows).to(self.device))
        super().sync(*args, **kwargs)

    def every_pass(self) -> Passes:
        """The passes of all answers."""
        return Passes(*_columns(self.passes, len(Passes._fields)))

    def every_turn(self) -> Turns:
        """All answers."""
        return Turns(*_columns(self.turns, len(Turns._fields)))

    def interval(self, sums_PF: Array, of: Statistic = ratio) -> Interval | None:
        """A statistic of all prompts' sums with its interval over prompts."""
        return interval(sums_PF, of, self.seed, self.resamples)

    def length(self, passes: Passes) -> Interval | None:
        """Tokens committed per pass."""
        return self.interval(per_prompt(passes.prompt, passes.accepted + 1, 1))

    def pooled_speedup(self, turns: Turns) -> Interval | None:
        """All tokens over all seconds, over the same of plain decoding."""
        return self.interval(measured(turns), speedup)


def measured(turns: Turns) -> Array:
    """Tokens, nanoseconds and both of plain decoding, of every prompt that has them all, (P, 4)."""
    sums_P4 = per_prompt(turns.prompt, *turns[2:])
    return sums_P4[(sums_P4 > 0).all(1)]


def speedup(sums: Array) -> Array:
    """Rate over rate, from the sums of :func:`measured`."""
    return (sums[..., 0] * sums[..., 3]) / (sums[..., 1] * sums[..., 2])


def _columns(state: list[Tensor] | Tensor, width: int) -> Any:
    rows = torch.cat(state) if isinstance(state, list) and state else state
    return (rows.cpu().numpy() if isinstance(rows, Tensor) else np.zeros((0, width), dtype=np.int64)).T
