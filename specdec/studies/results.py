"""A study's plan and finished jobs read back, and from them all of a card's numbers, JSON-ready: quantities of every
arm, the primary contrasts that the study declared, and, exploratory, differences from the baseline and effects.

A contrast is taken on the seeds and prompts that all of its arms have; its error is of all arms that have these too.

Legend: A arms, S seeds, P prompts, C sums and weights in turn, K draft positions or steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.diagnostics.drift_measure import sums_of
from specdec.evaluation.metrics import Answer, acceptance_length, looping, looping_warning
from specdec.report.contrasts import (
    Arm,
    Estimate,
    Linear,
    Weights,
    add_verdicts,
    detectable,
    distinct,
    effects,
    estimate,
    pooled,
    seed_error,
    weighted,
)
from specdec.report.statistics import SHARE, Range, possible
from specdec.studies.jobs import PLAN, VERSION
from specdec.studies.outcomes import (
    ACCEPTANCE,
    FAMILIES,
    ROBUSTNESS,
    Json,
    Metric,
    RecordedRun,
    Table,
    recorded_metrics,
    sum_by_prompt,
)
from specdec.studies.study import MEASURES, Contrast
from specdec.studies.worker import JobFolder
from specdec.utils.reading import check_sums, read_json


@dataclass(frozen=True)
class RecordedStudy:
    """A study's plan, and by arm a run for each seed."""

    plan: Json
    arms: dict[str, list[RecordedRun]]

    @property
    def baseline(self) -> str:
        """The baseline's name."""
        return next(arm["name"] for arm in self.plan["arms"] if arm["is_baseline"])

    def done(self, kind: str) -> dict[str, list[RecordedRun]]:
        """By arm, the runs whose job of this kind is done."""
        return {name: [run for run in runs if run.done(kind)] for name, runs in self.arms.items()}


def read_record(directory: Path) -> RecordedStudy:
    """Read ``plan.json``; ValueError if there is none, or it is of another version."""
    path = directory / PLAN
    check_sums(directory, partial=True)
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("version") != VERSION:
        raise ValueError(f"{path}: not the plan of a study, version {VERSION}")
    arms: dict[str, list[RecordedRun]] = {arm["name"]: [] for arm in plan["arms"]}
    for arm in plan["arms"]:
        for run in arm["runs"]:
            folders = {
                kind: JobFolder(directory, kind, run[kind])
                for kind in ("fit", *MEASURES)
                if run[kind]
            }
            arms[arm["name"]].append(RecordedRun(run["seed"], folders))
    return RecordedStudy(plan, arms)


ByArmAndSeed = Mapping[str, Mapping[int, Table]]


def results(study: RecordedStudy) -> Json:
    """All numbers of the card; ValueError if a measurement cannot be read."""
    arms = []
    for arm in study.plan["arms"]:
        pairs = zip(arm["runs"], study.arms[arm["name"]], strict=True)
        arms.append(
            {**arm, "runs": [{**run, "states": recorded.states} for run, recorded in pairs]}
        )
    about = {
        key: study.plan[key]
        for key in ("name", "design", "axes", "seeds", "unequal", "primary_changed")
    }
    out: Json = {
        "study": about | {"baseline": study.baseline},
        "arms": arms,
        "quantities": [],
        "primary": [],
        "comparisons": [],
        "effects": [],
        "curves": [*_positions(study), *_drift_curves(study)],
        "looping": _looping(study),
        "training": {
            name: {str(run.seed): run.training() for run in runs}
            for name, runs in study.done("fit").items()
        },
    }
    declared = [Contrast(**one) for one in study.plan["primary"]]
    runs = [run for own in study.arms.values() for run in own]
    primary: dict[int, Json] = {}
    for outcome, quantity in recorded_metrics(runs, [one.outcome for one in declared]).items():
        known = {}
        for name, own in study.done(FAMILIES[quantity.family]).items():
            by_seed = {run.seed: table for run in own if (table := quantity.table(run)) is not None}
            if by_seed and len(by_seed) == len(own):  # all of its seeds that were measured have it
                known[name] = by_seed
        contrasts = _Contrasts(study, quantity, known)
        for at, one in enumerate(declared):
            if one.outcome == outcome and (row := contrasts.primary(one)):
                primary[at] = row
        values = {
            name: value for name, by_seed in known.items() if (value := _value(quantity, by_seed))
        }
        if values and quantity.name not in [one["name"] for one in out["quantities"]]:
            about = {
                name: getattr(quantity, name)
                for name in ("name", "panel", "family", "unit", "null")
            }
            out["quantities"].append({**about, "arms": values})
            out["comparisons"] += contrasts.comparisons()
            out["effects"] += contrasts.effects()
    out["primary"] = [primary.get(at, {"quantity": one.outcome, "value": None, "p_value": None}) | one.to_json()
                      for at, one in enumerate(declared)]  # fmt: skip
    add_verdicts(out["primary"])
    tests = len(distinct([row for row in out["primary"] if row["p_value"] is not None]))
    for row in (row for row in out["primary"] if row["value"] is not None):
        row["detectable"] = detectable(Estimate(*(row[name] for name in Estimate._fields)), tests)
    first = {_same(row) for row in out["primary"]}
    for kind in ("comparisons", "effects"):  # what is primary is not told again
        out[kind] = [row for row in out[kind] if _same(row) not in first]
    return out


