"""``specdec drift`` and :class:`AttentionDrift`: where acceptance is lost, and does a drafter drift in its chains?

The paper on attention drift (https://arxiv.org/abs/2605.09992) reports that with raw feedback the recurrent state grows
from draft step to draft step while attention leaves the sink for the drafter's own guesses, and that feeding the normed
state back keeps both flat. What is measured stands in :mod:`specdec.diagnostics.drift_measure`, what acceptance is lost
to in :mod:`specdec.diagnostics.waterfall`.
"""

from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.drift_measure import (
    SERIES,
    Document,
    check_depths,
    document,
    drift_figures,
    measure,
    summary,
)
from specdec.diagnostics.waterfall import draw_waterfall, measure_levels, verdict, waterfall, waterfall_table
from specdec.evaluation.callback import FixedPrompts, ValidationCallback, decoding_copy
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.statistics import measured
from specdec.evaluation.style import (
    ReportTable,
    few_prompts,
    print_report,
    save_figure,
    shown,
    style,
    write_report,
)
from specdec.training.module import DrafterModule
from specdec.utils.config import read_yaml
from specdec.utils.files import staged_directory, write_json

RESULT, REPORT, FIGURE = "drift.json", "report.md", "drift.png"


@dataclass(frozen=True, kw_only=True)
class DriftConfig(MeasurementConfig):
    """Which drafter is measured, and how deep.

    Args:
        drafter: the drafter's directory.
        depths: draft steps of a chain; may exceed the trained ones.
        trained_depth: unroll steps in training, where no run directory around the drafter says it.
    """

    drafter: str
    depths: int = 8
    trained_depth: int | None = None


def drift(config: DriftConfig) -> int:
    """Where acceptance is lost, bar by bar; and attention, recurrent state and acceptance, draft step by draft step.

    Chains are drafted from every place of the target's own answers. The exit status is 1 if the bars (vocabulary,
    drafter, drift, exposure) do not add up to what decoding accepts.

    Example: specdec drift --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl --limit 40
    """
    check_depths(config.depths, config.max_new_tokens)
    trained = depth_of_training(Path(config.drafter), config.trained_depth)
    with staged_directory(config.place("drift")) as folder:
        prompts = config.load_prompts()
        pair = load_pair(config.target, config.drafter, config.device, config.other_target)
        ids, skipped = first_turns(pair.target, prompts, config.max_new_tokens + config.depths, config.depths + 1)
        left_out = {one.prompt_id: one.reason for one in skipped}
        kept = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        asked = list(zip(kept, ids, strict=True))
        levels, texts = measure_levels(pair.target, pair.drafter, asked, config.max_new_tokens, config.depths)
        names, context = [one.text.prompt_id for one in texts], config.context(pair.target, prompts)
        found = document(names, [one.sums_FK2 for one in texts], trained, config.depths)
        short = f"its answer is too short for a chain of {config.depths} tokens"
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
    """``model.ttt_steps`` of the run that the drafter lies in, as ``specdec fit`` wrote it; else what is given.

    Raises:
        ValueError: what is given is below 1, or the run's config cannot be read.
    """
    if given is not None and given < 1:
        raise ValueError(f"trained_depth must be at least 1, not {given}")
    run = directory.resolve().parent
    if not (run / "provenance.json").is_file() or not (run / "config.yaml").is_file():
        return given
    times = {path: path.name.split(".")[1] for path in run.glob("config.*yaml")}  # config.yaml, resumed config.1.yaml
    path = max(times, key=lambda one: int(times[one]) if times[one].isdigit() else 0)
    found = OmegaConf.select(read_yaml(str(path)), "model.ttt_steps")
    return found if isinstance(found, int) else given


