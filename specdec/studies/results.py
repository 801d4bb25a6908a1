"""A study's plan and finished jobs read back, and from them all of a card's numbers, JSON-ready: quantities of every
arm, the primary contrasts that the study declared, and, exploratory, differences from the baseline and effects.

A contrast is taken on the seeds and prompts that all of its arms have. An arm lacks a quantity of which a seed has no
data: it is empty there, and in no contrast.

Legend: A arms, S seeds, P prompts, C sums and weights in turn, K draft positions or steps.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.diagnostics.drift_figures import sums_of
from specdec.evaluation.metrics import acceptance_length, answer_warnings, looping
from specdec.report.contrasts import (
    Arm,
    Estimate,
    Linear,
    Weights,
    add_verdicts,
    contrasted,
    detectable,
    distinct,
    effects,
    estimate,
    pooled,
)
from specdec.report.statistics import LENGTH, POSITIVE, Range, possible
from specdec.studies.jobs import PLAN, VERSION
from specdec.studies.outcomes import (
    ACCEPTANCE,
    FAMILIES,
    ROBUSTNESS,
    Metric,
    Table,
    accepted_at,
    recorded_metrics,
)
from specdec.studies.recorded_run import Json, RecordedRun
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

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """The primary outcomes and all else that any run has, by their names in ``primary``."""
        runs = [run for runs_of_arm in self.arms.values() for run in runs_of_arm]
        return recorded_metrics(runs, [contrast["outcome"] for contrast in self.plan["primary"]])

    def done(self, kind: str) -> dict[str, list[RecordedRun]]:
        """Return, by arm, the runs whose job of this kind is done."""
        return {name: [run for run in runs if run.done(kind)] for name, runs in self.arms.items()}


def read_record(directory: Path) -> RecordedStudy:
    """Read ``plan.json``; ValueError if there is none, or it is of another version."""
    path = directory / PLAN
    check_sums(directory, partial=True)
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("version") != VERSION:
        raise ValueError(f"{path}: not the plan of a study, version {VERSION}")
    kinds = ("fit", *MEASURES)
    arms = {
        arm["name"]: [
            RecordedRun(
                run["seed"],
                {kind: JobFolder(directory, kind, run[kind]) for kind in kinds if run[kind]},
            )
            for run in arm["runs"]
        ]
        for arm in plan["arms"]
    }
    return RecordedStudy(plan, arms)


BySeed = Mapping[int, Table]


def results(study: RecordedStudy) -> Json:
    """Return all numbers of the card; ValueError if a measurement cannot be read."""
    about = ("name", "design", "axes", "seeds", "unequal", "primary_changed")
    declared = [Contrast(**entry) for entry in study.plan["primary"]]
    out: Json = {
        "study": {key: study.plan[key] for key in about}
        | {"baseline": study.baseline, "varies_data": study.plan.get("varies_data", False)},
        "arms": _arms_with_states(study),
        "quantities": [],
        "primary": [
            {"quantity": contrast.outcome, "value": None, "p_value": None, "ratio": None}
            | contrast.to_json()
            for contrast in declared
        ],
        "comparisons": [],
        "effects": [],
        "curves": [*_positions(study), *_drift_curves(study)],
        "looping": _looping(study),
        "training": {
            name: {str(run.seed): run.training() for run in runs}
            for name, runs in study.done("fit").items()
        },
    }
    for outcome, metric in study.metrics.items():
        contrasts = _Contrasts(study, metric)
        for place, contrast in enumerate(declared):
            if contrast.outcome == outcome and (row := contrasts.primary(contrast)):
                out["primary"][place] = row | contrast.to_json()
        values = contrasts.values()
        if contrasts.tables and metric.name not in [row["name"] for row in out["quantities"]]:
            fields = ("name", "panel", "family", "unit", "null")
            facts = {field: getattr(metric, field) for field in fields}
            out["quantities"].append({**facts, "arms": values})
            out["comparisons"] += contrasts.comparisons()
            out["effects"] += contrasts.effects()
    _judge(out)
    return out


def _arms_with_states(study: RecordedStudy) -> list[Json]:
    """Return the plan's arms, with the states of every run's jobs."""
    arms = []
    for arm in study.plan["arms"]:
        pairs = zip(arm["runs"], study.arms[arm["name"]], strict=True)
        runs = [{**run, "states": recorded.states} for run, recorded in pairs]
        arms.append({**arm, "runs": runs})
    return arms


def _judge(out: Json) -> None:
    """Give primary contrasts their verdicts and detectable differences; what is primary is not told again."""
    add_verdicts(out["primary"])
    measured = [row for row in out["primary"] if row["value"] is not None]
    tests = len(distinct([row for row in measured if row["p_value"] is not None]))
    for row in measured:
        row["detectable"] = detectable(Estimate(*(row[name] for name in Estimate._fields)), tests)
    primary = {_same(row) for row in out["primary"]}
    for kind in ("comparisons", "effects"):
        out[kind] = [row for row in out[kind] if _same(row) not in primary]


def _same(row: Json) -> tuple[Any, ...]:
    return row["quantity"], row["value"], row["p_value"]


def _looping(study: RecordedStudy) -> list[str]:
    """Return warnings of looping answers of the baseline, under every condition too.

    Greedy answers are the target's own, in all arms alike.
    """
    runs = study.done("evaluate").get(study.baseline, [])
    lines = list[str]()
    for shape in runs[0].evaluation.answers if runs else ():
        answers = [answer for run in runs for answer in run.evaluation.answers.get(shape, ())]
        length = acceptance_length(answers)
        figures = looping(answers) | {"acceptance_length": length and length._asdict()}
        lines += answer_warnings(f"{study.baseline}, {shape}", figures)
    for run in study.done("robustness").get(study.baseline, [])[:1]:
        for row in run.measured("robustness")["conditions"]:
            if row.get("looping_answers"):
                lines += answer_warnings(f"{study.baseline}, {row['name']}", row)
    return lines


def _shared(tables: Collection[BySeed]) -> tuple[list[int], list[str]]:
    """Return the seeds that all tables have, and the prompts that they have with these."""
    seeds = common([*tables])
    return seeds, common([by_seed[seed] for by_seed in tables for seed in seeds])


def aligned(metric: Metric, tables: Mapping[str, BySeed]) -> dict[str, Linear]:
    """The quantity of every arm that has data with each seed, over the seeds and prompts that all arms have."""
    seeds, prompts = _shared(tables.values())
    if not prompts:
        return {}
    sums_ASPC = np.array(
        [
            [[table[seed][prompt] for prompt in prompts] for seed in seeds]
            for table in tables.values()
        ]
    )
    # a prompt without a target pass, clean or not, counts nowhere
    has_data = np.all if metric.family == ROBUSTNESS else np.any
    sums_ASPC = sums_ASPC[:, :, has_data(sums_ASPC[..., 1::2] > 0, axis=(0, 1, 3))]
    out = {}
    for name, sums_SPC in zip(tables, sums_ASPC, strict=True):
        columns_CSP = np.moveaxis(sums_SPC, -1, 0)
        ratios = [*map(pooled, columns_CSP[::2], columns_CSP[1::2])]
        if all(ratios) and (figure := metric.combine(*ratios)) is not None:
            out[name] = figure
    return out


def _alone(metric: Metric, tables: BySeed) -> Linear | None:
    """Return the quantity of one arm."""
    return aligned(metric, {"": tables}).get("")


def _by_seed(metric: Metric, runs: Iterable[RecordedRun]) -> dict[int, Table]:
    """Return the tables of the runs that have the metric."""
    return {run.seed: table for run in runs if (table := metric.table(run)) is not None}


class _Contrasts:
    """One quantity of the arms where all seeds that were measured have it, and its contrasts between them.

    Args:
        by_seed: of every arm that was measured, each seed's own value, None without data.
        tables: of the arms that have data with each seed.
    """

    def __init__(self, study: RecordedStudy, metric: Metric) -> None:
        self.study = study
        self.metric = metric
        self.by_seed: dict[str, dict[str, float | None]] = {}
        self.tables: dict[str, dict[int, Table]] = {}
        for name, runs in study.done(FAMILIES[metric.family]).items():
            tables = _by_seed(metric, runs)
            if tables and len(tables) == len(runs):
                figures = {seed: _alone(metric, {seed: table}) for seed, table in tables.items()}
                self.by_seed[name] = {
                    str(seed): None if figure is None else figure.value
                    for seed, figure in figures.items()
                }
                if all(figures.values()):
                    self.tables[name] = tables
        self.levels: dict[Arm, str] = {
            frozenset(arm["levels"].items()): arm["name"] for arm in study.plan["arms"]
        }

    def values(self) -> Json:
        """By arm its estimate, None without data, and every seed's value."""
        out = {}
        for name, by_seed in self.by_seed.items():
            row: Json = dict.fromkeys(Estimate._fields)
            if name in self.tables and (figure := _alone(self.metric, self.tables[name])):
                row = estimate(figure, self.metric.null, self.metric.bounds)._asdict()
            out[name] = row | {"by_seed": by_seed}
        return out

    def _of(
        self, weights: Mapping[str, float], needs: Iterable[str] = ()
    ) -> tuple[Json, Json | None] | None:
        """A contrast; of two arms, whose weights are 1 and -1, the ratio too; None where an arm lacks the quantity."""
        used = [*dict.fromkeys([*weights, *needs])]
        if not set(used) <= set(self.tables):
            return None
        seeds, prompts = _shared([self.tables[name] for name in used])
        tables = {
            name: {seed: self.tables[name][seed] for seed in seeds if prompts} for name in used
        }
        figures = aligned(self.metric, tables)
        if not set(used) <= set(figures):
            return None
        difference = contrasted(
            [figures[name] for name in weights], [*weights.values()], self.metric.bounds
        )
        row = {
            "quantity": self.metric.name,
            "family": self.metric.family,
            **difference._asdict(),
            "detectable": detectable(difference),
            "unlike": len(weights) > 2
            and len(seeds) > 1
            and not difference.pooled
            and bool(difference.error),
        }
        ratio = None
        of_acceptance = self.metric.family == ACCEPTANCE or self.metric.bounds == LENGTH
        if sorted(weights.values()) == [-1, 1] and of_acceptance:
            old, new = sorted(weights, key=lambda name: weights[name])
            if times := figures[new].over(figures[old]):
                ratio = estimate(times, bounds=POSITIVE)._asdict()
        return row, ratio

    def primary(self, contrast: Contrast) -> Json | None:
        """A declared contrast, of two acceptance lengths also the ratio; None unless all of its arms are there."""
        rows = self._of(self._named(contrast.weights([*self.levels])))
        return rows and {**rows[0], "ratio": rows[1]}

    def comparisons(self) -> Iterable[Json]:
        """Every arm less the baseline; of acceptance length also the ratio."""
        base = self.study.baseline
        for name in self.tables:
            if name != base and (rows := self._of({name: 1.0, base: -1.0})) is not None:
                row, ratio = rows
                yield {**row, "arm": name, "baseline": base, "ratio": ratio}

    def effects(self) -> Iterable[Json]:
        """Main effects and interactions; none where there is one axis, whose comparisons say the same.

        They average over the arms that were measured for the quantity; none where one of these has no data, since the
        average over fewer would be another effect.
        """
        plan = self.study.plan
        if plan["design"] == "grid" and len(plan["axes"]) > 1:
            arms = [arm for arm, name in self.levels.items() if name in self.by_seed]
            for name, weights in effects(plan["axes"], plan["baseline"], arms):
                if (rows := self._of(self._named(weights), self.tables)) is not None:
                    yield {**rows[0], "effect": name}

    def _named(self, weights: Weights) -> dict[str, float]:
        return {self.levels[arm]: weight for arm, weight in weights.items()}


