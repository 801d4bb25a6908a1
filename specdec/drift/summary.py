"""The few numbers that say whether a drafter drifts.

Legend: P prompts, C sums and weights in turn.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from specdec.drift.results import Array, Document, measured, sums_of
from specdec.evaluation.statistics import Statistic, ratio


def _growth(sums: Array) -> Array:
    return ratio(sums[..., 2:]) / ratio(sums[..., :2])


def _change(sums: Array) -> Array:
    return ratio(sums[..., 2:]) - ratio(sums[..., :2])


class Figure(NamedTuple):
    """A number of one drafter: a mean at some depths, or what becomes of it at others."""

    name: str
    title: str
    series: str
    depths: tuple[range, ...]
    """Counted from 0; the first, and where there is one the other, that is compared with it."""
    of: Statistic = ratio

    def sums(self, found: Document) -> Array:
        """(P, C)."""
        all_KP2 = sums_of(found, self.series)
        return np.concatenate([all_KP2[list(depths)].sum(0) for depths in self.depths], axis=1)


def figures(depths: int, trained_depth: int | None) -> Iterator[Figure]:
    """What is told of a measurement of so many depths."""
    first, last = range(1), range(depths - 1, depths)
    both, to = (first, last), f"step 1 to {depths}"
    yield Figure("state_rms_growth", f"RMS of the state, step {depths} over step 1", "state_rms", both, _growth)
    yield Figure("sink_mass_first", "Attention on the sink, step 1", "sink_mass", (first,))
    yield Figure("sink_mass_last", f"Attention on the sink, step {depths}", "sink_mass", (last,))
    yield Figure("sink_mass_change", f"Attention on the sink, {to}", "sink_mass", both, _change)
    yield Figure("own_mass_last", f"Attention on own drafts, step {depths}", "own_mass", (last,))
    yield Figure("entropy_change", f"Attention entropy in nats, {to}", "entropy", both, _change)
    yield Figure("kl_first", "KL(target || drafter) in nats, step 1", "kl", (first,))
    yield Figure("kl_last", f"KL(target || drafter) in nats, step {depths}", "kl", (last,))
    name = "conditional_acceptance"
    yield Figure("acceptance", f"Conditional acceptance, steps 1 to {depths}", name, (range(depths),))
    if trained_depth is None:
        return
    within, beyond = range(min(trained_depth, depths)), range(trained_depth, depths)
    yield Figure("acceptance_trained", f"Conditional acceptance, steps 1 to {len(within)} (trained)", name, (within,))
    if beyond:
        steps = f"steps {beyond.start + 1} to {depths} (beyond the trained depth)"
        yield Figure("acceptance_beyond", f"Conditional acceptance, {steps}", name, (beyond,))
        yield Figure("acceptance_change", "Conditional acceptance, beyond the trained depth less within", name, (within, beyond), _change)  # fmt: skip # noqa: E501


def summary(found: Document) -> dict[str, dict[str, Any]]:
    """Every figure by name with its title, mean and interval."""
    return {
        one.name: {"title": one.title, **measured(one.sums(found), one.of)}
        for one in figures(found["depths"], found["trained_depth"])
    }


def difference(found: Document, base: Document) -> dict[str, dict[str, Any]]:
    """Every figure that both have of the same steps, less the base's, paired by prompt.

    Within and beyond the trained depth are other steps where the trained depths differ.

    Raises:
        ValueError: they are not of the same prompts.
    """
    if found["prompts"] != base["prompts"]:
        raise ValueError("drift: the two drafters were not measured on the same prompts")
    theirs = {one.name: one for one in figures(base["depths"], base["trained_depth"])}
    out: dict[str, dict[str, Any]] = {}
    for one in figures(found["depths"], found["trained_depth"]):
        if (other := theirs.get(one.name)) and other.depths == one.depths:
            own_PC, base_PC = one.sums(found), other.sums(base)
            out[one.name] = {
                "title": one.title,
                **measured(np.concatenate([own_PC, base_PC], 1), _less(one, own_PC.shape[1])),
            }
    return out


def _less(figure: Figure, columns: int) -> Statistic:
    def of(sums: Array) -> Array:
        return figure.of(sums[..., :columns]) - figure.of(sums[..., columns:])

    return of
