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
from specdec.diagnostics.drift_measure import Document, drift_document, drift_summary
from specdec.diagnostics.drift_plots import CAPTIONS, plot_drift
from specdec.diagnostics.waterfall import (
    measure_levels,
    waterfall,
    waterfall_table,
    waterfall_verdict,
)
from specdec.drafter.io import located
from specdec.evaluation.benchmark import cpu_matmul_backend
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
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
        depths: draft steps of a chain; may exceed the trained ones.
        trained_depth: unroll steps in training, where no run directory around a drafter says it.
    """

    drafter: list[str]
    depths: Depth = 8
    trained_depth: Depth | None = None

    def __post_init__(self) -> None:
        if self.depths >= self.max_new_tokens:
            raise ValueError(
                f"depths is {self.depths}: it must be below max_new_tokens, {self.max_new_tokens}"
            )
        if not self.drafter or len({*self.drafter}) < len(self.drafter):
            raise ValueError(
                f"drafter names {how_many(len(self.drafter), 'drafter')}: give one or more, each once"
            )


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
            pairs.append(
                load_pair(
                    pairs[0].target if pairs else config.target,
                    name,
                    config.device,
                    config.other_target,
                )
            )
        target = pairs[0].target
        answer_tokens = config.max_new_tokens + config.depths
        ids, skipped = first_turns(target, prompts, answer_tokens, config.depths + 1)
        left_out = {skip.prompt_id: skip.reason for skip in skipped}
        names = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        asked = list(zip(names, ids, strict=True))
        # Of every prompt: the target's answer, and for each drafter the drafts at all places and decoding.
        parts = (1 + 2 * len(pairs)) * len(names)
        with progress("drift", "part", parts) as advance, cpu_matmul_backend(target):
            answers = answered_texts(target, asked, answer_tokens, advance=advance)
            drifts = [
                _measure_drift(config, name, pair, depth, answers, advance)
                for name, pair, depth in zip(config.drafter, pairs, trained_depths, strict=True)
            ]
        too_short = f"its answer is too short for a chain of {how_many(config.depths, 'token')}"
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
    advance: Callable[[int], object],
) -> Document:  # fmt: skip
    """Measure one drafter on the target's answers."""
    levels, texts = measure_levels(
        pair.target, pair.drafter, answers, config.max_new_tokens, config.depths, advance
    )
    names = [text.prompt_id for text in texts]
    drift = drift_document(
        names,
        [text.sums_FK2 for text in texts],
        [text.inputs_FR2 for text in texts],
        pair.drafter.config.aux_layers,
        trained_depth,
        config.depths,
    )
    drift["summary"] = drift_summary(drift)
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
        tables += [table._replace(title=prefix + table.title) for table in drift_tables(drift)]
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
    ]


def _means(series: Document) -> list[list[str]]:
    return [
        [f"{row['title']} ({row['unit']})", *map(_number, row["mean"])] for row in series.values()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"
