"""Reads what is measured of one run of a study: its files, and the metrics in them, by name.

A quantity is a ratio of two sums over prompts (acceptance length: committed tokens over target passes), or two such
ratios, one divided by the other or less it (growth of the state: its size at the last draft step over that at the
first). ``primary`` in a study names them: ``acceptance_length``, ``acceptance_length_in_code``, ``drift.kl_at_8``,
``drift.out_rms_growth``, ``drift.sink_mass_change``, ``kept.no_bos``, ``acceptance_length_under.no_bos``.

Legend: P prompts, C sums and weights in turn, K draft steps.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.data.regions import REGIONS
from specdec.decoding import parse_shape
from specdec.diagnostics.conditions import Condition, parse_conditions
from specdec.diagnostics.drift_figures import (
    CHANGES,
    LEAST_STEPS,
    DriftFigure,
    change_figure,
    drift_figures,
    sums_of,
)
from specdec.diagnostics.drift_measure import ATTENTION, DEPTHS, SERIES
from specdec.evaluation.metrics import Answer, committed, target_passes
from specdec.evaluation.summary import in_region
from specdec.report.contrasts import Linear
from specdec.report.statistics import ANY, LENGTH, POSITIVE, SHARE, Array, Range, possible
from specdec.studies.arms import Arm
from specdec.studies.recorded_run import RecordedRun

Table = Mapping[str, Array]  # of a run: by prompt, its sums and weights

ACCEPTANCE = "acceptance length"
DRIFT = "drift"
ROBUSTNESS = "robustness"
# and where they are measured
FAMILIES = {ACCEPTANCE: "evaluate", DRIFT: "drift", ROBUSTNESS: "robustness"}
# the means of a figure of drift
COMBINE: dict[str, Callable[..., Linear | None]] = {
    "mean": lambda mean: mean,
    "ratio": Linear.over,
    "difference": Linear.minus,
}
DISJOINT = {*[*ATTENTION][:5]}  # regions that attention is divided among
# of drift, in every study
USUAL = ("drift.state_rms_growth", "drift.out_rms_growth", "drift.sink_mass_change")
LENGTH_UNDER = "acceptance_length_under"
NAME = re.compile(
    r"(?P<kind>acceptance_length|accepted)(_at_(?P<at>[1-9]\d*(-[1-9]\d*)?)|_in_(?P<region>[a-z_]+))?"
    r"(\.(?P<shape>.+))?"
    r"|(?P<drift>drift)\.(?P<series>\w+?(\+\w+?)*)_(at_(?P<step>[1-9]\d*(-[1-9]\d*)?)"
    rf"|(?P<change>{'|'.join(CHANGES)}))"
    rf"|(?P<under>kept|{LENGTH_UNDER})\.(?P<condition>.+)"
)


class Metric(NamedTuple):
    """A measurement of an arm, of the same draft steps or under the same condition in all arms that have it.

    ``panel`` titles its figure, which quantities of other draft steps may share; ``null`` is its value without drift or
    loss, if known; ``table`` gives a run's two sums for every prompt, or four, of two ratios for ``combine``;
    ``bounds`` are the least and the most that it can be.
    """

    name: str
    panel: str
    family: str
    unit: str
    null: float | None
    table: Callable[[RecordedRun], Table | None]
    bounds: Range
    combine: Callable[..., Linear | None] = COMBINE["mean"]


def check_outcome(name: str, arm: Arm) -> None:
    """Raise ValueError unless an arm will have been measured for a metric of that name."""
    parts = _parts(name)
    where = f"primary: outcome {name}"
    family = DRIFT if parts["drift"] else ROBUSTNESS if parts["under"] else ACCEPTANCE
    if (measure := arm.measures.get(FAMILIES[family])) is None:
        raise ValueError(
            f"{where}: the study has no {FAMILIES[family]}: add it, or give another outcome"
        )
    last = 0
    if text := parts["at"] or parts["step"]:
        last = _steps(text).stop
        if not _steps(text):
            raise ValueError(f"{where}: {text} is no range of steps: the first one first")
    config = measure.config
    if parts["region"]:
        _region(parts["region"], where)
    if family == ACCEPTANCE:
        asked, known = _check_shape(name, parts["shape"], last, config["shape"], where)
    elif family == DRIFT:
        asked = parts["series"].split("+")
        known = [*SERIES]
        units = {SERIES[series][1] for series in asked if series in SERIES}
        if len(units) > 1:
            raise ValueError(
                f"{where}: a sum of {' and '.join(sorted(units))} means nothing: give series of one unit"
            )
        last = max(last, LEAST_STEPS.get(parts["change"], 1))
        if last > (depths := config["depths"] or DEPTHS):
            raise ValueError(
                f"{where}: drift has {depths} steps: give drift.depths, or an earlier step"
            )
    else:
        asked = [_condition(parts["condition"])]
        known = [condition.name for condition in parse_conditions(config["conditions"])]
        known += [Condition().name] if parts["under"] == LENGTH_UNDER else []
    for missing in asked:
        if missing not in known:
            raise ValueError(
                f"{where}: arm {arm.name} has no {missing}; it has: {', '.join(known)}"
            )


def _check_shape(
    name: str, text: str | None, last: int, texts: Sequence[str], where: str
) -> tuple[list[str], list[str]]:
    """Return the draft shape that an outcome names and those of the study; ValueError if one is too shallow."""
    depths = {shape.name: shape.depth for shape in map(parse_shape, texts)}
    if text is None and len(texts) > 1:
        raise ValueError(f"{where}: of which draft shape? As {name}.{texts[0]}")
    asked = [_shape(text)] if text else []
    depth = max((depths[shape] for shape in asked or depths if shape in depths), default=last)
    if depth < last:
        raise ValueError(
            f"{where}: the draft shape has {depth} positions: give a deeper one, or an earlier position"
        )
    return asked, [*depths]


def _parts(name: str) -> dict[str, str]:
    match = NAME.fullmatch(name)
    if match is None or (match["kind"] == "accepted") != (match["at"] is not None):
        raise ValueError(
            f"primary: outcome {name}: expected acceptance_length, acceptance_length_in_REGION, accepted_at_K, "
            "accepted_at_K-K (.SHAPE behind them where there are several), drift.SERIES_at_K, drift.SERIES_ "
            f"with one of {', '.join(CHANGES)}, kept.CONDITION or {LENGTH_UNDER}.CONDITION"
        )
    return match.groupdict()


def _region(text: str, where: str) -> str:
    """Return the region of a name in which spaces are underscores; ValueError if there is none."""
    regions = {region.replace(" ", "_"): region for region in REGIONS}
    if text not in regions:
        raise ValueError(f"{where}: no region {text}; there are: {', '.join(regions)}")
    return regions[text]


def _steps(text: str) -> range:
    """``8`` or ``5-8``, counted from 0."""
    first, _, last = text.partition("-")
    return range(int(first) - 1, int(last or first))


def _shape(text: str) -> str:
    with contextlib.suppress(ValueError):
        return parse_shape(text).name
    return text  # the name itself


def _condition(text: str) -> str:
    with contextlib.suppress(ValueError):
        (condition,) = parse_conditions([text])
        return condition.name
    return text  # the name itself, or of several


def metric_named(name: str, run: RecordedRun) -> Metric | None:
    """Return the metric of a name, of the shape and steps that a run was measured with; None if it was not."""
    parts = _parts(name)
    if parts["drift"]:
        return _drift_metric(name, parts, run)
    if parts["under"]:
        return _under(parts["under"], _condition(parts["condition"]), run)
    shapes = [*run.evaluation.answers] if run.done("evaluate") else []
    if parts["shape"]:
        shapes = [shape for shape in shapes if shape == _shape(parts["shape"])]
    if len(shapes) != 1:
        return None
    if parts["at"]:
        return accepted_at(parts["at"], shapes[0])
    if parts["region"]:
        return _acceptance_in(_region(parts["region"], f"outcome {name}"), shapes[0])
    return _acceptance(shapes[0])


def _drift_metric(name: str, parts: Mapping[str, str], run: RecordedRun) -> Metric | None:
    """Return the metric of a series of drift, or of a sum of several, at a step or from the first to the last."""
    series = parts["series"]
    names = series.split("+")
    if not run.done("drift") or not set(names) <= set(run.measured("drift")["series"]):
        return None
    last = run.measured("drift")["depths"]
    title = " and ".join(SERIES[known][0] for known in names if known in SERIES) or series
    unit = SERIES[names[0]][1]
    if parts["step"]:
        title += f", step {parts['step']}"
        return _of_drift(DriftFigure(name, title, series, (_steps(parts["step"]),), unit))
    return _of_drift(change_figure(name, parts["change"], series, title, unit, last))


def recorded_metrics(runs: Iterable[RecordedRun], primary: Sequence[str]) -> dict[str, Metric]:
    """Primary outcomes, and all else that any run has, by their names in ``primary``, in order of family."""
    by_name: dict[str, Metric] = {}
    for run in runs:
        of_run: dict[str, Metric | None] = {name: metric_named(name, run) for name in primary}
        if run.done("evaluate"):
            of_run |= {
                f"acceptance_length.{shape}": _acceptance(shape) for shape in run.evaluation.answers
            }
        if run.done("drift"):
            measurement = run.measured("drift")
            of_run |= {name: metric_named(name, run) for name in USUAL}
            depths = measurement["depths"], measurement["trained_depth"]
            for figure in drift_figures(*depths):
                if figure.name == "acceptance_change" and figure.series in measurement["series"]:
                    metric = _of_drift(figure)
                    of_run[metric.name] = metric
        if run.done("robustness"):
            measurement = run.measured("robustness")
            conditions = [row["name"] for row in measurement["conditions"]]
            names = [f"kept.{name}" for name in conditions if name != measurement["clean"]]
            names += [f"{LENGTH_UNDER}.{name}" for name in conditions]
            of_run |= {name: metric_named(name, run) for name in names}
        for name, known in of_run.items():
            if known is not None:
                by_name.setdefault(name, known)
    return dict(sorted(by_name.items(), key=lambda pair: [*FAMILIES].index(pair[1].family)))


def sum_by_prompt(answers: Iterable[Answer], columns: Callable[[Answer], Any]) -> Table:
    """Sums over each prompt's answers."""
    out: dict[str, Array] = {}
    for answer in answers:
        out[answer.prompt_id] = out.get(answer.prompt_id, np.zeros(1)) + np.array(
            columns(answer), dtype=float
        )
    return out


