"""What a choice may change beside acceptance length: drift and robustness, each a single figure of an arm.

The tables of drift and robustness have every step and condition of an arm. Here arms are compared: of the same seeds
and prompts, with p-values that are corrected for all comparisons of drift, or of robustness, and for all effects on it.

Legend: A arms, S seeds, P prompts, C sums and weights in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.card.crossed import estimate
from specdec.card.curves import places
from specdec.card.effects import effects_on
from specdec.card.linear import Linear, pooled
from specdec.card.multiple import judge
from specdec.card.study import Study, common
from specdec.drift.summary import Figure, figures
from specdec.evaluation.statistics import Array

Json = dict[str, Any]
Found = Mapping[str, Mapping[int, Json]]
"""Measurements of a kind by arm and seed."""


class Outcome(NamedTuple):
    """A figure of those arms in which it is of the same draft steps, or under the same condition."""

    name: str
    title: str
    panel: str
    """Title of the figure's panel, which it may share with outcomes of other steps."""
    kind: str
    """Of the measurement: drift or robustness."""
    unit: str
    null: float | None
    """What it is where nothing drifts, or nothing is lost; None where that is not known."""
    sums: Callable[[Json], Array | None]
    """(P, 4) of one measurement: a sum and its weight there, and where it is compared with; None where it has none."""
    combine: Callable[[Linear, Linear], Linear]
    """Of what is there and what it is compared with."""
    both: bool
    """Whether a prompt counts only where it has weight on both sides, in all that is compared."""


RATIO = "ratio to clean prompts"
DRIFT = {
    "state_rms_growth": ("ratio", 1.0, Linear.over),
    "sink_mass_change": ("difference of shares of weight", 0.0, Linear.minus),
    "acceptance_change": ("difference of shares of chains", None, Linear.minus),  # later steps are of fewer chains
}
"""Of :func:`specdec.drift.summary.figures`, those that compare two depths."""


def outcomes(study: Study) -> Json:
    """Every outcome of every arm, less the baseline's, and the axes' effects on it; empty if none was measured.

    Raises:
        ValueError: a measurement cannot be read.
    """
    titles: dict[str, Json] = {}
    arms: dict[str, Json] = {}
    compared: list[Json] = []
    found_effects: list[Json] = []
    for kind, known in (("drift", _of_drift), ("robustness", _of_robustness)):
        found = {arm.name: {run.seed: run.measured(kind) for run in arm.done(kind)} for arm in study.arms}
        found = {name: own for name, own in found.items() if own}
        family: tuple[list[Json], list[Json]] = ([], [])
        for outcome in known([one for own in found.values() for one in own.values()]):
            each = {name: _aligned(outcome, {name: own}).get(name) for name, own in found.items()}
            own = {name: estimate(one, outcome.null).to_json() for name, one in each.items() if one is not None}
            if not own:
                continue
            shown = ("title", "panel", "kind", "unit", "null")
            titles[outcome.name] = {key: getattr(outcome, key) for key in shown}
            arms[outcome.name] = own
            family[0].extend(_comparisons(study, outcome, found))
            family[1].extend(_effects(study, outcome, found))
        for rows, more in zip((compared, found_effects), family, strict=True):
            judge(more)
            rows += more
    return {"titles": titles, "arms": arms, "comparisons": compared, "effects": found_effects} if titles else {}


def _of_drift(found: Sequence[Json]) -> list[Outcome]:
    """Arms are compared at the same steps alone: beyond another trained depth lie others."""
    out: dict[str, Outcome] = {}
    for one in found:
        for figure in figures(one["depths"], one["trained_depth"]):
            if figure.name not in DRIFT or figure.series not in one["series"]:
                continue
            unit, null, combine = DRIFT[figure.name]
            first, last = (depths.stop for depths in figure.depths)
            title = figure.title if null is not None else f"{figure.title} ({first} of {last} steps)"
            name = f"{figure.name}_{first}_to_{last}"
            sums = _last_and_first(figure)
            out.setdefault(name, Outcome(name, title, figure.title, "drift", unit, null, sums, combine, False))
    return list(out.values())


def _last_and_first(figure: Figure) -> Callable[[Json], Array | None]:
    def sums(found: Json) -> Array | None:
        same = [one for one in figures(found["depths"], found["trained_depth"]) if one.name == figure.name]
        if not same or same[0].depths != figure.depths or figure.series not in found["series"]:
            return None
        first_then_last: Array = figure.sums(found)
        return first_then_last[:, [2, 3, 0, 1]]

    return sums


def _of_robustness(found: Sequence[Json]) -> list[Outcome]:
    rows = [each for one in found for each in one["conditions"] if each["name"] != one["clean"]]
    titles = {each["name"]: f"Acceptance kept, {each['title']}" for each in rows}

    def sums_under(condition: str) -> Callable[[Json], Array | None]:
        def sums(one: Json) -> Array | None:
            rows = {each["name"]: each for each in one["conditions"]}
            own, clean = rows.get(condition), rows[one["clean"]]
            if own is None or own.get("skipped"):
                return None
            columns = [own["committed"], own["passes"], clean["committed"], clean["passes"]]
            return np.array([[float(value or 0) for value in column] for column in columns]).T

        return sums

    return [
        Outcome(f"kept_{name}", title, title, "robustness", RATIO, 1.0, sums_under(name), Linear.over, True)
        for name, title in titles.items()
    ]


def _aligned(outcome: Outcome, found: Found) -> dict[str, Linear]:
    """The figure of every arm that has it with every seed, of the seeds and prompts that all of them have."""
    sums = {name: {seed: outcome.sums(one) for seed, one in own.items()} for name, own in found.items()}
    having = {name: own for name, own in found.items() if all(one is not None for one in sums[name].values())}
    seeds = common([list(own) for own in having.values()])
    prompts = common([[str(each) for each in own[seed]["prompts"]] for own in having.values() for seed in seeds])
    if not prompts:
        return {}
    tables = [sums[name][seed][places(own[seed], prompts)] for name, own in having.items() for seed in seeds]  # type: ignore[index]
    sums_ASPC = np.stack(tables).reshape(len(having), len(seeds), len(prompts), -1)
    if outcome.both:
        sums_ASPC = sums_ASPC[:, :, (sums_ASPC[..., 1::2] > 0).all((0, 1, 3))]
    out = {}
    for name, sums_SPC in zip(having, sums_ASPC, strict=True):
        there, base = (pooled(sums_SPC[..., at], sums_SPC[..., at + 1]) for at in (0, 2))
        if there is not None and base is not None:
            out[name] = outcome.combine(there, base)
    return out


def _comparisons(study: Study, outcome: Outcome, found: Found) -> list[Json]:
    base, out = study.base.name, []
    for arm in study.arms:
        if arm.name == base or arm.name not in found or base not in found:
            continue
        own = _aligned(outcome, {base: found[base], arm.name: found[arm.name]})
        if len(own) == 2:
            row = estimate(own[arm.name].minus(own[base]), null=0.0).to_json()
            out.append({"outcome": outcome.name, "arm": arm.name, "baseline": base, **row})
    return out


def _effects(study: Study, outcome: Outcome, found: Found) -> list[Json]:
    return [{"outcome": outcome.name, **row} for row in effects_on(study, _aligned(outcome, found))]
