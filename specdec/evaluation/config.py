"""What measurements of saved drafters have in common: their options, target and drafter, what results tell of them."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.drafter import Drafter, load_drafter
from specdec.drafter.io import located
from specdec.evaluation.overrides import AS_SAVED, OVERRIDABLE, Override
from specdec.evaluation.prompts import Prompt, load_prompts, prompts_sha256, template_sha256
from specdec.report.statistics import HOW
from specdec.target import Target, TargetSource
from specdec.target.source import AUTO
from specdec.utils.config import new_run
from specdec.utils.machine import multiplies_bfloat16, provenance
from specdec.utils.numbers import Count, Tokens, Whole
from specdec.utils.reading import read_json
from specdec.utils.trust import redacted

log = logging.getLogger(__name__)

# options that results say in other words
ELSEWHERE = ("drafter", "out", "suite", "suite_dir", "temperatures")


@dataclass(frozen=True, kw_only=True)
class MeasurementConfig:
    """On which prompts and where a saved drafter is measured.

    Args:
        prompts: rows (.jsonl, .ndjson, .json, .parquet) of a known layout, text with one prompt a line, or
            hub:REPOSITORY:CONFIG:SPLIT.
        target: the model that the drafter drafts for: ``embedded``, a directory or a Hub id.
        max_new_tokens: new tokens per answer.
        limit: use the first prompts only.
        layouts: layouts of rows to prefer, as prompt or prompt_turn.
        device: where target and drafter run, as cpu or cuda:1; auto is a GPU where there is one, else the CPU.
        other_target: also take a drafter that was trained for another target of the same shape.
        attention_window: measure the drafter with this window in place of its own: positions back that a node attends
            to, itself included, or the ``full`` text.
        attention_sinks: first tokens of the text that it attends to beyond the window, in place of its own number;
            0 for none.
        out: directory for the results, a new one; by default under runs.
    """

    prompts: list[str]
    target: TargetSource = field(default_factory=TargetSource)
    max_new_tokens: Tokens = 128
    limit: Count | None = None
    layouts: list[str] = field(default_factory=list)
    device: str = AUTO
    other_target: bool = False
    attention_window: int | Literal["full"] | None = None
    attention_sinks: Whole | None = None
    out: Path | None = None

    def load_prompts(self) -> list[Prompt]:
        """The prompts; ValueError as of :func:`load_prompts`."""
        return load_prompts(self.prompts, self.limit, self.layouts)

    def load_pair(self, drafter: Path | str, target: Target | None = None) -> "Pair":
        """A saved drafter, with the attention window and sinks to measure it with, and its target.

        Args:
            drafter: its directory, or its name on the Hub.
            target: one that has been loaded, and has proved itself.

        Raises:
            ValueError: as of :func:`load_pair`.
        """
        return load_pair(
            target or self.target,
            drafter,
            self.device,
            self.other_target,
            Override(self.attention_window, self.attention_sinks),
        )

    def place(self, command: str) -> Path:
        """Where results go; a new directory under ``runs`` if none was named, and an empty one is taken away."""
        place = self.out or new_run(command)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        return place

    def context(self, target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """``target``, ``settings`` (every option and what the prompts are) and ``provenance``, JSON-ready."""
        options = asdict(self)
        if self.device == AUTO:
            options["device"] = target.device.type
        settings = {
            **options.pop("target"),
            **{name: value for name, value in options.items() if name not in ELSEWHERE},
            "prompts_sha256": prompts_sha256(prompts),
            "chat_template_sha256": template_sha256(target.tokenizer, prompts),
            "eos_token_ids": sorted(target.eos_token_ids),
            "intervals": HOW,
            "torch_threads": torch.get_num_threads(),
        }
        about = {"target": dict(target.identity), "settings": redacted(settings)}
        return {**about, "provenance": provenance()}


class Pair(NamedTuple):
    """A target and a saved drafter in one dtype, on one device."""

    target: Target
    drafter: Drafter
    made_for_each_other: bool  # else the drafter was trained for another target of the same shape
    weights_sha256: str  # of the saved drafter
    # the saved drafter's window and sinks, by their names in its config, where others are in their place
    overridden: dict[str, Any] | None = None


def load_pair(
    source: TargetSource | Target,
    saved: Path | str,
    device: str = AUTO,
    other_target: bool = False,
    override: Override = AS_SAVED,
) -> Pair:
    """Load a drafter, and its target, which proves itself.

    Args:
        source: of the target; or one that has been loaded, and has proved itself.
        saved: the drafter's directory, or its name on the Hub.
        other_target: whether the drafter may be one that was trained for another target of the same shape.
        override: of the drafter's attention window and sinks.

    Raises:
        ValueError: one cannot be loaded, the drafter cannot have the override, the target is not what it should be, or
            they do not match.
    """
    directory = located(saved)
    drafter = load_drafter(directory)
    overridden = None
    if override != AS_SAVED:
        overridden = {name: getattr(drafter.config, name) for name in OVERRIDABLE}
        try:
            drafter.set_window(*override)
        except ValueError as error:
            raise ValueError(f"{saved}: {error}") from error
    if isinstance(source, Target):
        target = source
    else:
        target = source.load(device)
        target.prove()
    if target.device.type == "cpu" and target.dtype == torch.bfloat16 and not multiplies_bfloat16():
        log.warning(
            "bfloat16 may take many times as long as float32 here: this processor does not multiply it"
        )
    drafter.to(device=target.device, dtype=target.dtype)
    check_pair(target, drafter)
    made_for_each_other = warn_unless_made_for(target, drafter, refuse=not other_target)
    saved_sha256 = read_json(directory / "config.json")["weights_sha256"]
    return Pair(target, drafter, made_for_each_other, saved_sha256, overridden)


def drafter_facts(directory: Path | str, pair: Pair) -> dict[str, Any]:
    """Which drafter a result is of, JSON-ready: its config as measured, and what an override replaced of it."""
    return {
        "label": Path(directory).name,
        "directory": str(directory),
        "weights_sha256": pair.weights_sha256,
        "made_for_this_target": pair.made_for_each_other,
        "overridden": pair.overridden,
        **pair.drafter.config.to_json(),
    }