def report_tables(found: Document) -> list[ReportTable]:
    """The waterfall, the summary, every mean by step, and the prompts left out."""
    trained = found["trained_depth"]
    steps = [f"{k}{'' if trained is None or k <= trained else '*'}" for k in range(1, found["depths"] + 1)]
    means = [[f"{one['title']} ({one['unit']})", *map(_number, one["mean"])] for one in found["series"].values()]
    about = f"{sum(found['chains'])} chains of {len(found['prompts'])} prompts, trained depth {trained or 'unknown'}"
    return [
        waterfall_table(found["waterfall"], found["depths"]),
        ReportTable(
            "Drift", ["Figure", ""], [[one["title"], shown(one, _number)] for one in found["summary"].values()]
        ),
        ReportTable(about, ["Mean at step (*: beyond the trained depth)", *steps], means),
        ReportTable("Left out", ["Prompt", "Reason"], [list(one.values()) for one in found["skipped"]], left=2),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"


def plot_drift(found: Document, path: Path) -> None:
    """Draw the waterfall, and every quantity by draft step; hollow markers lie beyond the trained depth."""
    from matplotlib.figure import Figure  # takes its time, and a fit without the callback does without it

    figure, look, steps = Figure(figsize=(13, 11.5), dpi=130, layout="constrained"), style(0), found["depths"]
    above, below = figure.subfigures(2, 1, height_ratios=[1, 3])
    draw_waterfall(found["waterfall"], above.subplots())
    names = (name for name in SERIES if name != "rest_mass")
    for name, axes in zip(names, below.subplots(3, 4).flat, strict=True):
        series, at = found["series"][name], np.arange(1, steps + 1)
        mean, low, high = (np.array(series[key], dtype=float) for key in ("mean", "low", "high"))  # NaN for None
        axes.errorbar(at, mean, np.fmax(0, [mean - low, high - mean]), capsize=2, elinewidth=1, **look)
        beyond = slice(found["trained_depth"] or steps, None)
        axes.plot(at[beyond], mean[beyond], **look, linestyle="", markerfacecolor="white", zorder=3)
        axes.set(ylabel=series["unit"], xlabel="draft step k")
        axes.set_title(series["title"], fontsize=10)
        axes.grid(alpha=0.3)
    save_figure(figure, path)


class AttentionDrift(ValidationCallback):
    """Measures what ``specdec drift`` measures whenever the drafter is validated, and logs the summary's means.

    Logged are ``drift/state_rms_growth``, ``drift/sink_mass_first``, ``drift/sink_mass_last`` and the other figures of
    :func:`drift_figures`. Weights, gradients, modes and random state of the training are left alone; several processes
    share the prompts.

    Args:
        prompts: files or Hub data as ``specdec evaluate`` reads them, of which first turns are used, or
            ``validation``: how the validation documents begin.
        max_new_tokens: tokens of the target's answers, at every place of which a chain begins.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: measure at every n-th validation of a fit.
        depths: draft steps of a chain.

    Raises:
        ValueError: a number is out of range, or a prompts file is wrong.
    """

    who = "AttentionDrift"

    def __init__(
        self,
        prompts: str | list[str] = "validation",
        max_new_tokens: int = 64,
        count: int = 8,
        prompt_tokens: int = 64,
        every_n_validations: int = 1,
        depths: int = 8,
    ) -> None:
        check_depths(depths, max_new_tokens)
        self.depths = depths
        super().__init__(prompts, max_new_tokens, count, prompt_tokens, every_n_validations, behind=depths)
        self._texts: dict[int, AnsweredText] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the target for its answers, and find what is wrong before anything is trained.

        Raises:
            ValueError: there is no prompt, one does not fit the target, or no answer is long enough.
        """
        assert isinstance(pl_module, DrafterModule)
        usable = sum(len(text.anchors(self.depths)) for text in self._answered(trainer, pl_module).values())
        if not trainer.strategy.reduce(torch.tensor(float(usable), device=pl_module.device), reduce_op="sum"):
            raise ValueError(
                f"AttentionDrift: no answer of the target is long enough for a chain of {self.depths} tokens: set "
                "fewer depths, or other prompts"
            )

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: FixedPrompts) -> None:
        """Measure, and log the summary's means."""
        series = dict(zip(SERIES, torch.stack(self._measured(trainer, module), 2).numpy(), strict=True))
        for one in drift_figures(self.depths, module.ttt_steps):
            total = one.columns(series[one.series]).sum(0, keepdims=True)
            if (mean := measured(total, one.of)["mean"]) is not None:
                module.log(f"drift/{one.name}", mean, sync_dist=True, batch_size=1)

    def _measured(self, trainer: pl.Trainer, module: DrafterModule) -> list[Tensor]:
        """Every prompt's sums, on every process; all have to ask."""
        assert module.drafter is not None
        texts, copy = self._answered(trainer, module), decoding_copy(module.drafter, module.target).eval()
        own = {number: measure(module.target, copy, text, self.depths) for number, text in texts.items()}
        empty = torch.zeros(len(SERIES), self.depths, 2, dtype=torch.float64)
        sums = torch.stack([own.get(number, empty) for number in range(len(self.prepare(trainer, module)))])
        if trainer.world_size > 1:  # a prompt is one process's, and zero on the others
            sums = trainer.strategy.reduce(sums.to(module.device), reduce_op="sum").cpu()
        return list(sums)

    def _answered(self, trainer: pl.Trainer, module: DrafterModule) -> dict[int, AnsweredText]:
        """This process's share of the prompts by their numbers, with the target's answers, made once."""
        if self._texts is None:
            asked = self.prepare(trainer, module)
            mine = range(trainer.global_rank, len(asked), trainer.world_size)
            texts = answered_texts(module.target, [asked[number] for number in mine], self.max_new_tokens)
            self._texts = dict(zip(mine, texts, strict=True))
        return self._texts
