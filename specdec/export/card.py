"""A drafter's model card: YAML for machines, as the Hugging Face Hub reads it, above Markdown for people.

One ``record`` says all that a card tells, and an export keeps its own in ``specdec.json``:

* ``drafter``, ``drafter_sha256``: config and weights of the saved drafter;
* ``target``: ``source``, ``revision`` and ``trust_remote_code`` by which it is loaded, and what of its identity is
  compared (:data:`specdec.target.identity.IDENTIFYING`);
* ``evaluations``: what each ``metrics.json`` holds; ``training``: see :func:`trained`;
* of an export also ``engine``, ``exported_as``, ``needs`` and ``draft_tokens``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specdec.data.rows import HUB_NAME, stem
from specdec.drafter import Concat, DrafterConfig, LastLayer, PostNorm, TargetLayer, Wide
from specdec.drafter.of_run import check_of_run
from specdec.export.known_formats import FORMATS
from specdec.export.subject import Subject
from specdec.report.tables import FEW_PROMPTS, LOOPING_SHARE, markdown_text
from specdec.target import EMBEDDED, TargetSource
from specdec.target.identity import same_target
from specdec.utils.config import normalize_config, to_text
from specdec.utils.reading import read_json
from specdec.utils.text import how_many, printable
from specdec.utils.trust import load_yaml, read_yaml_text

Record = Mapping[str, Any]
README = "README.md"
MARK = "<!-- made by specdec: without this line specdec push keeps the card as it is -->"
EVALUATED = ("results", "settings", "target", "provenance")  # of metrics.json


def evaluations(
    directory: Path, record: Record, chosen: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """Return the evaluations that a card quotes.

    Args:
        directory: the drafter's. Without ``chosen``, evaluations of these weights are looked for in the folder around
            it and in the folders there.
        chosen: directories of evaluations.

    Raises:
        ValueError: a chosen one cannot be read, or is of another drafter, in any bit, dtype or target.
    """
    around = directory.resolve().parent
    files = [place / "metrics.json" for place in chosen]
    if not chosen:
        files = [*around.glob("metrics.json"), *around.glob("*/metrics.json")]
        files.sort(key=lambda file: file.parent)
    evaluations = []
    for file in files:
        metrics = read_json(file)
        if not isinstance(metrics, dict):
            metrics = {}
        difference = _difference(metrics, record)
        if difference is None:
            evaluations.append({name: metrics[name] for name in EVALUATED})
        elif chosen:
            drafter = metrics.get("drafter", {}).get("directory")
            raise ValueError(
                f"{file}: not an evaluation of this {difference} ({drafter}): evaluate again"
            )
    return evaluations


def _difference(metrics: Record, record: Record) -> str | None:
    """Return what an evaluation measured another one of: the target, the weights or the drafter; None if it fits."""
    drafter = metrics.get("drafter", {})
    config = record["drafter"]
    if not same_target(metrics.get("target", {}), record["target"]):
        return "target"
    if drafter.get("weights_sha256") != record["drafter_sha256"]:
        return "drafter's weights"
    measured = {name: drafter.get(name) for name in config}
    return None if normalize_config(measured) == normalize_config(config) else "drafter"


def trained(directory: Path) -> Record | None:
    """Return how the drafter in a run's directory was trained; None if it lies in none."""
    directory_name = directory.resolve().name
    run = directory.resolve().parent
    resumed = len([*run.glob("config.*.yaml")])
    suffix = f".{resumed}" if resumed else ""
    config_file = run / f"config{suffix}.yaml"
    provenance_file = run / f"provenance{suffix}.json"
    if directory_name not in ("drafter", "drafter_best"):
        return None
    if not (config_file.is_file() and provenance_file.is_file()):
        return None
    check_of_run(directory)
    config = load_yaml(read_yaml_text(config_file), config_file)
    provenance = read_json(provenance_file)
    data = config["data"].get("init_args", {})
    chosen = _chosen_by(directory)
    done = run / "DONE.json"
    steps = None
    if chosen:
        steps = chosen["step"]
    elif done.is_file():
        steps = read_json(done)["steps"]
    return {
        "steps": steps, "tokens": _tokens(steps, data, config["trainer"]), "resumed": resumed, "chosen_by": chosen,
        "data": _paths(data.get("train") or config["data"]["class_path"].rpartition(".")[2]),
        "mix": provenance.get("mix", []),
        "loss": to_text(normalize_config(config["model"]["loss"])), "ttt_steps": config["model"]["ttt_steps"],
        **{name: provenance[name] for name in ("seed", "command", "date", "cpu", "gpus", "git_commit")},
        "versions": {name: provenance["versions"][name] for name in ("specdec", "torch", "transformers")},
    }  # fmt: skip


def _chosen_by(directory: Path) -> Any:
    """Return the validation figure that ``drafter_best`` was chosen by; None for the last drafter."""
    file = directory / "config.json"
    chosen = read_json(file).get("chosen_by")
    figures = [chosen]
    if isinstance(chosen, dict):
        figures = [chosen.get(name) for name in ("step", "mean")]
    if chosen is not None and list(map(type, figures)) != [int, float]:
        raise ValueError(f"{file}: chosen_by is not as specdec fit writes it: remove it from there")
    return chosen


def _tokens(steps: int | None, data: Record, trainer: Record) -> int | None:
    """Return how many tokens a training of this many steps saw, padding included; None if a factor is unknown."""
    factors: list[Any] = [steps, data.get("batch_size"), data.get("seq_len")]
    factors += [trainer[name] for name in ("accumulate_grad_batches", "devices", "num_nodes")]
    if not all(isinstance(factor, int) for factor in factors):
        return None
    return math.prod(factors) or None