def _tokens_and_passes(answer: Answer) -> tuple[int, int]:
    """The two sums of an acceptance length."""
    return committed(answer), target_passes(answer)


def _acceptance(shape: str) -> Metric:
    """Tokens committed per target pass, the bonus token included."""

    def table(run: RecordedRun) -> Table | None:
        answers = run.evaluation.answers.get(shape)
        if answers is None:
            return None
        return sum_by_prompt(answers, _tokens_and_passes)

    name = f"{ACCEPTANCE}, {shape}"
    return Metric(name, name, ACCEPTANCE, "tokens per target pass", None, table, LENGTH)


def _acceptance_in(region: str, shape: str) -> Metric:
    """The same of the passes that begin in a region, over the prompts whose answers have such a pass."""

    def table(run: RecordedRun) -> Table | None:
        answers = run.evaluation.answers.get(shape, [])
        inside = [in_region(answer, region) for answer in answers]
        sums = sum_by_prompt(inside, _tokens_and_passes)
        return {prompt: row for prompt, row in sums.items() if row[1]} or None

    name = f"{ACCEPTANCE} in {region}, {shape}"
    return Metric(name, name, ACCEPTANCE, "tokens per target pass", None, table, LENGTH)


def accepted_at(at: str, shape: str) -> Metric:
    """Return the share of passes that accepted a position's draft, of those that accepted all before it and had one
    there; or of several positions."""
    positions = np.array(_steps(at)) + 1

    def columns(answer: Answer) -> Sequence[int]:
        accepted_N1 = np.array(answer.accepted)[:, None]
        drafted_N1 = np.array(answer.drafted)[:, None]
        judged_NK = (accepted_N1 >= positions - 1) & (drafted_N1 >= positions)
        return int((accepted_N1 >= positions).sum()), int(judged_NK.sum())

    def table(run: RecordedRun) -> Table | None:
        answers = run.evaluation.answers.get(shape)
        return None if answers is None else sum_by_prompt(answers, columns)

    name = f"acceptance at position {at}, {shape}"
    unit = "share of the passes that got this far"
    return Metric(name, name, ACCEPTANCE, unit, None, table, SHARE)


