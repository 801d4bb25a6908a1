"""A study's plan and finished jobs read back, and from them all of a card's numbers, JSON-ready: quantities of every
arm, their differences from the baseline, and effects.

A quantity is a ratio of two sums over prompts (acceptance length: committed tokens over target passes), or two such
ratios, one divided by the other or less it (rise of the state: its size at the last draft step over that at the
first). Arms are compared on the seeds and prompts that both have.

Legend: A arms, S seeds, P prompts, C sums and weights in turn, K draft positions or steps.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.diagnostics.drift_measure import VERSION as OF_DRIFT
from specdec.diagnostics.drift_measure import DriftFigure, drift_figures, sums_of
from specdec.evaluation.compare import SavedEvaluation, read_evaluation
from specdec.evaluation.metrics import Answer, committed, passes
from specdec.evaluation.statistics import Array
from specdec.studies.plan import PLAN, VERSION
from specdec.studies.statistics import POSITIVE, SHARE, Linear, add_verdicts, detectable, effects, estimate, pooled
from specdec.studies.study import MEASURES
from specdec.studies.worker import JobFolder
from specdec.utils.files import check_sums, read_json

Json = dict[str, Any]
Table = Mapping[str, Array]  # of a run: by prompt, its sums and weights

ACCEPTANCE, DRIFT, ROBUSTNESS = "acceptance length", "drift", "robustness"
FAMILIES = {ACCEPTANCE: "evaluate", DRIFT: "drift", ROBUSTNESS: "robustness"}  # and where they are measured
MEASUREMENT = {"drift": OF_DRIFT, "robustness": 1}  # the versions of drift.json and robustness.json
COMBINE = {"ratio": Linear.over, "difference": Linear.minus}  # two means of a figure of drift


@dataclass(frozen=True)
class RecordedRun:
    """An arm with one seed, and by kind the folders of its jobs."""

    seed: int
    folders: dict[str, JobFolder]

    @functools.cached_property
    def states(self) -> dict[str, Json]:
        """Of each job: ``name`` (``done``, ``running``, ``stopped``, ``killed``, ``failed`` or ``not begun``),
        ``message`` (why it failed) and ``seconds`` of all its attempts.
        """
        states = {}
        for kind, folder in self.folders.items():
            attempts = folder.attempts()
            last = attempts[-1] if attempts else {"end": "not begun"}
            name = last.get("end") or ("running" if folder.is_held() else "killed")
            if folder.is_done():
                name, last = "done", {}
            elif name in ("died", "done"):  # or whose file was removed
                name = "failed"
            seconds = sum(one.get("seconds") or 0.0 for one in attempts)
            states[kind] = {"name": name, "message": last.get("message"), "seconds": seconds}
        return states

    def done(self, kind: str) -> bool:
        """Whether there is a job of this kind and it is done."""
        return kind in self.folders and self.folders[kind].is_done()

    @functools.cached_property
    def evaluation(self) -> SavedEvaluation:
        """The results of its evaluation."""
        return read_evaluation(self.folders["evaluate"].output)

    def measured(self, kind: str) -> Json:
        """``drift.json`` or ``robustness.json``; ValueError if it is of another version."""
        path = self.folders[kind].last_file
        check_sums(path.parent, "measure again", partial=True)
        found = read_json(path)
        if not isinstance(found, dict) or found.get("version") != MEASUREMENT[kind]:
            raise ValueError(f"{path}: not of version {MEASUREMENT[kind]}: measure again with this version of specdec")
        return found

    def training(self) -> Json:
        """Optimizer steps and seconds of a finished fit, its process's start included."""
        return {
            "steps": int(read_json(self.folders["fit"].last_file)["steps"]),
            "seconds": self.states["fit"]["seconds"],
        }


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
            folders = {kind: JobFolder(directory, kind, run[kind]) for kind in ("fit", *MEASURES) if run[kind]}
            arms[arm["name"]].append(RecordedRun(run["seed"], folders))
    return RecordedStudy(plan, arms)


class Quantity(NamedTuple):
    """What is measured of an arm, of the same draft steps or under the same condition in all arms that have it.

    ``panel`` titles its figure, which quantities of other draft steps may share; ``null`` is its value without drift or
    loss, if known; ``table`` gives a run's two sums for every prompt, or four, of two ratios for ``combine``.
    """

    name: str
    panel: str
    family: str
    unit: str
    null: float | None
    table: Callable[[RecordedRun], Table | None]
    combine: Callable[[Linear, Linear], Linear] | None = None


ByArmAndSeed = Mapping[str, Mapping[int, Table]]