def _looping(study: RecordedStudy) -> list[str]:
    """Of the baseline's answers, under every condition too; greedy ones are the target's own, in all arms alike."""
    runs = study.done("evaluate").get(study.baseline, [])
    lines = list[str]()
    for shape in runs[0].evaluation.answers if runs else ():
        answers = [answer for run in runs for answer in run.evaluation.answers.get(shape, ())]
        length = acceptance_length(answers)
        found = looping(answers) | {"acceptance_length": length and length._asdict()}
        lines += looping_warning(f"{study.baseline}, {shape}", found)
    for run in study.done("robustness").get(study.baseline, [])[:1]:
        for row in (
            row for row in run.measured("robustness")["conditions"] if row.get("looping_answers")
        ):
            lines += looping_warning(f"{study.baseline}, {row['name']}", row)
    return lines


def _same(row: Json) -> tuple[Any, ...]:
    return row["quantity"], row["value"], row["p_value"]


def aligned(quantity: Metric, tables: ByArmAndSeed) -> dict[str, Linear]:
    """The quantity of every arm, over the seeds and prompts that all arms have; empty if there are none."""
    seeds = common([list(by_seed) for by_seed in tables.values()])
    prompts = common([list(by_seed[seed]) for by_seed in tables.values() for seed in seeds])
    if not prompts:
        return {}
    sums_ASPC = np.array(
        [[[each[seed][prompt] for prompt in prompts] for seed in seeds] for each in tables.values()]
    )
    # a prompt without a target pass, clean or not, counts nowhere
    if quantity.family == ROBUSTNESS:
        sums_ASPC = sums_ASPC[:, :, (sums_ASPC[..., 1::2] > 0).all((0, 1, 3))]
    out = {}
    for name, sums_SPC in zip(tables, sums_ASPC, strict=True):
        ratios = [
            pooled(sums_SPC[..., at], sums_SPC[..., at + 1])
            for at in range(0, sums_SPC.shape[-1], 2)
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) == len(ratios):
            out[name] = known[0] if quantity.combine is None else quantity.combine(*known)
    return out


def _value(quantity: Metric, tables: Mapping[int, Table]) -> Json | None:
    """An arm's estimate, and every seed's value."""
    if not (found := aligned(quantity, {"": tables})):
        return None
    alone = {str(seed): aligned(quantity, {"": {seed: table}}) for seed, table in tables.items()}
    values = {seed: figures[""].value for seed, figures in alone.items() if figures}
    return estimate(found[""], quantity.null)._asdict() | {"by_seed": values}


