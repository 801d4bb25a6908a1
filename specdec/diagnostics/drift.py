"""``specdec drift``: where acceptance is lost, and does a drafter drift in its chains?

The paper on attention drift (https://arxiv.org/abs/2605.09992) reports that with raw feedback the recurrent state grows
from draft step to draft step while attention leaves the sink for the drafter's own guesses, and that feeding the normed
state back keeps both flat. What is measured stands in :mod:`specdec.diagnostics.drift_measure`, what acceptance is lost
to in :mod:`specdec.diagnostics.waterfall`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.calibration import calibration
from specdec.diagnostics.drift_figures import drift_summary, strongest_row
from specdec.diagnostics.drift_measure import (
    DEPTHS,
    FIRST_ROWS,
    Document,
    drift_document,
)
from specdec.diagnostics.drift_plots import CAPTIONS, plot_drift
from specdec.diagnostics.waterfall import (
    measure_levels,
    waterfall,
    waterfall_table,
    waterfall_verdict,
)
from specdec.drafter.io import located
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.prompts import first_turns
from specdec.nn.backend import matmul_backend
from specdec.report.tables import (
    ReportTable,
    few_prompts,
    format_interval,
    print_report,
    write_report,
)
from specdec.utils.config import read_yaml
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import Depth
from specdec.utils.progress import progress
from specdec.utils.text import how_many

RESULT = "drift.json"
REPORT = "report.md"


@dataclass(frozen=True, kw_only=True)
class DriftConfig(MeasurementConfig):
    """Which drafters are measured, and how deep.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub; of several, all on the same answers.
        depths: draft steps of a chain; may exceed the trained ones, but not a block drafter's. 8 if not given, or as
            many as the shortest block makes.
        trained_depth: unroll steps in training, where no run directory around a drafter says it.
    """

    drafter: list[str]
    depths: Depth | None = None
    trained_depth: Depth | None = None

    def __post_init__(self) -> None:
        if self.depths is not None:
            self.check_length(self.depths)
        if not self.drafter or len({*self.drafter}) < len(self.drafter):
            raise ValueError(
                f"drafter names {how_many(len(self.drafter), 'drafter')}: give one or more, each once"
            )

    def check_length(self, depths: int) -> None:
        """Raise ValueError for answers that are no longer than a chain."""
        if depths >= self.max_new_tokens:
            raise ValueError(
                f"depths is {depths}: it must be below max_new_tokens, {self.max_new_tokens}"
            )

    def depths_of(self, pairs: Sequence[Pair]) -> int:
        """Return the draft steps of a chain; ValueError if they are more than a block drafter makes."""
        blocks = [pair.drafter.config.drafting.fixed_drafts for pair in pairs]
        shortest = min(filter(None, blocks), default=DEPTHS)
        depths = self.depths or min(DEPTHS, shortest)
        if any(0 < block < depths for block in blocks):
            raise ValueError(
                f"--depths {depths}: a drafter's block makes {shortest} drafts: give {shortest} or less"
            )
        self.check_length(depths)
        return depths


def drift(config: DriftConfig) -> int:
    """Where acceptance is lost, bar by bar; and attention, recurrent state and acceptance, draft step by draft step.

    Chains are drafted from every place of the target's own answers. Several drafters come in one picture. The exit
    status is 1 if the bars (vocabulary, drafter, drift, exposure) do not add up to what decoding accepts.

    Example: specdec drift --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl --limit 40
    """
    trained_depths = [
        depth_of_training(located(name), config.trained_depth) for name in config.drafter
    ]
    with staged_directory(config.place("drift")) as folder:
        prompts = config.load_prompts()
        pairs = list[Pair]()
        for name in config.drafter:
            pairs.append(config.load_pair(name, pairs[0].target if pairs else None))
        target = pairs[0].target
        depths = config.depths_of(pairs)
        answer_tokens = config.max_new_tokens + depths
        ids, skipped = first_turns(target, prompts, answer_tokens, depths + 1)
        left_out = {skip.prompt_id: skip.reason for skip in skipped}
        names = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        asked = list(zip(names, ids, strict=True))
        # Of every prompt: the target's answer, and for each drafter the drafts at all places and decoding.
        parts = (1 + 2 * len(pairs)) * len(names)
        with progress("drift", "part", parts) as advance, matmul_backend(target.device):
            answers = answered_texts(target, asked, answer_tokens, advance=advance)
            drifts = [
                _measure_drift(config, name, pair, depth, answers, depths, advance)
                for name, pair, depth in zip(config.drafter, pairs, trained_depths, strict=True)
            ]
        too_short = f"its answer is too short for a chain of {how_many(depths, 'token')}"
        left_out |= {name: too_short for name in names if name not in drifts[0]["prompts"]}
        context = config.context(target, prompts)
        notes, tables = _notes_and_tables(drifts, left_out)
        plot_drift(drifts, drafter_names(drifts), folder)
        write_report(folder / REPORT, "Drift", notes, CAPTIONS.items(), tables, context)
        reasons = [{"prompt_id": name, "reason": reason} for name, reason in left_out.items()]
        write_json(
            folder / RESULT, {**drifts[0], "beside": drifts[1:], "skipped": reasons, **context}
        )
    printed = [table for table in tables if "Mean " not in table.headings[0] and table.left == 1]
    print_report(printed, notes)
    return 0 if all(drift["waterfall"]["check"]["holds"] for drift in drifts) else 1


def _measure_drift(
    config: DriftConfig, name: str, pair: Pair, trained_depth: int | None, answers: Sequence[AnsweredText],
    depths: int, advance: Callable[[int], object],
) -> Document:  # fmt: skip
    """Measure one drafter on the target's answers."""
    levels, texts = measure_levels(
        pair.target, pair.drafter, answers, config.max_new_tokens, depths, advance
    )
    names = [text.prompt_id for text in texts]
    drift = drift_document(
        names,
        [text.sums_FK2 for text in texts],
        [text.inputs_FR2 for text in texts],
        pair.drafter.config.aux_layers,
        trained_depth,
        depths,
    )
    drift["summary"] = drift_summary(drift)
    drift["sink_at"] = strongest_row(drift)
    drift["calibration"] = calibration([text.bins_CKR3 for text in texts])
    drift["waterfall"] = {**waterfall(levels), "prompts": names}
    drift["drafter"] = drafter_facts(name, pair)
    return drift