def _paths(sources: Any) -> list[str]:
    """Return the paths in ``data.train`` of a config: a path, a source of a mix, or a list of these."""
    if isinstance(sources, dict):
        return _paths(sources["source"])
    if isinstance(sources, str):
        return [sources]
    return [path for source in sources for path in _paths(source)]


def model_card(
    record: Record, name: str, license: str | None = None, base_model: str | None = None
) -> ModelCard:
    """Return the model card.

    Args:
        name: the repository on the Hub, or the directory.
        license: of the drafter, by the Hub's short names.
        base_model: the target's name on the Hub, where it was loaded from elsewhere.
    """
    config = DrafterConfig.from_json(record["drafter"])
    base = base_model or hub_id(record["target"]["source"])
    method = Subject(config).method
    sources = map(HUB_NAME.fullmatch, (record["training"] or {}).get("data", ()))
    datasets = [source[1] for source in sources if source and not Path(source[1]).exists()]
    results = [result for metrics in record["evaluations"] for result in _results(metrics)]
    kinds = dict.fromkeys((method, generation(config).lower()))
    tags = ["speculative-decoding", "draft-model", *kinds, "specdec"]
    if "exported_as" in record:
        tags.append(record["exported_as"])
    data = ModelCardData(
        base_model=base, library_name="specdec", pipeline_tag="text-generation", tags=tags, license=license,
        datasets=datasets or None, eval_results=results or None,
        model_name=name.rpartition("/")[2] if results else None,
    )  # fmt: skip
    body = card_body(record, config, name, base or record["target"]["source"])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n{MARK}\n")


def _results(metrics: Record) -> Iterator[EvalResult]:
    """Yield acceptance length and speed-up of every draft shape, as the Hub's ``model-index`` has them."""
    settings = metrics["settings"]
    prompts = settings["prompts"]
    dataset: dict[str, Any] = {
        "dataset_type": "-".join(map(stem, prompts)),
        "dataset_name": prompts_text(settings),
    }
    source = HUB_NAME.fullmatch(prompts[0]) if len(prompts) == 1 else None
    if source:
        repository, revision, config, split = source.groups()
        dataset |= {
            "dataset_type": repository,
            "dataset_revision": revision,
            "dataset_config": config,
            "dataset_split": split,
        }
    temperature = settings["sampling"]["temperature"]
    conditions = {
        "max_new_tokens": settings["max_new_tokens"], "temperature": temperature, "batch_size": settings["batch_size"],
        "dtype": settings["dtype"], "device": device_text(metrics["provenance"]),
        "prompts_sha256": settings["prompts_sha256"], "interval": settings["intervals"],
    }  # fmt: skip
    for result in metrics["results"]:
        how = result["shape"]
        if temperature:
            how += f", temperature {temperature:g}"
        length = f"Acceptance length, bonus token included, {how}"
        speedup = {"mean": result["speedup"], **(result["speedup_interval"] or {})}
        for kind, title, figure in (
            ("acceptance_length", length, result["acceptance_length"]),
            ("speedup", f"Speed-up over plain decoding, {how}", speedup),
        ):
            if figure["mean"] is None:
                continue
            ends = [end for end in ("low", "high") if figure.get(end) is not None]
            yield EvalResult(
                task_type="text-generation", task_name="Speculative decoding", **dataset, metric_type=kind,
                metric_value=round(figure["mean"], 4), metric_name=f"{title}{interval_text(figure)}",
                metric_args={
                    "shape": result["shape_config"], "prompts": result["prompts"],
                    **{end: round(figure[end], 4) for end in ends}, **conditions,
                },
            )  # fmt: skip


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


def _shown(value: Any) -> str:
    """Text that a record gives, for Markdown; a text of the template's own is whole already."""
    # "-" stands in a cell that has no figure
    return value if isinstance(value, Markup) or value == "-" else markdown_text(str(value))


def _code(text: str) -> Markup:
    """Text for one line of code, which it cannot end."""
    return Markup(" ".join(printable(text).replace("`", "'").splitlines()))


def _cells(values: Sequence[Any]) -> Markup:
    """A row of a table."""
    return Markup(" | ".join(map(_shown, values)))


# The text stands in files beside this one.
TEXTS = Environment(
    finalize=_shown,
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
TEXTS.filters |= {"mean": _mean, "short_name": _short_name, "code": _code, "cells": _cells}
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
    subject = Subject(config, architecture=str(identity.get("architecture")))
    if "exported_as" in record:
        source = TargetSource(
            target, identity["revision"], trust_remote_code=identity["trust_remote_code"]
        )
        line = FORMATS[record["exported_as"]].command(name, subject, source, record["draft_tokens"])
    measured: dict[str, list[Record]] = {}
    for metrics in record["evaluations"]:
        measured.setdefault(_how(metrics), []).append(metrics)
    design = {
        axis: to_text(normalize_config(record["drafter"][axis])).strip("{}[]") for axis in AXES
    }
    if config.drafting.fixed_drafts:
        design["drafts of a pass"] = f"{config.drafting.fixed_drafts}, no more and no fewer"
        design["confidence head"] = "yes" if config.drafting.has_confidence else "no"
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
        return "The record of its training is missing."
    return Markup(TEXTS.get_template("training.md.jinja").render(training))  # it is shown text
