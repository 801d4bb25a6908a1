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

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.drift_measure import Document, drift_document, drift_summary
from specdec.diagnostics.waterfall import (
    draw_waterfall,
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
    GREY,
    ReportTable,
    few_prompts,
    format_interval,
    label,
    print_report,
    save_figure,
    short_label,
    style,
    whiskers,
    write_report,
)
from specdec.utils.config import read_yaml
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import Depth
from specdec.utils.progress import progress
from specdec.utils.text import how_many

RESULT = "drift.json"
REPORT = "report.md"
FIGURE = "drift.png"


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
        plot_drift(drifts, folder / FIGURE)
        write_report(folder / REPORT, "Drift", notes, FIGURE, tables, context)
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


BY_PLACE = ("massive_ratio", "median_rms")
BY_STEP = (
    "out_rms", "state_rms", "sink_mass", "own_mass", "drafted_mass", "recent_mass", "prompt_mass", "entropy",
    "kl", "conditional_acceptance", "feature_cosine", "cosine",
)  # fmt: skip
# Series of the target's that are drawn beside the drafters'.
OF_TARGET = {"sink_mass": "target_sink_mass", "own_mass": "target_own_mass"}


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


def plot_drift(drifts: Sequence[Document], path: Path) -> None:
    """Draw the waterfall and every quantity by place and by draft step, a color for each drafter in all panels.

    Hollow markers lie beyond the trained depth; gray lines are the target's own, at the layers that are fused.
    """
    figure = Figure(figsize=(16, 14), dpi=120, layout="constrained")
    grid = figure.add_gridspec(4, 4)
    draw_waterfall([drift["waterfall"] for drift in drifts], figure.add_subplot(grid[0, :2]))
    for column, name in enumerate(BY_PLACE, start=2):
        _by_place(drifts, name, figure.add_subplot(grid[0, column]))
    for number, name in enumerate(BY_STEP):
        _by_step(drifts, name, figure.add_subplot(grid[1 + number // 4, number % 4]))
    handles = [
        Line2D([], [], label=short_label(name, 70), **style(number))
        for number, name in enumerate(drafter_names(drifts))
    ]
    handles.append(
        Line2D([], [], label="beyond the trained depth", color="#404040", marker="o", markerfacecolor="white",
               linestyle="")
    )  # fmt: skip
    handles.append(
        Line2D([], [], label="the target's, where its states are fused", color=GREY, linestyle="--")
    )
    figure.legend(
        handles=handles, loc="outside lower center", frameon=False, ncols=min(4, len(handles))
    )
    save_figure(figure, path)


def _by_step(drifts: Sequence[Document], name: str, axes: Axes) -> None:
    """Draw one series of every drafter, and the target's own attention next to the drafters'."""
    deepest = max(drift["depths"] for drift in drifts)
    columns = [range(1, drift["depths"] + 1) for drift in drifts]
    trained = [drift["trained_depth"] or drift["depths"] for drift in drifts]
    _draw_series([drift["series"][name] for drift in drifts], columns, axes, "-", trained)
    if name in OF_TARGET:
        means = {}  # over all places that some drafter reads
        for inputs in (drift["inputs"] for drift in drifts):
            for number, row in _rows(inputs["series"][OF_TARGET[name]]):
                means[inputs["places"][number - 1]] = row["mean"]
        for place, mass in means.items():
            axes.axhline(mass, color=GREY, linestyle="--", linewidth=1, zorder=0)
            axes.annotate(place, (0.99, mass), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom",
                          color="#606060")  # fmt: skip
    axes.set(xlabel="draft step", xlim=(0.5, deepest + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _by_place(drifts: Sequence[Document], name: str, axes: Axes) -> None:
    """Draw one series of the inputs of every drafter; drafters may fuse other layers."""
    inputs = [drift["inputs"] for drift in drifts]
    layers = {place for drift in inputs for place in drift["places"][:-3]}
    places = sorted(layers, key=lambda place: int(place.rpartition(" ")[2]) if " " in place else 0)
    places += inputs[0]["places"][-3:]
    columns = [list(map(places.index, drift["places"])) for drift in inputs]
    _draw_series([drift["series"][name] for drift in inputs], columns, axes, "")
    axes.set(yscale="log")
    axes.set_xticks(range(len(places)), [label(place, 8) for place in places], fontsize=8)


def _rows(series: Document) -> list[tuple[int, Document]]:
    """Return every row that has a mean, with its number from 1 on."""
    keys = ("mean", "low", "high")
    rows = (dict(zip(keys, row, strict=True)) for row in zip(*map(series.get, keys), strict=True))
    return [(number, row) for number, row in enumerate(rows, start=1) if row["mean"] is not None]


def _draw_series(
    series: Sequence[Document], columns: Sequence[Sequence[int]], axes: Axes, line: str, trained: Sequence[int] = ()
) -> None:  # fmt: skip
    """Draw means with intervals, each drafter's in its style and next to the others'.

    Args:
        columns: of each drafter, where its rows stand.
        line: matplotlib's style of the line, empty for none.
        trained: of each drafter, the depth beyond which markers are hollow.
    """
    for number, (drawn, places) in enumerate(zip(series, columns, strict=True)):
        look = style(number)
        shift = 0.08 * (number - (len(series) - 1) / 2)
        rows = _rows(drawn)
        points = [places[row - 1] + shift for row, _ in rows]
        axes.plot(
            points, [figure["mean"] for _, figure in rows], color=look["color"], linestyle=line
        )
        for x, (row, figure) in zip(points, rows, strict=True):
            hollow = bool(trained) and row > trained[number]
            axes.errorbar(
                x, figure["mean"], yerr=[[end] for end in whiskers(figure)], capsize=2, elinewidth=1, markersize=5,
                markerfacecolor="white" if hollow else look["color"], **look,
            )  # fmt: skip
    axes.set_ylabel(series[0]["unit"])
    axes.set_title(series[0]["title"], fontsize=10)
    axes.grid(alpha=0.3)
