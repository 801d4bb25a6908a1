"""``specdec drift``: where acceptance is lost, and does a drafter drift in its chains?

The paper on attention drift (https://arxiv.org/abs/2605.09992) reports that with raw feedback the recurrent state grows
from draft step to draft step while attention leaves the sink for the drafter's own guesses, and that feeding the normed
state back keeps both flat. What is measured stands in :mod:`specdec.diagnostics.drift_measure`, what acceptance is lost
to in :mod:`specdec.diagnostics.waterfall`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.drift_measure import Document, document, summary
from specdec.diagnostics.waterfall import (
    draw_waterfall,
    measure_levels,
    verdict,
    waterfall,
    waterfall_table,
)
from specdec.evaluation.benchmark import cpu_matmul_backend
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
from specdec.report.tables import (
    GREY,
    ReportTable,
    few_prompts,
    label,
    print_report,
    save_figure,
    short,
    shown,
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
BY_PLACE = ("massive_ratio", "median_rms")
BY_STEP = (
    "out_rms", "state_rms", "sink_mass", "own_mass", "drafted_mass", "recent_mass", "prompt_mass", "entropy",
    "kl", "conditional_acceptance", "feature_cosine", "cosine",
)  # fmt: skip
# drawn beside the drafters'
OF_TARGET = {"sink_mass": "target_sink_mass", "own_mass": "target_own_mass"}


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
    trained = [depth_of_training(Path(one), config.trained_depth) for one in config.drafter]
    with staged_directory(config.place("drift")) as folder:
        prompts = config.load_prompts()
        pairs = list[Pair]()
        for one in config.drafter:
            source = pairs[0].target if pairs else config.target
            pairs.append(load_pair(source, one, config.device, config.other_target))
        target = pairs[0].target
        new = config.max_new_tokens
        ids, skipped = first_turns(target, prompts, new + config.depths, config.depths + 1)
        left_out = {one.prompt_id: one.reason for one in skipped}
        kept = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        found: list[Document] = []
        # every prompt: the target's answer; and for each drafter, drafts at all places and decoding
        with (
            progress("drift", "part", (1 + 2 * len(pairs)) * len(kept)) as advance,
            cpu_matmul_backend(target),
        ):
            asked = list(zip(kept, ids, strict=True))
            answers = answered_texts(
                target, asked, new + config.depths, on_answer=lambda: advance(1)
            )
            for name, pair, depth in zip(config.drafter, pairs, trained, strict=True):
                levels, texts = measure_levels(
                    target, pair.drafter, answers, new, config.depths, advance
                )
                names = [one.prompt_id for one in texts]
                aux_layers = pair.drafter.config.aux_layers
                sums = [one.sums_FK2 for one in texts]
                inputs = [one.inputs_FR2 for one in texts]
                own = document(names, sums, inputs, aux_layers, depth, config.depths)
                own |= {
                    "summary": summary(own),
                    "waterfall": {**waterfall(levels), "prompts": names},
                }
                found.append(own | {"drafter": drafter_facts(name, pair)})
        too_short = f"its answer is too short for a chain of {how_many(config.depths, 'token')}"
        left_out |= {name: too_short for name in kept if name not in found[0]["prompts"]}
        told = [{"prompt_id": name, "reason": reason} for name, reason in left_out.items()]
        context = config.context(target, prompts)
        notes = few_prompts(len(found[0]["waterfall"]["prompts"]))
        tables = [
            ReportTable(
                "Left out", ["Prompt", "Reason"], [list(one.values()) for one in told], left=2
            )
        ]
        for name, own in reversed([*zip(names_of(found), found, strict=True)]):
            about = f"{name}: " if len(found) > 1 else ""
            notes = [about + verdict(own["waterfall"]), *notes]
            tables = [one._replace(title=about + one.title) for one in report_tables(own)] + tables
        plot_drift(found, folder / FIGURE)
        write_report(folder / REPORT, "Drift", notes, FIGURE, tables, context)
        write_json(folder / RESULT, {**found[0], "beside": found[1:], "skipped": told, **context})
    print_report([one for one in tables if "Mean " not in one.headings[0] and one.left == 1], notes)
    return 0 if all(own["waterfall"]["check"]["holds"] for own in found) else 1


def names_of(found: Sequence[Document]) -> list[str]:
    """What the drafters are called: their labels, or their directories where labels are alike."""
    labels, places = ([own["drafter"][key] for own in found] for key in ("label", "directory"))
    return labels if len({*labels}) == len(labels) else places


def depth_of_training(directory: Path, given: int | None) -> int | None:
    """``model.ttt_steps`` of the run that the drafter lies in; else what is given."""
    run = directory.resolve().parent
    if not (run / "provenance.json").is_file():
        return given
    # config.yaml, resumed config.1.yaml
    times = {path: path.name.split(".")[1] for path in run.glob("config.*yaml")}
    newest = max(times, key=lambda path: int(times[path]) if times[path].isdigit() else 0)
    found = (read_yaml(str(newest)).get("model") or {}).get("ttt_steps")
    return found if isinstance(found, int) else given


def report_tables(found: Document) -> list[ReportTable]:
    """The waterfall, the summary, and every mean by step and by place, of one drafter."""
    trained = found["trained_depth"]
    steps = [
        f"{k}{'' if trained is None or k <= trained else '*'}"
        for k in range(1, found["depths"] + 1)
    ]
    figures = [[one["title"], shown(one, _number)] for one in found["summary"].values()]
    about = f"{how_many(sum(found['chains']), 'chain')} of {how_many(len(found['prompts']), 'prompt')}, "
    about += f"trained depth {trained or 'unknown'}"
    inputs = found["inputs"]
    return [
        waterfall_table(found["waterfall"], found["depths"]),
        ReportTable("Drift", ["Figure", ""], figures),
        ReportTable(
            about, ["Mean at step (*: beyond the trained depth)", *steps], _means(found["series"])
        ),
        ReportTable(
            "What the target gives", ["Mean at place", *inputs["places"]], _means(inputs["series"])
        ),
    ]


def _means(series: Document) -> list[list[str]]:
    return [
        [f"{one['title']} ({one['unit']})", *map(_number, one["mean"])] for one in series.values()
    ]


def _number(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"
    )


def plot_drift(found: Sequence[Document], path: Path) -> None:
    """Draw the waterfall and every quantity by place and by draft step, a colour for each drafter in all panels.

    Hollow markers lie beyond the trained depth; grey lines are the target's own, at the layers that are fused.
    """
    figure = Figure(figsize=(16, 14), dpi=120, layout="constrained")
    grid = figure.add_gridspec(4, 4)
    draw_waterfall([own["waterfall"] for own in found], figure.add_subplot(grid[0, :2]))
    for column, name in enumerate(BY_PLACE, start=2):
        _by_place(found, name, figure.add_subplot(grid[0, column]))
    for number, name in enumerate(BY_STEP):
        _by_step(found, name, figure.add_subplot(grid[1 + number // 4, number % 4]))
    hollow: dict[str, Any] = {
        "color": "#404040",
        "marker": "o",
        "markerfacecolor": "white",
        "linestyle": "",
    }
    handles = [
        Line2D([], [], label=short(name, 70), **style(number))
        for number, name in enumerate(names_of(found))
    ]
    handles.append(Line2D([], [], label="beyond the trained depth", **hollow))
    handles.append(
        Line2D([], [], label="the target's, where its states are fused", color=GREY, linestyle="--")
    )
    figure.legend(
        handles=handles, loc="outside lower center", frameon=False, ncols=min(4, len(handles))
    )
    save_figure(figure, path)


def _by_step(found: Sequence[Document], name: str, axes: Axes) -> None:
    """One series of every drafter; of attention also the target's."""
    for number, own in enumerate(found):
        trained = own["trained_depth"] or own["depths"]
        shift = 0.08 * (number - (len(found) - 1) / 2)
        _points(
            [(k + shift, each, k > trained) for k, each in _each(own["series"][name])],
            number,
            axes,
            "-",
        )
    if name in OF_TARGET:
        masses: dict[str, float] = {}
        for own in found:
            at = own["inputs"]["places"]
            masses |= {
                at[row - 1]: each["mean"]
                for row, each in _each(own["inputs"]["series"][OF_TARGET[name]])
            }
        for place, mass in masses.items():
            axes.axhline(mass, color=GREY, linestyle="--", linewidth=1, zorder=0)
            axes.annotate(place, (0.99, mass), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom",
                          color="#606060")  # fmt: skip
    one = found[0]["series"][name]
    axes.set(
        ylabel=one["unit"],
        xlabel="draft step",
        xlim=(0.5, max(own["depths"] for own in found) + 0.5),
    )
    axes.set_title(one["title"], fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _by_place(found: Sequence[Document], name: str, axes: Axes) -> None:
    """One series of the inputs of every drafter; drafters may fuse other layers."""
    places = list(dict.fromkeys(place for own in found for place in own["inputs"]["places"][:-3]))
    places = sorted(places, key=lambda place: int(place.rpartition(" ")[2]) if " " in place else 0)
    places += found[0]["inputs"]["places"][-3:]
    for number, own in enumerate(found):
        shift = 0.1 * (number - (len(found) - 1) / 2)
        at = [places.index(place) + shift for place in own["inputs"]["places"]]
        _points(
            [(at[row - 1], each, False) for row, each in _each(own["inputs"]["series"][name])],
            number,
            axes,
            "",
        )
    axes.set(yscale="log", ylabel=found[0]["inputs"]["series"][name]["unit"])
    axes.set_title(found[0]["inputs"]["series"][name]["title"], fontsize=10)
    axes.set_xticks(range(len(places)), [label(place, 8) for place in places], fontsize=8)
    axes.grid(alpha=0.3)


def _each(series: Document) -> list[tuple[int, dict[str, Any]]]:
    """Every row that has a mean, with its number from 1 on."""
    rows = zip(series["mean"], series["low"], series["high"], strict=True)
    told = [dict(zip(("mean", "low", "high"), row, strict=True)) for row in rows]
    return [(number, each) for number, each in enumerate(told, start=1) if each["mean"] is not None]


def _points(
    points: Sequence[tuple[float, dict[str, Any], bool]], number: int, axes: Axes, line: str
) -> None:
    """Means with intervals in a drafter's look, hollow where said so, on a line if any."""
    look = style(number)
    axes.plot(
        [x for x, *_ in points],
        [each["mean"] for _, each, _ in points],
        color=look["color"],
        linestyle=line,
    )
    for x, each, hollow in points:
        ends = [[end] for end in whiskers(each)]
        fill = "white" if hollow else look["color"]
        axes.errorbar(
            x,
            each["mean"],
            yerr=ends,
            capsize=2,
            elinewidth=1,
            markerfacecolor=fill,
            markersize=5,
            **look,
        )
