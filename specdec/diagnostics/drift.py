"""``specdec drift`` and :class:`AttentionDrift`: does a drafter drift away from what it was trained on?

The paper on attention drift (https://arxiv.org/abs/2605.09992) reports that with raw feedback the recurrent state grows
from draft step to draft step while attention leaves the sink for the drafter's own guesses, and that feeding the normed
state back keeps both flat. What is measured stands in :mod:`specdec.diagnostics.drift_measure`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.drift_measure import (
    SERIES,
    Document,
    DriftSettings,
    document,
    drift_figures,
    measure,
    summary,
)
from specdec.evaluation.callback import FixedPrompts, ValidationCallback, decoding_copy
from specdec.evaluation.config import MeasurementConfig, drafter_facts, labelled, load_pairs
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.statistics import measured
from specdec.evaluation.style import (
    LINES,
    ReportTable,
    escape,
    print_report,
    save_figure,
    shown,
    style,
    whiskers,
    write_report,
)
from specdec.training.module import DrafterModule
from specdec.utils.config import read_yaml
from specdec.utils.files import staged_directory, write_json
from specdec.utils.progress import progress

RESULT, REPORT, FIGURE = "drift.json", "report.md", "drift.png"


@dataclass(frozen=True, kw_only=True)
class DriftConfig(MeasurementConfig):
    """Which drafters are measured, where and how deep.

    Args:
        drafter: directories of drafters.
        depths: draft steps; may exceed the trained ones.
        anchors: chains for each prompt, spread over its answer.
        sink_tokens: first positions of the text that count as the sink.
        recent: committed tokens before a chain that count as recent.
        trained_depth: unroll steps in training, where no run directory around the drafter says it.
    """

    drafter: list[str]
    depths: int = 8
    anchors: int = 16
    sink_tokens: int = 1
    recent: int = 16
    trained_depth: int | None = None


def drift(config: DriftConfig) -> None:
    """What a drafter attends to, how its recurrent state changes and how often it is right, draft step by draft step.

    Of one drafter the results' directory has drift.json, of several every drafter's in a folder of its own; always
    report.md and drift.png.

    Example: specdec drift --target Qwen/Qwen3-4B --drafter runs/a/drafter runs/b/drafter --prompts mt_bench.jsonl
    """
    settings = DriftSettings(config.depths, config.anchors, config.sink_tokens, config.recent)
    settings.check_length(config.max_new_tokens)
    names = labelled(config.drafter)
    trained = [depth_of_training(Path(directory), config.trained_depth) for directory in config.drafter]
    with staged_directory(config.place("drift")) as folder:
        prompts = config.load_prompts()
        pairs = load_pairs(config.target, config.drafter, config.device, config.other_target)
        target = pairs[0].target
        ids, skipped = first_turns(target, prompts, config.max_new_tokens, config.depths + 1)
        left_out = {one.prompt_id for one in skipped}
        kept = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in left_out]
        with progress("answers", "prompts", len(ids)) as advance:
            named = list(zip(kept, ids, strict=True))
            texts = answered_texts(target, named, config.max_new_tokens, on_answer=lambda: advance(1))
        context = config.context(target, prompts)
        found: dict[str, Document] = {}
        for name, directory, pair, depth in zip(names, config.drafter, pairs, trained, strict=True):
            sums = []
            with progress(name, "prompts", len(texts)) as advance:
                for text in texts:
                    sums.append(measure(target, pair.drafter, text, settings))
                    advance(1)
            one = document(kept, sums, depth, config.depths)
            facts = {"drafter": drafter_facts(directory, pair, name), "summary": summary(one)}
            all_skipped = [each._asdict() for each in skipped] + _without_chain(kept, one)
            found[name] = {**one, **facts, "skipped": all_skipped, **context}
            write_json(folder / name / RESULT if len(names) > 1 else folder / RESULT, found[name])
        plot_drift(found, folder / FIGURE)
        tables = report_tables(found)
        write_report(folder / REPORT, "Attention drift", [], FIGURE, tables, context)
    print_report(tables[:1])


def _without_chain(asked: Sequence[str], found: Document) -> list[dict[str, str]]:
    """Prompts that were answered, but too shortly."""
    reason = f"its answer is too short for a chain of {found['depths']} tokens"
    return [{"prompt_id": name, "reason": reason} for name in asked if name not in found["prompts"]]


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
    found = read_yaml(str(path)).get("model", {}).get("ttt_steps")
    return found if isinstance(found, int) else given


def report_tables(found: Mapping[str, Document]) -> list[ReportTable]:
    """The summaries of drafters, by their labels, side by side, and every drafter's means by step."""
    by_title = {
        label: {each["title"]: shown(each, _number) for each in one["summary"].values()} for label, one in found.items()
    }
    titles = dict.fromkeys(title for own in by_title.values() for title in own)
    rows = [[title, *(own.get(title, "-") for own in by_title.values())] for title in titles]
    tables = [ReportTable("Attention drift", ["figure", *found], rows)]
    for label, one in found.items():
        trained = one["trained_depth"]
        steps = [f"{k}{'' if trained is None or k <= trained else '*'}" for k in range(1, one["depths"] + 1)]
        rows = [[f"{each['title']} ({each['unit']})", *map(_number, each["mean"])] for each in one["series"].values()]
        about = f"{sum(one['chains'])} chains of {len(one['prompts'])} prompts, trained depth {trained or 'unknown'}"
        tables.append(ReportTable(f"{label}: {about}", ["mean at step (*: beyond the trained depth)", *steps], rows))
        reasons = [[each["prompt_id"], each["reason"]] for each in one.get("skipped", [])]
        tables.append(ReportTable(f"{label}: left out", ["prompt", "reason"], reasons, left=2))
    return tables


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".") if abs(value) >= 1 else f"{value:.3f}"