def _of_drift(figure: DriftFigure) -> Metric:
    """A mean over steps, or one compared with that over others; of the sum of series where several are named.

    Acceptance beyond the trained depth is compared at the same steps alone, which depend on that depth.
    """
    change = figure.name == "acceptance_change"
    steps = " of ".join(str(depths.stop) for depths in reversed(figure.depths))
    name = f"{figure.title} ({steps} steps)" if change else figure.title

    def table(run: RecordedRun) -> Table | None:
        measurement = run.measured("drift")
        figures = drift_figures(measurement["depths"], measurement["trained_depth"])
        known = {known_figure.name: known_figure.depths for known_figure in figures}
        names = figure.series.split("+")
        if (
            not set(names) <= set(measurement["series"])
            or max(depths.stop for depths in figure.depths) > measurement["depths"]
        ):
            return None
        if change and known.get(figure.name) != figure.depths:
            return None
        sums = [sums_of(measurement, name) for name in names]
        total_KP2 = np.stack([sum(sums_KP2[..., 0] for sums_KP2 in sums), sums[0][..., 1]], axis=-1)
        return dict(zip(map(str, measurement["prompts"]), figure.columns(total_KP2), strict=True))

    how = COMBINE[figure.how]
    bounds = _bounds(figure)
    return Metric(name, figure.title, DRIFT, figure.unit, figure.null, table, bounds, how)


