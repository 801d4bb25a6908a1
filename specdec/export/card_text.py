"""The Markdown of a model card, for people."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specdec.data.rows import HUB_NAME
from specdec.drafter import Concat, DrafterConfig, LastLayer, PostNorm, TargetLayer, Wide
from specdec.export.formats import FORMATS
from specdec.export.subject import Subject
from specdec.report.tables import FEW_PROMPTS, LOOPING_SHARE
from specdec.target import EMBEDDED, TargetSource
from specdec.utils.config import normalize_config, to_text
from specdec.utils.text import how_many

Record = Mapping[str, Any]
AXES = (
    "fusion", "entry", "norms", "recurrence", "attention", "head", "aux_layers", "num_layers", "hidden_size",
    "attention_window",
)  # fmt: skip


def hub_id(source: str) -> str | None:
    """Return a target's name on the Hub; None for a directory and for the embedded target."""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return source if "/" in source and not Path(source).exists() else None


def generation(config: DrafterConfig) -> str:
    """Return the name under which papers know the drafter's design."""
    if isinstance(config.attention, TargetLayer):
        return "MTP"
    if config.drafting.generation:
        return config.drafting.generation
    wide = isinstance(config.entry, Wide)
    if isinstance(config.fusion, LastLayer) and not wide:
        return "EAGLE-1"
    if not wide or not isinstance(config.fusion, Concat | LastLayer):
        return "EAGLE"
    newest = config.norms.aux == "each" and isinstance(config.recurrence, PostNorm)
    return "EAGLE-3.1" if newest else "EAGLE-3"


def prompts_text(settings: Record) -> str:
    """Return the name of the prompts of an evaluation."""
    if suite := settings.get("suite"):
        return f"{suite['title']} ({suite['published'] or 'other rows than the published'})"
    return ", ".join(map(_short_name, settings["prompts"]))


def _short_name(source: str) -> str:
    return source if HUB_NAME.fullmatch(source) else Path(source).name


def device_text(provenance: Record) -> str:
    """Return the name of the GPUs, or of the CPU and its cores."""
    gpus = provenance["gpus"]
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    return f"{provenance['cpu']}, {provenance['cores']} cores"


def interval_text(figure: Record) -> str:
    """Return `` [low, high]`` of a figure, or nothing if it has no interval."""
    return "" if figure.get("low") is None else f" [{figure['low']:.2f}, {figure['high']:.2f}]"


def _mean(figure: Record | None) -> str:
    return f"{figure['mean']:.2f}{interval_text(figure)}" if figure else "-"


# The text stands in files beside this one.
TEXTS = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
TEXTS.filters |= {"mean": _mean, "short_name": _short_name}
TEXTS.globals |= {
    "prompts_text": prompts_text,
    "interval_text": interval_text,
    "how_many": how_many,
    "few_prompts": FEW_PROMPTS,
    "most_looping": LOOPING_SHARE,
    "embedded": EMBEDDED,
}


def card_body(record: Record, config: DrafterConfig, name: str, target: str) -> str:
    """Return the card below its YAML.

    Args:
        name: the repository on the Hub, or the directory.
        target: the target's name on the Hub, or its directory.
    """
    identity = record["target"]
    line = None
    subject = Subject(config, False, False, False, str(identity.get("architecture")))
    if "exported_as" in record:
        source = TargetSource(
            target, identity["revision"], trust_remote_code=identity["trust_remote_code"]
        )
        chosen = FORMATS[record["exported_as"]]
        line = chosen.command(name, subject, source, record["draft_tokens"])
    measured: dict[str, list[Record]] = {}
    for metrics in record["evaluations"]:
        measured.setdefault(_how(metrics), []).append(metrics)
    design = {
        axis: to_text(normalize_config(record["drafter"][axis])).strip("{}[]") for axis in AXES
    }
    return TEXTS.get_template("card.md.jinja").render(
        record=record, config=config, name=name, target=target, line=line, measured=measured, design=design,
        generation=generation(config), method=subject.method, training=training_text(record["training"]),
        short_target=hub_id(target) or Path(target).name,
        results=[result for metrics in record["evaluations"] for result in metrics["results"]],
    )  # fmt: skip


def _how(metrics: Record) -> str:
    """Return how an evaluation was made; a card has a table for each way."""
    settings = metrics["settings"]
    provenance = metrics["provenance"]
    return (
        f"at most {settings['max_new_tokens']} new tokens, {settings['dtype']}, batch size {settings['batch_size']}, "
        f"{device_text(provenance)}, torch {provenance['versions']['torch']}, {provenance['date'][:10]}. "
        f"Brackets: {settings['intervals']}"
    )


def training_text(training: Record | None) -> str:
    """Return the section on how the drafter was trained."""
    if training is None:
        return "How it was trained is not recorded beside it."
    return TEXTS.get_template("training.md.jinja").render(training)
