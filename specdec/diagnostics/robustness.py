"""``specdec robustness``: how much of its acceptance a drafter keeps when its input is other than usual.

With C tokens committed in N target passes, c and n in the clean run, all of the same prompts, ``length_kept`` is
(C / N) / (c / n), at least n / c, since a pass commits the bonus token in any case; and ``drafts_kept`` is
(C / N - 1) / (c / n - 1), without that token: 0 where no draft is accepted any more.

Legend: P prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec.decoding import DraftShape, Sampling, parse_shape
from specdec.diagnostics.conditions import CleanRun, Condition, parse_conditions
from specdec.drafter import Drafter
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.config import MeasurementConfig, drafter_facts
from specdec.evaluation.metrics import Answer, answer_warnings, committed, looping, target_passes
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.prompts import Prompt, Skipped
from specdec.report.plots import PaperFigure, Point, label, paper_style, save_figure, style
from specdec.report.statistics import LENGTH, POSITIVE, Array, measured, over, ratio
from specdec.report.tables import (
    ReportTable,
    few_prompts,
    format_interval,
    print_report,
    write_report,
)
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import Side, Whole
from specdec.utils.progress import progress

CLEAN = Condition()
SAME = "the condition changes no prompt"
# of the caches, for each sequence of a batch: of longer texts fewer are decoded side by side
SLOTS = 2048
RECORD = "robustness.json"
REPORT = "report.md"
FIGURE = "robustness.png"
CAPTION = (
    "What the drafter keeps under each condition of its acceptance length, and of its accepted drafts, as a ratio to "
    "clean prompts, with 95 % intervals over prompts. Dashed: nothing is lost."
)
Document = dict[str, Any]  # ``robustness.json``, or a part of it
Counts = dict[str, tuple[int, int]]  # committed tokens and target passes of every prompt, by its id
SHARES: dict[str, Callable[[Array], Array]] = {  # of sums under a condition and clean, (..., 4)
    "length_kept": over,
    "drafts_kept": lambda sums: (ratio(sums[..., :2]) - 1) / (ratio(sums[..., 2:]) - 1),
}


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig(MeasurementConfig):
    """What is decoded, under which conditions.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub.
        conditions: no_bos, template:family=chatml, context:tokens=4096, noise_hidden:alpha=0.5, ...; a name alone is
            all of its kind, none is all there are.
        shape: the draft shape, one as of specdec evaluate.
        seed: of noise and temperatures.
        batch_size: sequences decoded side by side; fewer where texts are long.
    """

    drafter: str
    conditions: list[str] = field(default_factory=list)
    shape: str = "chain:depth=5"
    seed: Whole = 0
    batch_size: Side = 8


def robustness(config: RobustnessConfig) -> None:
    """How much of its acceptance a drafter keeps under other templates, prompts, contexts, temperatures and noise.

    Every prompt is decoded clean and under every condition, losslessly: what a condition does to the text, target and
    drafter both see.

    Example: specdec robustness --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl
    """
    conditions = parse_conditions(config.conditions)
    shape = parse_shape(config.shape)
    prompts = config.load_prompts()
    pair = config.load_pair(config.drafter)
    clean = CleanRun(pair.target, prompts, config.max_new_tokens, shape.nodes_drafted + 1)
    context = config.context(pair.target, prompts)
    context["drafter"] = drafter_facts(config.drafter, pair)
    context["settings"]["shape_config"] = shape.describe()
    with staged_directory(config.place("robustness")) as folder:
        runs = [planned_run(condition, clean) for condition in (CLEAN, *conditions)]
        decode_runs(clean, pair.drafter, shape, runs, config.batch_size, config.seed)
        result = record(runs) | context
        tables = robustness_tables(result)
        notes = override_notes([context["drafter"]]) + few_prompts(len(result["prompts"]))
        for condition in result["conditions"]:
            notes += answer_warnings(f"Warning: {condition['name']}", condition)
        plot_robustness(result, folder / FIGURE)
        write_report(folder / REPORT, "Robustness", notes, [(FIGURE, CAPTION)], tables, context)
        write_json(folder / RECORD, result)
    print_report(tables, notes)


@dataclass
class ConditionRun:
    """The prompts that are decoded under a condition, and their answers."""

    condition: Condition
    prompts: list[Prompt] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)  # the first turn of every prompt
    # the reason by the id of each prompt that is not decoded
    left_out: dict[str, str] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def skipped(self) -> str | None:
        """The reason why nothing is decoded at all, if so."""
        if self.prompts:
            return None
        return next((reason for reason in self.left_out.values() if reason != SAME), SAME)


def planned_run(condition: Condition, clean: CleanRun) -> ConditionRun:
    """Choose the prompts of the clean run that a condition can be measured on.

    Raises:
        ValueError: none can be decoded in the clean run.
    """
    run = ConditionRun(condition)
    for prompt in clean.prompts:
        name = prompt.prompt_id
        ids = clean_ids = clean.asked[name]
        if condition != CLEAN:
            if not isinstance(clean_ids, list):
                continue
            try:
                ids = clean.first_ids(condition.conversation(prompt, clean))
            except ValueError as error:
                ids = Skipped(name, str(error).removeprefix(f"prompt {name}: "))
        if not isinstance(ids, list):
            run.left_out[name] = ids.reason if ids else "it has no turn"
        elif condition.of.of_text and ids == clean_ids:
            run.left_out[name] = SAME
        else:
            run.prompts.append(prompt)
            run.ids.append(ids)
    if condition == CLEAN and not run.prompts:
        name, reason = next(iter(run.left_out.items()))
        raise ValueError(f"prompt {name}: {reason}; none of {len(clean.prompts)} can be decoded")
    return run


def decode_runs(
    clean: CleanRun,
    drafter: Drafter,
    shape: DraftShape,
    runs: Sequence[ConditionRun],
    batch: int = 8,
    seed: int = 0,
) -> None:
    """Decode the planned prompts, and fill in every run's answers and the prompts whose later turns are left out."""
    with progress("robustness", "prompt", sum(len(run.prompts) for run in runs)) as advance:
        for run in (run for run in runs if run.prompts):
            condition = run.condition
            left_out = run.left_out
            longest = max(map(len, run.ids)) + clean.max_new_tokens + clean.nodes
            (run.answers,) = benchmark(
                clean.target, condition.drafter(drafter, seed), [shape], run.prompts, clean.max_new_tokens,
                sampling=condition.sampling(Sampling(seed=seed)), plain=False,
                converse=lambda prompt, _: condition.conversation(prompt, clean),  # noqa: B023  called before the next
                batch=max(1, min(batch, batch * SLOTS // longest)),
                advance=lambda more, _="": advance(more, condition.name),  # noqa: B023
                on_skip=lambda skip: left_out.update({skip.prompt_id: skip.reason}),  # noqa: B023
            )  # fmt: skip


def counts(answers: Sequence[Answer]) -> Counts:
    """Return tokens committed and target passes by prompt, over all its turns."""
    totals: Counts = {}
    for answer in answers:
        tokens, times = totals.get(answer.prompt_id, (0, 0))
        totals[answer.prompt_id] = (tokens + committed(answer), times + target_passes(answer))
    return totals


def kept_figures(under: Counts, clean: Counts) -> Document:
    """Return what is kept under a condition, with intervals over the prompts with a target pass in both runs."""
    rows = [[*sums, *clean.get(name, (0, 0))] for name, sums in under.items()]
    rows_P4 = np.array(rows, dtype=np.float64).reshape(-1, 4)
    rows_P4 = rows_P4[(rows_P4[:, 1::2] > 0).all(1)]
    figures = {"acceptance_length": measured(rows_P4, bounds=LENGTH)}
    figures |= {name: measured(rows_P4, share, POSITIVE) for name, share in SHARES.items()}
    known = {name: None if figure["mean"] is None else figure for name, figure in figures.items()}
    return {"measured_prompts": len(rows_P4)} | known


def record(runs: Sequence[ConditionRun]) -> Document:
    """Return what the drafter keeps under every condition; the first run is the clean one.

    ``committed`` and ``passes`` are in the order of ``prompts``, 0 for a prompt without a target pass.
    """
    clean = counts(runs[0].answers)
    ids = [prompt.prompt_id for prompt in runs[0].prompts]
    conditions = []
    for run in runs:
        totals = counts(run.answers)
        tokens, passes_of_prompts = zip(*(totals.get(name, (0, 0)) for name in ids), strict=True)
        name = run.condition.name
        about = {"name": name, "title": name, "skipped": run.skipped, "left_out": run.left_out}
        conditions.append(
            about
            | {"committed": tokens, "passes": passes_of_prompts}
            | kept_figures(totals, clean)
            | looping(run.answers)
        )
    return {"version": 1, "prompts": ids, "clean": CLEAN.name, "conditions": conditions}


def robustness_tables(result: Document) -> list[ReportTable]:
    """Return tables of what is kept under every condition, and of what was not measured."""
    rows = []
    skipped = []
    for condition in result["conditions"]:
        name = condition["name"]
        if condition["skipped"] is not None:
            skipped.append([name, condition["skipped"]])
            continue
        length = format_interval(condition["acceptance_length"], "{:.2f}".format)
        shares = [
            format_interval(condition[share], lambda value: f"{100 * value:.0f}", " %")
            for share in SHARES
        ]
        rows.append(
            [
                name,
                length,
                *shares,
                str(condition["measured_prompts"]),
                str(len(condition["left_out"])),
            ]
        )
    headings = [
        "Condition",
        "Acceptance length",
        "Length kept",
        "Drafts kept",
        "Prompts",
        "Left out",
    ]
    of_all = [[name, reason] for name, reason in result["conditions"][0]["left_out"].items()]
    return [
        ReportTable("What is kept", headings, rows),
        ReportTable("Not measured", ["Condition", "Reason"], skipped, left=2),
        ReportTable("Prompts left out of all", ["Prompt", "Reason"], of_all, left=2),
    ]


@paper_style()
def plot_robustness(result: Document, path: Path) -> None:
    """Draw what is kept under every condition: see :func:`save_figure`."""
    rows = [condition for condition in result["conditions"][1:] if condition["skipped"] is None]
    labels = [label(condition["name"], 34, 1) for condition in rows]
    paper = PaperFigure(len(SHARES), len(SHARES), max(1.6, 0.7 + 0.15 * len(rows)), together=True)
    for share in SHARES:
        title = share.replace("_", " ")
        panel = paper.dots(title, "ratio to clean prompts", "condition", labels, 1.0)
        for height, condition in enumerate(rows):
            if condition[share] is not None:
                panel.dot(
                    "drafter", condition["name"], height, Point.of(condition[share]), style(0)
                )
    save_figure(paper, path)