def _notes_and_tables(
    drifts: Sequence[Document], left_out: dict[str, str]
) -> tuple[list[str], list[ReportTable]]:
    """Return the report's notes and tables, drafter by drafter, and last the prompts that were left out."""
    notes = []
    tables = []
    for name, drift in zip(drafter_names(drifts), drifts, strict=True):
        prefix = f"{name}: " if len(drifts) > 1 else ""
        notes.append(prefix + waterfall_verdict(drift["waterfall"]))
        if (row := strongest_row(drift)) is not None:
            masses = drift["rows"][f"row_{row}"]["mean"]
            notes.append(
                f"{prefix}of the first {FIRST_ROWS} rows, row {row} gets the most attention: {_number(masses[0])} at "
                f"step 1, {_number(masses[-1])} at step {drift['depths']}"
            )
        tables += [table._replace(title=prefix + table.title) for table in drift_tables(drift)]
    notes += override_notes([drift["drafter"] for drift in drifts])
    notes += few_prompts(len(drifts[0]["waterfall"]["prompts"]))
    tables.append(
        ReportTable(
            "Left out",
            ["Prompt", "Reason"],
            [[name, reason] for name, reason in left_out.items()],
            left=2,
        )
    )
    return notes, tables


def depth_of_training(directory: Path, default: int | None) -> int | None:
    """Return ``model.ttt_steps`` of the run that the drafter lies in, else the default."""
    run = directory.resolve().parent
    if not (run / "provenance.json").is_file():
        return default
    # A resumed run has config.1.yaml beside config.yaml, and so on.
    files = run.glob("config.*yaml")
    newest = max(files, key=lambda path: list(map(int, re.findall(r"\d+", path.name))))
    steps = (read_yaml(str(newest)).get("model") or {}).get("ttt_steps")
    return steps if isinstance(steps, int) else default


def drafter_names(drifts: Sequence[Document]) -> list[str]:
    """Return the drafters' labels, or their directories if labels are alike."""
    labels, directories = (
        [drift["drafter"][key] for drift in drifts] for key in ("label", "directory")
    )
    return labels if len({*labels}) == len(labels) else directories


def drift_tables(drift: Document) -> list[ReportTable]:
    """Return one drafter's waterfall, summary, and every mean by step and by place."""
    trained = drift["trained_depth"]
    steps = [str(k) for k in range(1, drift["depths"] + 1)]
    if trained is not None:
        steps[trained:] = [f"{step}*" for step in steps[trained:]]
    figures = [
        [figure["title"], format_interval(figure, _number)] for figure in drift["summary"].values()
    ]
    about = f"{how_many(sum(drift['chains']), 'chain')} of {how_many(len(drift['prompts']), 'prompt')}, "
    about += f"trained depth {trained or 'unknown'}"
    inputs = drift["inputs"]
    return [
        waterfall_table(drift["waterfall"], drift["depths"]),
        ReportTable("Drift", ["Figure", ""], figures),
        ReportTable(
            about, ["Mean at step (*: beyond the trained depth)", *steps], _means(drift["series"])
        ),
        ReportTable(
            "What the target gives", ["Mean at place", *inputs["places"]], _means(inputs["series"])
        ),
        _confidence_table(drift),
        ReportTable("Confidence by step", ["Mean at step", *steps], _confidence_by_step(drift)),
    ]


def _confidence_table(drift: Document) -> ReportTable:
    """Return what every kind of confidence is worth, over all draft steps."""
    rows = []
    for confidence in drift["calibration"].values():
        measured = confidence["all_steps"]
        intervals = [measured[figure] for figure in ("calibration_error", "ranking")]
        error, order = (format_interval(row, _number) if row else "-" for row in intervals)
        calibrated = _number(measured["error_if_calibrated"])
        rows.append([confidence["title"], str(measured["drafts"]), error, calibrated, order])
    return ReportTable(
        "Confidence", ["Kind", "Drafts", "Calibration error", "If calibrated", "Ranking"], rows
    )


def _confidence_by_step(drift: Document) -> list[list[str]]:
    """Return the same means at every draft step."""
    rows = []
    for confidence in drift["calibration"].values():
        steps = confidence["steps"]
        title = confidence["title"]
        for figure in ("calibration_error", "ranking"):
            means = [_number(step[figure] and step[figure]["mean"]) for step in steps]
            rows.append([f"{figure.replace('_', ' ')}, {title}", *means])
            if figure == "calibration_error":
                expected = [_number(step["error_if_calibrated"]) for step in steps]
                rows.append([f"the same if calibrated, {title}", *expected])
    return rows


def _means(series: Document) -> list[list[str]]:
    return [
        [f"{row['title']} ({row['unit']})", *map(_number, row["mean"])] for row in series.values()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"