def results(study: RecordedStudy) -> Json:
    """All numbers of the card; ValueError if a measurement cannot be read."""
    arms = []
    for arm in study.plan["arms"]:
        pairs = zip(arm["runs"], study.arms[arm["name"]], strict=True)
        arms.append({**arm, "runs": [{**run, "states": recorded.states} for run, recorded in pairs]})
    about = {key: study.plan[key] for key in ("name", "design", "axes", "seeds", "unequal")}
    out: Json = {
        "study": about | {"baseline": study.baseline},
        "arms": arms,
        "quantities": [],
        "comparisons": [],
        "effects": [],
        "curves": [*_positions(study), *_drift_curves(study)],
        "training": {name: {str(run.seed): run.training() for run in runs} for name, runs in study.done("fit").items()},
    }
    for quantity in _quantities(study):
        known = {}
        for name, runs in study.done(FAMILIES[quantity.family]).items():
            by_seed = {run.seed: table for run in runs if (table := quantity.table(run)) is not None}
            if by_seed and len(by_seed) == len(runs):  # all of its seeds that were measured have it
                known[name] = by_seed
        if values := {name: value for name, by_seed in known.items() if (value := _value(quantity, by_seed))}:
            about = {name: getattr(quantity, name) for name in ("name", "panel", "family", "unit", "null")}
            out["quantities"].append({**about, "arms": values})
            out["comparisons"] += _comparisons(study, quantity, known)
            out["effects"] += _effects(study, quantity, known)
    for family in FAMILIES:  # each is corrected for by itself
        for kind in ("comparisons", "effects"):
            add_verdicts([row for row in out[kind] if row["family"] == family])
    return out


def _quantities(study: RecordedStudy) -> list[Quantity]:
    """All that any arm has, by family."""
    found: dict[str, Quantity] = {}
    for run in (run for runs in study.arms.values() for run in runs):
        each: list[Quantity] = []
        if run.done("evaluate"):
            each += [_acceptance(shape) for shape in run.evaluation.answers]
        if run.done("drift"):
            one = run.measured("drift")
            each += [_of_drift(figure) for figure in drift_figures(one["depths"], one["trained_depth"])
                     if figure.series in one["series"]]  # fmt: skip
        if run.done("robustness"):
            one = run.measured("robustness")
            each += [_kept(row["name"], row["title"]) for row in one["conditions"] if row["name"] != one["clean"]]
        for quantity in each:
            found.setdefault(quantity.name, quantity)
    return sorted(found.values(), key=lambda quantity: [*FAMILIES].index(quantity.family))


def _sums(answers: Iterable[Answer], columns: Callable[[Answer], Sequence[float]]) -> Table:
    """Sums over each prompt's answers."""
    out: dict[str, Array] = {}
    for answer in answers:
        out[answer.prompt_id] = out.get(answer.prompt_id, np.zeros(1)) + np.array(columns(answer), dtype=float)
    return out


def _acceptance(shape: str) -> Quantity:
    """Tokens committed per target pass, the bonus token included."""

    def table(run: RecordedRun) -> Table | None:
        found = run.evaluation.answers.get(shape)
        return None if found is None else _sums(found, lambda answer: (committed(answer), passes(answer)))

    return Quantity(f"{ACCEPTANCE}, {shape}", shape, ACCEPTANCE, "tokens per target pass", None, table)


def _of_drift(figure: DriftFigure) -> Quantity:
    """Arms are compared at the same steps alone, which depend on the trained depth."""
    steps = " of ".join(str(depths.stop) for depths in reversed(figure.depths))
    name = f"{figure.title} ({steps} steps)" if figure.name.startswith("acceptance_") else figure.title

    def table(run: RecordedRun) -> Table | None:
        one = run.measured("drift")
        same = [each for each in drift_figures(one["depths"], one["trained_depth"]) if each.name == figure.name]
        if not same or same[0].depths != figure.depths or figure.series not in one["series"]:
            return None
        return dict(zip(map(str, one["prompts"]), figure.columns(sums_of(one, figure.series)), strict=True))

    return Quantity(name, figure.title, DRIFT, figure.unit, figure.null, table, COMBINE.get(figure.how))


def _kept(condition: str, title: str) -> Quantity:
    """Acceptance length under a condition over that of clean prompts."""

    def table(run: RecordedRun) -> Table | None:
        one = run.measured("robustness")
        rows = {row["name"]: row for row in one["conditions"]}
        row, clean = rows.get(condition), rows[one["clean"]]
        if row is None or row.get("skipped"):
            return None
        columns = [row["committed"], row["passes"], clean["committed"], clean["passes"]]
        sums_P4 = np.array([[float(value or 0) for value in column] for column in columns]).T
        return dict(zip(map(str, one["prompts"]), sums_P4, strict=True))

    name = f"Acceptance kept, {title}"
    return Quantity(name, name, ROBUSTNESS, "ratio to clean prompts", 1.0, table, Linear.over)


