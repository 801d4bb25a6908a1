"""How much of the clean acceptance is kept, with intervals that draw prompts, the same for all that is compared.

With C tokens committed in N target passes, c and n in the clean run, all of the same prompts:

- acceptance length kept = (C / N) / (c / n), at least n / c, since a pass commits the bonus token in any case;
- accepted drafts kept = (C / N - 1) / (c / n - 1), without that token: 0 where no draft is accepted any more.

Legend: P prompts, M conditions, K drafters.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import RESAMPLES, SEED, Array, Interval, interval, ratio

Counts = dict[str, tuple[int, int]]
"""Committed tokens and target passes of every prompt, by its id."""
Share = Callable[[Array, Array], Array]
"""From sums under a condition and clean, (..., 2) each, to what is kept, (...)."""


class Kept(NamedTuple):
    """Of one drafter under one condition."""

    prompts: int  # that came to a target pass in both runs
    acceptance_length: Interval | None
    length_kept: Interval | None
    drafts_kept: Interval | None


def counts(answers: Sequence[Answer]) -> Counts:
    """What every prompt came to, its turns together."""
    found: Counts = {}
    for one in answers:
        committed, passes = found.get(one.prompt_id, (0, 0))
        found[one.prompt_id] = (committed + sum(one.accepted) + len(one.accepted), passes + len(one.accepted))
    return found


def length_share(sums: Array, clean: Array) -> Array:
    """Acceptance length over the clean one."""
    return ratio(sums) / ratio(clean)


def drafts_share(sums: Array, clean: Array) -> Array:
    """Accepted drafts of a pass over those of the clean run."""
    return (ratio(sums) - 1) / (ratio(clean) - 1)


def kept(under: Counts, clean: Counts) -> Kept:
    """What is kept under one condition."""
    rows_P4 = together([under, clean])
    shares = [_interval(rows_P4, partial(_share, of=of)) for of in SHARES.values()]
    return Kept(len(rows_P4), _interval(rows_P4, ratio), *shares)


def _share(sums: Array, of: Share) -> Array:
    return of(sums[..., :2], sums[..., 2:])


def difference(a: tuple[Counts, Counts], b: tuple[Counts, Counts], of: Share) -> Interval | None:
    """What drafter B keeps less what A keeps, each of its own clean run; counts under the condition, then clean."""
    return mean_difference([(a[0], b[0])], (a[1], b[1]), of)


def mean_difference(under: Sequence[tuple[Counts, Counts]], clean: tuple[Counts, Counts], of: Share) -> Interval | None:
    """The mean of it over several conditions, of prompts that all of them have; A and B of each, and clean."""
    rows = together([*(one for pair in under for one in pair), *clean])

    def less(sums: Array) -> Array:
        wide = sums.reshape(*sums.shape[:-1], len(under) + 1, 2, 2)  # (..., condition or clean, drafter, sum)
        share = of(wide[..., :-1, :, :], wide[..., -1:, :, :])
        return (share[..., 1] - share[..., 0]).mean(-1)

    return _interval(rows, less)


def mean_kept(under: Sequence[Counts], clean: Counts, of: Share) -> Interval | None:
    """The mean of what is kept over several conditions, of prompts that all of them have."""

    def mean(sums: Array) -> Array:
        wide = sums.reshape(*sums.shape[:-1], len(under) + 1, 2)
        return of(wide[..., :-1, :], wide[..., -1:, :]).mean(-1)

    return _interval(together([*under, clean]), mean)


def together(columns: Sequence[Counts]) -> Array:
    """The sums of all side by side, (P, 2 x columns), of prompts that have a target pass in each."""
    names = [name for name in columns[0] if all(one.get(name, (0, 0))[1] > 0 for one in columns)]
    return np.array([[value for one in columns for value in one[name]] for name in names], dtype=np.float64).reshape(
        len(names), 2 * len(columns)
    )


def _interval(rows_PF: Array, of: Callable[[Array], Array]) -> Interval | None:
    """None where the statistic has no value; no bounds where some choice of prompts has none: 0 of 0 drafts kept."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if not len(rows_PF) or not np.isfinite(mean := float(of(rows_PF.sum(0)))):
            return None
        if not np.isfinite(of(rows_PF.sum(0) - rows_PF)).all():
            return Interval(mean, None, None)
        found = interval(rows_PF, of, SEED, RESAMPLES)
    assert found is not None
    if found.low is None or found.high is None or not np.isfinite([found.low, found.high]).all():
        return Interval(mean, None, None)
    return found


SHARES: dict[str, Share] = {"length_kept": length_share, "drafts_kept": drafts_share}
"""What :class:`Kept` holds of each."""