def _positions(study: RecordedStudy) -> Iterable[Json]:
    """Yield, for every draft shape, the share of passes that accepted position k, of those that accepted all before."""
    done = study.done("evaluate")
    runs = [run for runs_of_arm in done.values() for run in runs_of_arm]
    for shape in dict.fromkeys(shape for run in runs for shape in run.evaluation.answers):
        yield {
            "title": position_title(shape),
            "unit": "share of the passes that got this far",
            "axis": "draft position",
            "arms": {
                arm: [*_shares(runs_of_arm, shape)]
                for arm, runs_of_arm in done.items()
                if runs_of_arm and all(run.evaluation.answers.get(shape) for run in runs_of_arm)
            },
        }


def _shares(runs: Sequence[RecordedRun], shape: str) -> Iterable[Json | None]:
    """Yield the shares by position, over the answers of every seed."""
    for position in range(1, deepest_position(runs, shape) + 1):
        metric = accepted_at(str(position), shape)
        yield _point(_alone(metric, _by_seed(metric, runs)), metric.bounds)


def position_title(shape: str) -> str:
    """Return the title of the curve by draft position."""
    return f"Acceptance by position, {shape}"


def deepest_position(runs: Iterable[RecordedRun], shape: str) -> int:
    """Return the deepest position that was drafted in the runs' answers."""
    answers = [answer for run in runs for answer in run.evaluation.answers.get(shape, ())]
    return max((depth for answer in answers for depth in answer.drafted), default=0)