class _Contrasts:
    """The contrasts of one quantity between arms that have it."""

    def __init__(self, study: RecordedStudy, quantity: Metric, tables: ByArmAndSeed) -> None:
        self.study = study
        self.quantity = quantity
        self.tables = tables
        self.levels: dict[Arm, str] = {
            frozenset(arm["levels"].items()): arm["name"] for arm in study.plan["arms"]
        }
        self.about = {"quantity": quantity.name, "family": quantity.family}

    def _of(
        self, weights: Mapping[str, float], needs: Iterable[str] = ()
    ) -> tuple[Json, Json | None] | None:
        """A contrast; of two arms, whose weights are 1 and -1, the ratio too; None where an arm lacks the quantity."""
        used = [*dict.fromkeys([*weights, *needs])]
        if not set(used) <= set(self.tables):
            return None
        seeds = common([list(self.tables[name]) for name in used])
        prompts = set(common([list(self.tables[name][seed]) for name in used for seed in seeds]))
        able = {name: own for name, own in self.tables.items()
                if all(seed in own and prompts <= set(own[seed]) for seed in seeds)}  # fmt: skip
        known = aligned(
            self.quantity,
            {name: {seed: able[name][seed] for seed in seeds} for name in [*used, *able]},
        )
        if not set(used) <= set(known):
            return None
        error = seed_error([*known.values()])
        ratio = None
        figure = weighted([known[name] for name in weights], [*weights.values()])
        found = estimate(
            figure, 0.0, seeds=error, squares=sum(weight**2 for weight in weights.values())
        )
        row = {**self.about, **found._asdict(), "detectable": detectable(found)}
        row["spreads_differ"] = error is not None and not error.equal
        if sorted(weights.values()) == [-1, 1] and self.quantity.family == ACCEPTANCE:
            old, new = sorted(weights, key=lambda name: weights[name])
            times = known[new].over(known[old])
            below = known[old].value
            ratio = estimate(times, seeds=error, squares=(1 + times.value**2) / below**2)._asdict()
        return row, ratio

    def primary(self, one: Contrast) -> Json | None:
        """A declared contrast; None unless all of its arms are there."""
        found = self._of(self._named(one.weights([*self.levels])))
        return found and found[0]

    def comparisons(self) -> Iterable[Json]:
        """Every arm less the baseline; of acceptance length also the ratio."""
        base = self.study.baseline
        for name in self.tables:
            if name != base and (found := self._of({name: 1.0, base: -1.0})) is not None:
                row, ratio = found
                yield {**row, "arm": name, "baseline": base, "ratio": ratio}

    def effects(self) -> Iterable[Json]:
        """Main effects and interactions; none where there is one axis, whose comparisons say the same."""
        plan = self.study.plan
        if plan["design"] == "grid" and len(plan["axes"]) > 1:
            arms = [arm for arm, name in self.levels.items() if name in self.tables]
            for name, weights in effects(plan["axes"], plan["baseline"], arms):
                if (found := self._of(self._named(weights), self.tables)) is not None:
                    yield {**found[0], "effect": name}

    def _named(self, weights: Weights) -> dict[str, float]:
        return {self.levels[arm]: weight for arm, weight in weights.items()}


def _positions(study: RecordedStudy) -> Iterable[Json]:
    """Of every draft shape, the share of passes that accepted position k, of those that accepted all before it."""
    done = study.done("evaluate")
    for shape in dict.fromkeys(
        shape for runs in done.values() for run in runs for shape in run.evaluation.answers
    ):
        answers = {
            arm: [run.evaluation.answers.get(shape) or [] for run in runs]
            for arm, runs in done.items()
        }
        arms = {arm: _shares(each) for arm, each in answers.items() if each and all(each)}
        yield {"title": f"Acceptance by position, {shape}", "unit": "share of the passes that came so far",
               "axis": "draft position", "arms": arms}  # fmt: skip


def _shares(answers: Sequence[Sequence[Answer]]) -> list[Json | None]:
    """By position, of the answers of every seed."""
    deepest = max((depth for each in answers for one in each for depth in one.drafted), default=0)
    least = np.arange(deepest + 1)  # passes that accepted so many, or more
    tables = [
        sum_by_prompt(each, lambda one: (np.array(one.accepted)[:, None] >= least).sum(0))
        for each in answers
    ]
    prompts = common([list(table) for table in tables])
    sums_SPK = np.array([[table[prompt] for prompt in prompts] for table in tables])
    return [_point(pooled(sums_SPK[..., k], sums_SPK[..., k - 1]), SHARE) for k in least[1:]]


def _drift_curves(study: RecordedStudy) -> Iterable[Json]:
    """Every series of ``specdec drift`` by draft step, over the chains that came to it."""
    out: dict[str, Json] = {}
    for arm, runs in study.done("drift").items():
        found = [run.measured("drift") for run in runs]
        at = [list(map(str, one["prompts"])) for one in found]
        places = [[each.index(prompt) for prompt in common(at)] for each in at]
        for name in common([list(one["series"]) for one in found]):
            unit = found[0]["series"][name]["unit"]
            title = found[0]["series"][name]["title"]
            found_KP2 = [
                sums_of(one, name)[:, place] for one, place in zip(found, places, strict=True)
            ]
            sums_KSP2 = np.stack([one[: min(map(len, found_KP2))] for one in found_KP2], axis=1)
            bounds = possible(unit)
            curve = out.setdefault(
                name, {"title": title, "unit": unit, "axis": "draft step", "arms": {}}
            )
            # with any seed
            seen = [sums_SP2[:, (sums_SP2[..., 1] > 0).any(0)] for sums_SP2 in sums_KSP2]
            curve["arms"][arm] = [_point(pooled(one[..., 0], one[..., 1]), bounds) for one in seen]
    return out.values()


def _point(figure: Linear | None, bounds: Range) -> Json | None:
    return None if figure is None else estimate(figure, bounds=bounds)._asdict()


def common(names: Sequence[Sequence[Any]]) -> list[Any]:
    """What all of them have, in the order of the first."""
    return [name for name in names[0] if all(name in each for each in names[1:])] if names else []