def plot_drift(found: Mapping[str, Document], path: Path) -> None:
    """Draw every quantity of drafters, by their labels, by draft step; hollow markers lie beyond the trained depth."""
    from matplotlib.figure import Figure  # takes its time, and a fit without the callback does without it
    from matplotlib.lines import Line2D

    figure, handles = Figure(figsize=(13, 8.4), dpi=130, layout="constrained"), []
    panels = dict(zip((name for name in SERIES if name != "rest_mass"), figure.subplots(3, 4).flat, strict=True))
    for row, (label, one) in enumerate(found.items()):
        look, trained = {**style(row), "linestyle": LINES[row % len(LINES)]}, one["trained_depth"]
        handles.append(Line2D([], [], label=escape(f"{label}, trained depth {trained or 'unknown'}"), **look))
        for name, axes in panels.items():
            series = one["series"][name]
            mean = np.array(series["mean"], dtype=float)  # NaN where there is none
            points = zip(series["mean"], series["low"], series["high"], strict=True)
            bars = np.transpose([whiskers(dict(zip(("mean", "low", "high"), point, strict=True))) for point in points])
            at = np.arange(1, one["depths"] + 1) + 0.05 * row  # side by side
            axes.errorbar(at, mean, bars, capsize=2, elinewidth=1, **look)
            beyond = slice(trained or one["depths"], None)
            axes.plot(at[beyond], mean[beyond], **look | {"linestyle": ""}, markerfacecolor="white", zorder=3)
            axes.set(title=series["title"], ylabel=series["unit"], xlabel="draft step k")
            axes.title.set_fontsize(10)
            axes.grid(alpha=0.3)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


class AttentionDrift(ValidationCallback):
    """Measures what ``specdec drift`` measures whenever the drafter is validated, and logs the summary's means.

    Logged are ``drift/state_rms_growth``, ``drift/sink_mass_first``, ``drift/sink_mass_last`` and the other figures of
    :func:`drift_figures`. Weights, gradients, modes and random state of the training are left alone; several processes
    share the prompts.

    Args:
        prompts: files or Hub data as ``specdec evaluate`` reads them, of which first turns are used, or
            ``validation``: how the validation documents begin.
        max_new_tokens: tokens of the target's answers, which chains begin at places of.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: measure at every n-th validation of a fit.
        depths, anchors, sink_tokens, recent: see :class:`DriftSettings`.

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
        anchors: int = 8,
        sink_tokens: int = 1,
        recent: int = 16,
    ) -> None:
        self.settings = DriftSettings(depths, anchors, sink_tokens, recent)
        self.settings.check_length(max_new_tokens)
        super().__init__(prompts, max_new_tokens, count, prompt_tokens, every_n_validations, behind=depths)
        self._texts: dict[int, AnsweredText] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the target for its answers, and find what is wrong before anything is trained.

        Raises:
            ValueError: there is no prompt, one does not fit the target, or no answer is long enough.
        """
        assert isinstance(pl_module, DrafterModule)
        depths = self.settings.depths
        usable = sum(len(text.anchors(1, depths)) for text in self._answered(trainer, pl_module).values())
        if not trainer.strategy.reduce(torch.tensor(float(usable), device=pl_module.device), reduce_op="sum"):
            raise ValueError(
                f"AttentionDrift: no answer of the target is long enough for a chain of {depths} tokens: set fewer "
                "depths, or other prompts"
            )

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: FixedPrompts) -> None:
        """Measure, and log the summary's means."""
        series = dict(zip(SERIES, torch.stack(self._measured(trainer, module), 2).numpy(), strict=True))
        for one in drift_figures(self.settings.depths, module.ttt_steps):
            total = one.columns(series[one.series]).sum(0, keepdims=True)
            if (mean := measured(total, one.of)["mean"]) is not None:
                module.log(f"drift/{one.name}", mean, sync_dist=True, batch_size=1)

    def _measured(self, trainer: pl.Trainer, module: DrafterModule) -> list[Tensor]:
        """Every prompt's sums, on every process; all have to ask."""
        assert module.drafter is not None
        texts, copy = self._answered(trainer, module), decoding_copy(module.drafter, module.target).eval()
        own = {number: measure(module.target, copy, text, self.settings) for number, text in texts.items()}
        empty = torch.zeros(len(SERIES), self.settings.depths, 2, dtype=torch.float64)
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
