"""``specdec drift``: where acceptance is lost, and does a drafter drift in its chains?

The paper on attention drift (https://arxiv.org/abs/2605.09992) reports that with raw feedback the recurrent state grows
from draft step to draft step while attention leaves the sink for the drafter's own guesses, and that feeding the normed
state back keeps both flat. What is measured stands in :mod:`specdec.diagnostics.drift_measure`, what acceptance is lost
to in :mod:`specdec.diagnostics.waterfall`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from specdec.diagnostics.drift_measure import SERIES, Document, document, summary
from specdec.diagnostics.waterfall import draw_waterfall, measure_levels, verdict, waterfall, waterfall_table
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.style import ReportTable, few_prompts, print_report, save_figure, shown, style, write_report
from specdec.utils.config import read_yaml
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import Depth
from specdec.utils.text import how_many

RESULT, REPORT, FIGURE = "drift.json", "report.md", "drift.png"


@dataclass(frozen=True, kw_only=True)
class DriftConfig(MeasurementConfig):
    """Which drafter is measured, and how deep.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub.
        depths: draft steps of a chain; may exceed the trained ones.
        trained_depth: unroll steps in training, where no run directory around the drafter says it.
    """

    drafter: str
    depths: Depth = 8
    trained_depth: Depth | None = None

    def __post_init__(self) -> None:
        if self.depths >= self.max_new_tokens:
            raise ValueError(f"depths is {self.depths}: it must be below max_new_tokens, {self.max_new_tokens}")


def drift(config: DriftConfig) -> int:
    """Where acceptance is lost, bar by bar; and attention, recurrent state and acceptance, draft step by draft step.

    Chains are drafted from every place of the target's own answers. The exit status is 1 if the bars (vocabulary,
    drafter, drift, exposure) do not add up to what decoding accepts.

    Example: specdec drift --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl --limit 40
    """
    trained = depth_of_training(Path(config.drafter), config.trained_depth)
    with staged_directory(config.place("drift")) as folder:
        prompts = config.load_prompts()
        pair = load_pair(config.target, config.drafter, config.device, config.other_target)
        ids, skipped = first_turns(pair.target, prompts, config.max_new_tokens + config.depths, config.depths + 1)
        left_out = {one.prompt_id: one.reason for one in skipped}
        kept = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        asked = list(zip(kept, ids, strict=True))
        levels, texts = measure_levels(pair.target, pair.drafter, asked, config.max_new_tokens, config.depths)
        names, context = [one.prompt_id for one in texts], config.context(pair.target, prompts)
        found = document(names, [one.sums_FK2 for one in texts], trained, config.depths)
        short = f"its answer is too short for a chain of {how_many(config.depths, 'token')}"
        left_out |= {name: short for name in kept if name not in found["prompts"]}
        found |= {
            "summary": summary(found),
            "waterfall": {**waterfall(levels), "prompts": names},
            "drafter": drafter_facts(config.drafter, pair),
            "skipped": [{"prompt_id": name, "reason": reason} for name, reason in left_out.items()],
            **context,
        }
        tables, notes = report_tables(found), [verdict(found["waterfall"]), *few_prompts(len(names))]
        plot_drift(found, folder / FIGURE)
        write_report(folder / REPORT, "Drift", notes, FIGURE, tables, context)
        write_json(folder / RESULT, found)
    print_report(tables[:2], notes)
    return 0 if found["waterfall"]["check"]["holds"] else 1


def depth_of_training(directory: Path, given: int | None) -> int | None:
    """``model.ttt_steps`` of the run that the drafter lies in; else what is given."""
    run = directory.resolve().parent
    if not (run / "provenance.json").is_file():
        return given
    times = {path: path.name.split(".")[1] for path in run.glob("config.*yaml")}  # config.yaml, resumed config.1.yaml
    newest = max(times, key=lambda path: int(times[path]) if times[path].isdigit() else 0)
    found = (read_yaml(str(newest)).get("model") or {}).get("ttt_steps")
    return found if isinstance(found, int) else given


def report_tables(found: Document) -> list[ReportTable]:
    """The waterfall, the summary, every mean by step, and the prompts left out."""
    trained = found["trained_depth"]
    steps = [f"{k}{'' if trained is None or k <= trained else '*'}" for k in range(1, found["depths"] + 1)]
    means = [[f"{one['title']} ({one['unit']})", *map(_number, one["mean"])] for one in found["series"].values()]
    figures = [[one["title"], shown(one, _number)] for one in found["summary"].values()]
    about = f"{how_many(sum(found['chains']), 'chain')} of {how_many(len(found['prompts']), 'prompt')}, "
    about += f"trained depth {trained or 'unknown'}"
    return [
        waterfall_table(found["waterfall"], found["depths"]),
        ReportTable("Drift", ["Figure", ""], figures),
        ReportTable(about, ["Mean at step (*: beyond the trained depth)", *steps], means),
        ReportTable("Left out", ["Prompt", "Reason"], [list(one.values()) for one in found["skipped"]], left=2),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"


def plot_drift(found: Document, path: Path) -> None:
    """Draw the waterfall, and every quantity by draft step; hollow markers lie beyond the trained depth."""
    figure, look, steps = Figure(figsize=(13, 11.5), dpi=130, layout="constrained"), style(0), found["depths"]
    rows = figure.add_gridspec(2, 1, height_ratios=[1, 3])
    draw_waterfall(found["waterfall"], figure.add_subfigure(rows[0]).subplots())
    names = (name for name in SERIES if name != "rest_mass")
    for name, axes in zip(names, figure.add_subfigure(rows[1]).subplots(3, 4).flat, strict=True):
        series, at = found["series"][name], np.arange(1, steps + 1)
        mean, low, high = (np.array(series[key], dtype=float) for key in ("mean", "low", "high"))  # NaN for None
        axes.errorbar(at, mean, np.fmax(0, [mean - low, high - mean]), capsize=2, elinewidth=1, **look)
        beyond = slice(found["trained_depth"] or steps, None)
        axes.plot(at[beyond], mean[beyond], **look, linestyle="", markerfacecolor="white", zorder=3)
        axes.set(ylabel=series["unit"], xlabel="draft step k")
        axes.set_title(series["title"], fontsize=9)
        axes.grid(alpha=0.3)
    save_figure(figure, path)
