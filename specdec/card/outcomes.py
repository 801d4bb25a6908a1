"""What a choice may change beside acceptance length: drift and robustness, each a single figure of an arm.

The tables of drift and robustness have every step and condition of an arm. Here arms are compared: of the same seeds
and prompts, with p-values that are corrected for all comparisons of an outcome, and for all effects on it.

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
from specdec.drift.summary import figures
from specdec.evaluation.statistics import Array

Json = dict[str, Any]
Found = Mapping[str, Mapping[int, Json]]
"""Measurements of a kind by arm and seed."""


class Outcome(NamedTuple):
    """A figure that every arm has."""

    name: str
    title: str
    kind: str
    """Of the measurement: drift or robustness."""
    unit: str
    null: float
    """What it is where nothing drifts, or nothing is lost."""
    sums: Callable[[Json], Array | None]
    """(P, 4) of one measurement: a sum and its weight there, and where it is compared with; None where it has none."""
    combine: Callable[[Linear, Linear], Linear]
    """Of what is there and what it is compared with."""


RATIO = "ratio to clean prompts"
DRIFT = {
    "state_rms_growth": ("ratio", 1.0, Linear.over),
    "sink_mass_change": ("difference of shares of weight", 0.0, Linear.minus),
    "acceptance_change": ("difference of shares of chains", 0.0, Linear.minus),
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
        for outcome in known([one for own in found.values() for one in own.values()]):
            each = {name: _aligned(outcome, {name: own}).get(name) for name, own in found.items()}
            own = {name: estimate(one, outcome.null).to_json() for name, one in each.items() if one is not None}
            if not own:
                continue
            titles[outcome.name] = {"title": outcome.title, "kind": kind, "unit": outcome.unit, "null": outcome.null}
            arms[outcome.name] = own
            for rows, more in (
                (compared, _comparisons(study, outcome, found)),
                (found_effects, _effects(study, outcome, found)),
            ):
                judge(more)
                rows += more
    return {"titles": titles, "arms": arms, "comparisons": compared, "effects": found_effects} if titles else {}


def _of_drift(found: Sequence[Json]) -> list[Outcome]:
    out: dict[str, Outcome] = {}
    for one in found:
        for figure in figures(one["depths"], one["trained_depth"]):
            if figure.name in DRIFT and figure.series in one["series"]:
                unit, null, combine = DRIFT[figure.name]
                own = Outcome(figure.name, figure.title, "drift", unit, null, _last_and_first(figure.name), combine)
                out.setdefault(figure.name, own)
    return list(out.values())


def _last_and_first(name: str) -> Callable[[Json], Array | None]:
    def sums(found: Json) -> Array | None:
        own = {one.name: one for one in figures(found["depths"], found["trained_depth"])}
        if name not in own or own[name].series not in found["series"]:
            return None
        first_then_last: Array = own[name].sums(found)
        return first_then_last[:, [2, 3, 0, 1]]

    return sums


def _of_robustness(found: Sequence[Json]) -> list[Outcome]:
    rows = [each for one in found for each in one["conditions"] if each["name"] != one["clean"]]
    titles = {each["name"]: each["title"] for each in rows}

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
        Outcome(f"kept_{name}", f"Acceptance kept, {title}", "robustness", RATIO, 1.0, sums_under(name), Linear.over)
        for name, title in titles.items()
    ]


def _aligned(outcome: Outcome, found: Found) -> dict[str, Linear]:
    """The figure of every arm, of the seeds and prompts that all of them have; empty where there are none."""
    seeds = common([list(own) for own in found.values()])
    prompts = common([[str(each) for each in own[seed]["prompts"]] for own in found.values() for seed in seeds])
    if not prompts:
        return {}
    tables = []
    for own in found.values():
        for seed in seeds:
            sums_PC = outcome.sums(own[seed])
            if sums_PC is None:
                return {}
            tables.append(sums_PC[places(own[seed], prompts)])
    sums_ASPC = np.stack(tables).reshape(len(found), len(seeds), len(prompts), -1)
    out = {}
    for name, sums_SPC in zip(found, sums_ASPC, strict=True):
        there, base = (pooled(sums_SPC[..., at], sums_SPC[..., at + 1]) for at in (0, 2))
        if there is None or base is None:
            return {}
        out[name] = outcome.combine(there, base)
    return out


def _comparisons(study: Study, outcome: Outcome, found: Found) -> list[Json]:
    base, out = study.base.name, []
    for arm in study.arms:
        if arm.name == base or arm.name not in found or base not in found:
            continue
        own = _aligned(outcome, {base: found[base], arm.name: found[arm.name]})
        if own:
            row = estimate(own[arm.name].minus(own[base]), null=0.0).to_json()
            out.append({"outcome": outcome.name, "arm": arm.name, "baseline": base, **row})
    return out


def _effects(study: Study, outcome: Outcome, found: Found) -> list[Json]:
    """On the arms that have it with every seed."""
    having = {name: own for name, own in found.items() if all(outcome.sums(one) is not None for one in own.values())}
    return [{"outcome": outcome.name, **row} for row in effects_on(study, _aligned(outcome, having))]