def _drift_curves(study: RecordedStudy) -> Iterable[Json]:
    """Return every series of ``specdec drift`` by draft step, over the chains that came to it."""
    curves: dict[str, Json] = {}
    for arm, runs in study.done("drift").items():
        measured = [run.measured("drift") for run in runs]
        prompts_of = [list(map(str, drift["prompts"])) for drift in measured]
        shared = common(prompts_of)
        places = [[prompts.index(prompt) for prompt in shared] for prompts in prompts_of]
        for name in common([drift["series"] for drift in measured]):
            series = measured[0]["series"][name]
            curve = {"title": series["title"], "unit": series["unit"], "axis": "draft step"}
            sums = [sums_of(drift, name)[:, at] for drift, at in zip(measured, places, strict=True)]
            points = []
            for sums_SP2 in map(np.stack, zip(*sums, strict=False)):
                reached_SP2 = sums_SP2[:, (sums_SP2[..., 1] > 0).any(0)]  # with any seed
                figure = pooled(reached_SP2[..., 0], reached_SP2[..., 1])
                points.append(_point(figure, possible(series["unit"])))
            curves.setdefault(name, {**curve, "arms": {}})["arms"][arm] = points
    return curves.values()


def _point(figure: Linear | None, bounds: Range) -> Json | None:
    return None if figure is None else estimate(figure, bounds=bounds)._asdict()


def common(names: Sequence[Collection[Any]]) -> list[Any]:
    """Return the names that all collections have, in the order of the first."""
    first = names[0] if names else ()
    return [name for name in first if all(name in others for others in names)]