def _bounds(figure: DriftFigure) -> Range:
    """Return the range of a figure; a sum of shares that overlap may exceed 1, a ratio of cosines may be negative."""
    names = figure.series.split("+")
    if figure.how == "ratio" and SERIES[names[0]][1] == "cosine":
        return ANY
    most = 1 if set(names) <= DISJOINT else len(names)
    low, high = possible(figure.unit)
    return low * most, high * most


def _under(kind: str, condition: str, run: RecordedRun) -> Metric | None:
    """Return the acceptance length under a condition, or what it is of that of clean prompts; None if not measured."""
    rows = run.measured("robustness")["conditions"] if run.done("robustness") else []
    titles = {row["name"]: row["title"] for row in rows}
    if condition not in titles:
        return None
    if kind == "kept":
        name = f"Acceptance kept, {titles[condition]}"
        return Metric(
            name, name, ROBUSTNESS, "ratio to clean prompts", 1.0, functools.partial(_sums_under, condition), POSITIVE,
            Linear.over,
        )  # fmt: skip

    def table(run: RecordedRun) -> Table | None:
        sums = _sums_under(condition, run)
        # the prompts of the share kept: those with a target pass in the clean run too
        return sums and {prompt: row[:2] for prompt, row in sums.items() if row[3]}

    name = f"Acceptance length under {titles[condition]}"
    return Metric(name, name, ROBUSTNESS, "tokens per target pass", None, table, LENGTH)


def _sums_under(condition: str, run: RecordedRun) -> Table | None:
    """Return committed tokens and passes under a condition, and in the clean run, of every prompt."""
    measurement = run.measured("robustness")
    rows = {row["name"]: row for row in measurement["conditions"]}
    row = rows.get(condition)
    clean = rows[measurement["clean"]]
    if row is None or row.get("skipped"):
        return None
    columns = [row["committed"], row["passes"], clean["committed"], clean["passes"]]
    sums_P4 = np.array([[float(value or 0) for value in column] for column in columns]).T
    return dict(zip(map(str, measurement["prompts"]), sums_P4, strict=True))