def aligned(quantity: Quantity, tables: ByArmAndSeed) -> dict[str, Linear]:
    """The quantity of every arm, over the seeds and prompts that all arms have; empty if there are none."""
    seeds = common([list(by_seed) for by_seed in tables.values()])
    prompts = common([list(by_seed[seed]) for by_seed in tables.values() for seed in seeds])
    if not prompts:
        return {}
    sums_ASPC = np.array([[[each[seed][prompt] for prompt in prompts] for seed in seeds] for each in tables.values()])
    if quantity.family == ROBUSTNESS:  # a prompt without a target pass, clean or not, counts nowhere
        sums_ASPC = sums_ASPC[:, :, (sums_ASPC[..., 1::2] > 0).all((0, 1, 3))]
    out = {}
    for name, sums_SPC in zip(tables, sums_ASPC, strict=True):
        ratios = [pooled(sums_SPC[..., at], sums_SPC[..., at + 1]) for at in range(0, sums_SPC.shape[-1], 2)]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) == len(ratios):
            out[name] = known[0] if quantity.combine is None else quantity.combine(*known)
    return out


def _value(quantity: Quantity, tables: Mapping[int, Table]) -> Json | None:
    """An arm's estimate, and every seed's value."""
    if not (found := aligned(quantity, {"": tables})):
        return None
    alone = {str(seed): aligned(quantity, {"": {seed: table}}) for seed, table in tables.items()}
    values = {seed: figures[""].value for seed, figures in alone.items() if figures}
    return estimate(found[""], quantity.null).to_json() | {"by_seed": values}


def _comparisons(study: RecordedStudy, quantity: Quantity, tables: ByArmAndSeed) -> Iterable[Json]:
    """Every arm less the baseline; of acceptance length also the ratio, and the detectable difference."""
    base = study.baseline
    for name in tables if base in tables else ():
        pair = aligned(quantity, {base: tables[base], name: tables[name]}) if name != base else {}
        if len(pair) < 2:
            continue
        found = estimate(pair[name].minus(pair[base]), null=0.0)
        row = {"quantity": quantity.name, "family": quantity.family, "arm": name, "baseline": base, **found.to_json()}
        if quantity.family == ACCEPTANCE:
            row["ratio"] = estimate(pair[name].over(pair[base])).to_json()
            row["detectable"] = detectable(found.spread)
        yield row


def _effects(study: RecordedStudy, quantity: Quantity, tables: ByArmAndSeed) -> list[Json]:
    """Main effects and interactions; none where there is one axis, whose comparisons say the same."""
    if study.plan["design"] != "grid" or len(study.plan["axes"]) < 2:
        return []
    known = aligned(quantity, tables)
    levels = {arm["name"]: frozenset(arm["levels"].items()) for arm in study.plan["arms"]}
    figures = {levels[name]: figure for name, figure in known.items()}
    found = effects(study.plan["axes"], study.plan["baseline"], figures)
    return [{"quantity": quantity.name, "family": quantity.family, "effect": name, **estimate(each, 0.0).to_json()}
            for name, each in found.items()]  # fmt: skip


def _positions(study: RecordedStudy) -> Iterable[Json]:
    """Of every draft shape, the share of passes that accepted position k, of those that accepted all before it."""
    done = study.done("evaluate")
    for shape in dict.fromkeys(shape for runs in done.values() for run in runs for shape in run.evaluation.answers):
        answers = {arm: [run.evaluation.answers.get(shape) or [] for run in runs] for arm, runs in done.items()}
        arms = {arm: _shares(each) for arm, each in answers.items() if each and all(each)}
        yield {"title": f"Acceptance by position, {shape}", "unit": "share of the passes that came so far",
               "axis": "draft position", "arms": arms}  # fmt: skip


def _shares(answers: Sequence[Sequence[Answer]]) -> list[Json | None]:
    """By position, of the answers of every seed."""
    deepest = max((depth for each in answers for one in each for depth in one.drafted), default=0)
    least = np.arange(deepest + 1)  # passes that accepted so many, or more
    tables = [_sums(each, lambda one: (np.array(one.accepted)[:, None] >= least).sum(0)) for each in answers]
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
            unit, title = found[0]["series"][name]["unit"], found[0]["series"][name]["title"]
            sums = [sums_of(one, name)[:, place] for one, place in zip(found, places, strict=True)]
            sums_KSP2 = np.stack([one[: min(map(len, sums))] for one in sums], axis=1)
            possible = SHARE if unit.startswith("share") else (-1.0, 1.0) if unit == "cosine" else POSITIVE
            curve = out.setdefault(name, {"title": title, "unit": unit, "axis": "draft step", "arms": {}})
            seen = [sums_SP2[:, (sums_SP2[..., 1] > 0).any(0)] for sums_SP2 in sums_KSP2]  # with any seed
            curve["arms"][arm] = [_point(pooled(one[..., 0], one[..., 1]), possible) for one in seen]
    return out.values()


def _point(figure: Linear | None, possible: tuple[float, float]) -> Json | None:
    return None if figure is None else estimate(figure, possible=possible).to_json()


def common(names: Sequence[Sequence[Any]]) -> list[Any]:
    """What all of them have, in the order of the first."""
    return [name for name in names[0] if all(name in each for each in names[1:])] if names else []
