"""The numbers that a measurement of drift comes down to: means at some draft steps, and how a series changes.

Legend: K draft steps, P prompts.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from specdec.diagnostics.drift_measure import SERIES, Document
from specdec.report.statistics import Array, Statistic, less, measured, over, possible, ratio

CHANGES = {  # of a series over the draft steps, and how their titles end
    "growth": "step {} over step 1",
    "late_growth": "step {} over step 2",
    "change": "change from step 1 to {}",
    "rise": "rise per step from step 2 to {}",
}
LEAST_STEPS = {"late_growth": 3, "rise": 3}
HOW: dict[str, Statistic] = {"mean": ratio, "ratio": over, "difference": less}


def sums_of(drift: Document, name: str) -> Array:
    """Return a series' sums over chains, and over how many, (K, P, 2)."""
    series = drift["series"][name]
    weights_KP = np.array(series["weights"], dtype=np.float64)
    values_KP = np.array([[value or 0.0 for value in row] for row in series["values"]])
    return np.stack([values_KP * weights_KP, weights_KP], axis=-1)


class DriftFigure(NamedTuple):
    """A number of one drafter: a mean at some steps, alone or compared with that at others."""

    name: str
    title: str
    series: str
    depths: tuple[range, ...]  # steps counted from 0, and those that they are compared with, if any
    unit: str
    how: Literal["mean", "ratio", "difference"] = "mean"
    null: float | None = None  # its value without drift, if known
    per: int = 1  # steps that a difference is divided by

    def columns(self, sums_KP2: Array) -> Array:
        """Return sums and weights at the steps, then at those that they are compared with, (P, 2) or (P, 4)."""
        columns = [sums_KP2[list(depths)].sum(0) / [self.per, 1] for depths in self.depths]
        return np.concatenate(columns, axis=1)


def change_figure(
    name: str, kind: str, series: str, title: str, unit: str, last: int
) -> DriftFigure:
    """Return a figure of how a series changes over the draft steps.

    Step 1 reads the target's feature, later steps what the drafter made: ``late_growth`` and ``rise`` leave it out.

    Args:
        kind: of :data:`CHANGES`.
        last: the last step.
    """
    at_first = range(1)
    at_second = range(1, 2)
    at_last = range(last - 1, last)
    title = f"{title}, {CHANGES[kind].format(last)}"
    if kind == "growth":
        return DriftFigure(name, title, series, (at_last, at_first), "ratio", "ratio", 1.0)
    if kind == "late_growth":
        return DriftFigure(name, title, series, (at_last, at_second), "ratio", "ratio", 1.0)
    is_difference = unit.startswith("difference")
    difference = unit if is_difference else f"difference of {unit.replace('share', 'shares')}"
    if kind == "change":
        steps = (at_last, at_first)
        return DriftFigure(name, title, series, steps, difference, "difference", 0.0)
    steps = (at_last, at_second)
    return DriftFigure(
        name, title, series, steps, f"{difference} per step", "difference", 0.0, last - 2
    )


def drift_figures(depths: int, trained_depth: int | None) -> Iterator[DriftFigure]:
    """Yield the figures of a measurement of this many steps."""
    first = range(1)
    last = range(depths - 1, depths)
    for name in ("out_rms", "state_rms"):
        for kind in ("growth", "late_growth", "rise"):
            if depths >= LEAST_STEPS.get(kind, 1):
                yield change_figure(f"{name}_{kind}", kind, name, *SERIES[name], depths)
    for name in ("sink_mass", "own_mass", "sink_own_mass", "strongest_mass", "update"):
        title, unit = SERIES[name]
        yield DriftFigure(f"{name}_last", f"{title}, step {depths}", name, (last,), unit)
        # an update of step 1 is that of the target's feature
        if name not in ("sink_own_mass", "update"):
            yield change_figure(f"{name}_change", "change", name, title, unit, depths)
    for when, step in (("first", first), ("last", last)):
        title = f"{SERIES['kl'][0]}, step {step.stop}"
        yield DriftFigure(f"kl_{when}", title, "kl", (step,), "nats")
    name = "conditional_acceptance"
    title, unit = SERIES[name]
    yield DriftFigure(
        "acceptance", f"{title}, mean of steps 1 to {depths}", name, (range(depths),), unit
    )
    if trained_depth is not None and trained_depth < depths:
        beyond = range(trained_depth, depths)
        title = f"{title}, beyond the trained depth"
        yield DriftFigure("acceptance_beyond", title, name, (beyond,), unit)
        yield DriftFigure(
            "acceptance_change", f"{title} less within", name, (beyond, range(trained_depth)),
            "difference of shares of chains", "difference",
        )  # fmt: skip


def drift_summary(drift: Document) -> dict[str, Document]:
    """Return every figure by name, with its title, mean and interval."""
    summary = {}
    for figure in drift_figures(drift["depths"], drift["trained_depth"]):
        summary[figure.name] = {"title": figure.title} | measured(
            figure.columns(sums_of(drift, figure.series)), HOW[figure.how], possible(figure.unit)
        )
    return summary


def strongest_row(drift: Document) -> int | None:
    """Return which of the first rows gets the most attention at step 1 in the mean; None where none has any."""
    means = {name: row["mean"][0] for name, row in drift["rows"].items() if row["mean"][0]}
    if not means:
        return None
    return int(max(means, key=lambda name: means[name]).removeprefix("row_"))
