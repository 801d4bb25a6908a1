"""A drafter's model card: YAML for machines, as the Hugging Face Hub reads it, above Markdown for people.

One ``record`` says all that a card tells, and an export keeps its own in ``specdec.json``:

* ``drafter``, ``drafter_sha256``: config and weights of the saved drafter;
* ``target``: ``source``, ``revision`` and ``trust_remote_code`` by which it is loaded, and its ``fingerprint``;
* ``evaluations``: what each ``metrics.json`` holds; ``training``: see :func:`trained`;
* of an export also ``engine``, ``exported_as``, ``needs`` and ``draft_tokens``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from specdec.data.rows import HUB_NAME, stem
from specdec.drafter import Concat, DrafterConfig, LastLayer, PostNorm, TargetLayer, Wide
from specdec.export.formats import FORMATS
from specdec.export.subject import Subject
from specdec.target import EMBEDDED, TargetSource
from specdec.utils.config import canonical, words
from specdec.utils.reading import read_json
from specdec.utils.text import how_many
from specdec.utils.trust import load_yaml, read_yaml_text

Record = Mapping[str, Any]
README = "README.md"
MARK = "<!-- made by specdec: without this line specdec push keeps the card as it is -->"
FEW_PROMPTS = 10
LOOPING_SHARE = 0.05  # of the answers; from here on the card warns, as an evaluation does
AXES = (
    "fusion", "entry", "norms", "recurrence", "attention", "head", "aux_layers", "num_layers", "hidden_size",
    "attention_window",
)  # fmt: skip
EVALUATED = ("results", "settings", "target", "provenance")  # of metrics.json


def evaluations(
    directory: Path, record: Record, given: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """The evaluations that a card quotes: those ``given``, else those of these weights in the folder around
    ``directory`` and the folders in it.

    Raises:
        ValueError: one that is given cannot be read, or is of another drafter, in any bit, dtype or target.
    """
    around = directory.resolve().parent
    places = given or sorted(
        path.parent for path in (*around.glob("metrics.json"), *around.glob("*/metrics.json"))
    )
    found = []
    for place in places:
        metrics = read_json(place / "metrics.json")
        wrong = _wrong(metrics if isinstance(metrics, dict) else {}, record)
        if wrong and given:
            of = metrics.get("drafter", {}).get("directory") if isinstance(metrics, dict) else None
            raise ValueError(
                f"{place / 'metrics.json'}: not an evaluation of this {wrong} ({of}): evaluate again"
            )
        if not wrong:
            found.append({name: metrics[name] for name in EVALUATED})
    return found


def _wrong(metrics: Record, record: Record) -> str | None:
    """What an evaluation is not of."""
    of = metrics.get("drafter", {})
    config = record["drafter"]
    if metrics.get("target", {}).get("fingerprint") != record["target"]["fingerprint"]:
        return "target"
    if of.get("weights_sha256") != record["drafter_sha256"]:
        return "drafter's weights"
    return (
        None
        if canonical({name: of.get(name) for name in config}) == canonical(config)
        else "drafter"
    )


def trained(directory: Path) -> Record | None:
    """How the drafter in a run's directory was trained; None if it lies in none."""
    run = directory.resolve().parent
    resumed = len([*run.glob("config.*.yaml")])
    mark = f".{resumed}" if resumed else ""
    config = run / f"config{mark}.yaml"
    provenance = run / f"provenance{mark}.json"
    if directory.resolve().name not in ("drafter", "drafter_best") or not (
        config.is_file() and provenance.is_file()
    ):
        return None
    full = load_yaml(read_yaml_text(config), config)
    made = read_json(provenance)
    done = run / "DONE.json"
    data = full["data"].get("init_args", {})
    trainer = full["trainer"]
    # of the best one, beside the last
    chosen = read_json(directory / "config.json").get("chosen_by")
    figures = (
        [chosen.get(name) for name in ("step", "mean")] if isinstance(chosen, dict) else [chosen]
    )
    if chosen is not None and list(map(type, figures)) != [int, float]:
        raise ValueError(
            f"{directory / 'config.json'}: chosen_by is not as specdec fit writes it: remove it from there"
        )
    steps = chosen["step"] if chosen else read_json(done)["steps"] if done.is_file() else None
    factors = [
        steps,
        data.get("batch_size"),
        data.get("seq_len"),
        trainer["accumulate_grad_batches"],
    ]
    factors += [trainer["devices"], trainer["num_nodes"]]
    tokens = 1
    for factor in factors:
        tokens = tokens * factor if isinstance(factor, int) else 0
    sources = data.get("train") or full["data"]["class_path"].rpartition(".")[2]
    return {
        "steps": steps, "tokens": tokens or None, "resumed": resumed, "chosen_by": chosen,
        "data": _paths(sources), "mix": made.get("mix", []),
        "loss": words(canonical(full["model"]["loss"])), "ttt_steps": full["model"]["ttt_steps"],
        **{name: made[name] for name in ("seed", "command", "date", "cpu", "gpus", "git_commit")},
        "versions": {name: made["versions"][name] for name in ("specdec", "torch", "transformers")},
    }  # fmt: skip


def _paths(sources: Any) -> list[str]:
    """Of ``data.train`` as a config has it: a path, a source of a mix, or a list of these."""
    if isinstance(sources, dict):
        return _paths(sources["source"])
    return (
        [sources]
        if isinstance(sources, str)
        else [path for source in sources for path in _paths(source)]
    )


def hub_id(source: str) -> str | None:
    """A target's name on the Hub; None of a directory and of the embedded one."""
    try:
        validate_repo_id(source)
    except HFValidationError:
        return None
    return source if "/" in source and not Path(source).exists() else None


def card(
    record: Record, name: str, license: str | None = None, base_model: str | None = None
) -> ModelCard:
    """The model card.

    Args:
        name: the repository on the Hub, or the directory.
        license: of the drafter, by the Hub's short names.
        base_model: the target's name on the Hub, where it was loaded from elsewhere.
    """
    config = DrafterConfig.from_json(record["drafter"])
    base = base_model or hub_id(record["target"]["source"])
    method = Subject(config, False, False, False).method
    sources = [HUB_NAME.fullmatch(source) for source in (record["training"] or {}).get("data", ())]
    datasets = [found[1] for found in sources if found and not Path(found[1]).exists()]
    results = [each for one in record["evaluations"] for each in _results(one)]
    kinds = dict.fromkeys((method, _generation(config).lower()))
    tags = ["speculative-decoding", "draft-model", *kinds, "specdec"]
    tags += [record["exported_as"]] if "exported_as" in record else []
    data = ModelCardData(
        base_model=base, library_name="specdec", pipeline_tag="text-generation", tags=tags, license=license,
        datasets=datasets or None, eval_results=results or None,
        model_name=name.rpartition("/")[2] if results else None,
    )  # fmt: skip
    body = "\n".join(_body(record, config, name, base or record["target"]["source"]))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n{MARK}\n")


def _generation(config: DrafterConfig) -> str:
    if isinstance(config.attention, TargetLayer):
        return "MTP"
    if config.recurrence.masks:
        return "DFlash"
    wide = isinstance(config.entry, Wide)
    if isinstance(config.fusion, LastLayer) and not wide:
        return "EAGLE-1"
    if config.recurrence.parallel:
        return "P-EAGLE"
    newest = config.norms.aux == "each" and isinstance(config.recurrence, PostNorm)
    of_3 = isinstance(config.fusion, Concat | LastLayer) and wide
    return ("EAGLE-3.1" if newest else "EAGLE-3") if of_3 else "EAGLE"


def _results(metrics: Record) -> Iterator[EvalResult]:
    """Acceptance length and speed-up of every draft shape, as the Hub's ``model-index`` has them."""
    settings = metrics["settings"]
    hub = HUB_NAME.fullmatch(settings["prompts"][0]) if len(settings["prompts"]) == 1 else None
    source = (
        dict(zip(("revision", "config", "split"), hub.groups()[1:], strict=True)) if hub else {}
    )
    dataset: dict[str, Any] = {
        "dataset_type": hub[1] if hub else "-".join(map(stem, settings["prompts"])),
        "dataset_name": _prompts(settings),
        **{f"dataset_{key}": value for key, value in source.items()},
    }
    drawn = settings["sampling"]["temperature"]
    conditions = {
        "max_new_tokens": settings["max_new_tokens"], "temperature": drawn, "batch_size": settings["batch_size"],
        "dtype": settings["dtype"], "device": _device(metrics["provenance"]),
        "prompts_sha256": settings["prompts_sha256"], "interval": settings["intervals"],
    }  # fmt: skip
    for result in metrics["results"]:
        of = f"{result['shape']}, temperature {drawn:g}" if drawn else result["shape"]
        speedup = {"mean": result["speedup"], **(result["speedup_interval"] or {})}
        for kind, title, found in (
            (
                "acceptance_length",
                f"Acceptance length, bonus token included, {of}",
                result["acceptance_length"],
            ),
            ("speedup", f"Speed-up over plain decoding, {of}", speedup),
        ):
            if found["mean"] is None:
                continue
            ends = {
                end: round(found[end], 4) for end in ("low", "high") if found.get(end) is not None
            }
            yield EvalResult(
                task_type="text-generation", task_name="Speculative decoding", **dataset, metric_type=kind,
                metric_value=round(found["mean"], 4), metric_name=f"{title}{_brackets(found)}",
                metric_args={"shape": result["shape_config"], "prompts": result["prompts"], **ends, **conditions},
            )  # fmt: skip


def _prompts(settings: Record) -> str:
    if suite := settings.get("suite"):
        return f"{suite['title']} ({suite['published'] or 'other rows than the published'})"
    return ", ".join(
        path if HUB_NAME.fullmatch(path) else Path(path).name for path in settings["prompts"]
    )


def _device(provenance: Record) -> str:
    gpus = provenance["gpus"]
    return (
        f"{len(gpus)} x {gpus[0]}" if gpus else f"{provenance['cpu']}, {provenance['cores']} cores"
    )


def _brackets(found: Record) -> str:
    return "" if found.get("low") is None else f" [{found['low']:.2f}, {found['high']:.2f}]"


def _body(record: Record, config: DrafterConfig, name: str, target: str) -> Iterator[str]:
    identity = record["target"]
    method = Subject(config, False, False, False).method
    yield f"""# {_generation(config)} drafter for {hub_id(target) or Path(target).name}

A draft model for speculative decoding: it reads hidden states of `{target}` and proposes its next tokens, which that
model verifies, so that what is said is the target's own. It is no language model by itself.

## Design

| | |
|---|---|
| Target | {target}{f" at {identity['revision']}" if identity["revision"] else ""} |
| Target's fingerprint | `{identity["fingerprint"]}` |"""
    for axis in AXES:
        yield f"| {axis} | {words(canonical(record['drafter'][axis])).strip('{}[]')} |"
    yield f"| Draft vocabulary | {config.draft_vocab_size:,} of {config.vocab_size:,} tokens |\n\n## Use\n"
    if "exported_as" in record:
        chosen = FORMATS[record["exported_as"]]
        source = TargetSource(
            target, identity["revision"], trust_remote_code=identity["trust_remote_code"]
        )
        subject = Subject(config, False, False, False, str(record["target"].get("architecture")))
        line = chosen.command(name, subject, source, record["draft_tokens"])
        yield (
            f"Written for {record['engine']}, format {record['exported_as']}, method {method}; it needs "
            f"{record['needs'] or 'no release in particular'} at least.\n\n```bash\n{line}\n```\n\n"
            "`specdec.json` has the drafter's complete config, and `specdec import` reads the drafter back:\n\n"
            f"```bash\nspecdec import --checkpoint {name} --target {target} --out drafter\n```\n"
        )
    else:
        of = f"--target {target} --drafter {name}"
        export = f"specdec export {of} --out served"
        served = (
            f"specdec serve {of}                # in vLLM\n{export}  # for vLLM, or --format sglang"
        )
        if isinstance(config.attention, TargetLayer):
            served = f"{export} --format mtp  # a copy of the target with it, for vLLM"
        yield (
            "```bash\npip install specdec-lightning\n"
            f"specdec evaluate {of} --prompts question.jsonl --shape chain tree\n"
            f"{served}\n```\n\n"
            "```python\nfrom specdec import SpeculativeDecoder, Target, load_drafter\n\n"
            f"decoder = SpeculativeDecoder(Target.load({target!r}), load_drafter({name!r}))\n"
            'made = decoder.generate("def add(a, b):", max_new_tokens=64)\n'
            "print(made.text, made.acceptance_length)\n```\n"
        )
    yield "## Measured\n"
    if not record["evaluations"]:
        yield "Nothing was measured.\n"
    else:
        yield from _measured(record["evaluations"])
    yield from _training(record["training"])
    yield "## Limits\n\n- It drafts for this target; a fine-tune of it accepts less, which has to be measured."
    if config.draft_vocab_size < config.vocab_size:
        yield "- Tokens outside the draft vocabulary are never proposed."
    if (
        min(
            (each["prompts"] for one in record["evaluations"] for each in one["results"]),
            default=99,
        )
        < FEW_PROMPTS
    ):
        yield f"- Measured on fewer than {FEW_PROMPTS} prompts: intervals are wide, and hold a little less than 95 %."
    if (
        most := max(
            (each["looping_share"] for one in record["evaluations"] for each in one["results"]),
            default=0,
        )
    ) >= LOOPING_SHARE:
        yield f"- Warning: up to {most:.0%} of the answers repeat themselves: quote the figures without loops."
    if identity["source"] == EMBEDDED:
        yield (
            "- The target is the small model that comes with specdec. Its greedy text repeats phrases, which flatters "
            "every drafter: the figures say that the machinery works, not what a large chat model will give."
        )
    yield f"\nSHA-256 of the drafter's weights: `{record['drafter_sha256']}`\n"


def _measured(evaluations: Sequence[Record]) -> Iterator[str]:
    """A table for each way that evaluations were made in, with a row for each suite, temperature and draft shape."""
    alike: dict[str, list[Record]] = {}
    for metrics in evaluations:
        settings = metrics["settings"]
        made = metrics["provenance"]
        how = (
            f"at most {settings['max_new_tokens']} new tokens, {settings['dtype']}, batch size "
            f"{settings['batch_size']}, {_device(made)}, torch {made['versions']['torch']}, {made['date'][:10]}"
        )
        alike.setdefault(
            f"By `specdec evaluate`: {how}. Brackets: {settings['intervals']}.\n", []
        ).append(metrics)
    for how, group in alike.items():
        columns = "Temperature | Draft shape | Acceptance length | Speed-up | Identical outputs | Loops | Without loops"
        yield f"{how}\n| Prompts | Count | {columns} |\n|---|--:|--:|---|--:|--:|--:|--:|--:|"
        for metrics in group:
            prompts = _prompts(metrics["settings"])
            temperature = metrics["settings"]["sampling"]["temperature"]
            for one in metrics["results"]:
                length = one["acceptance_length"]
                speedup = one["speedup"]
                compared = one["compared_outputs"]
                faster = (
                    "-"
                    if speedup is None
                    else f"{speedup:.2f}x{_brackets(one['speedup_interval'] or {})}"
                )
                same = f"{one['identical_outputs']} of {compared}" if compared else "not compared"
                others = one["acceptance_length_without_looping"]
                without = f"{others['mean']:.2f}{_brackets(others)}" if others else "-"
                yield (
                    f"| {prompts} | {one['prompts']} | {temperature:g} | {one['shape']} | {length['mean']:.2f}"
                    f"{_brackets(length)} | {faster} | {same} | {one['looping_share']:.0%} | {without} |"
                )
        yield ""
    yield (
        "Acceptance length is tokens committed per target pass, the target's own (bonus) token included. Loops: "
        "answers that repeat themselves, which is easy to draft, and the acceptance length without them.\n"
    )


def _training(training: Record | None) -> Iterator[str]:
    yield "## Training\n"
    if training is None:
        yield "How it was trained is not recorded beside it.\n"
        return
    steps = (
        "an unknown number of steps"
        if training["steps"] is None
        else how_many(training["steps"], "step")
    )
    chosen = training.get("chosen_by")
    best = "" if chosen is None else (
        f" It is the one of its run's validations that decoded best: acceptance length {chosen['mean']:.2f}"
        f"{_brackets(chosen)} on validation prompts, which flatters it, as it was chosen by that figure."
    )  # fmt: skip
    tokens = f", {training['tokens']:,} tokens with padding" if training["tokens"] else ""
    data = ", ".join(
        source if HUB_NAME.fullmatch(source) else Path(source).name for source in training["data"]
    )
    shares = [
        f"{part['name']} {part['share_of_rows']:.1%} of the rows and {part['share_of_supervised_tokens']:.1%} of the "
        "supervised tokens"
        for part in training.get("mix", [])
    ]
    mix = f" ({', '.join(shares)})" if shares else ""
    resumed = f", resumed {how_many(training['resumed'], 'time')}" if training["resumed"] else ""
    machine = training["gpus"][0] if training["gpus"] else training["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    yield (
        f"{steps}{tokens}, on {data}{mix}; {how_many(training['ttt_steps'], 'unrolled step')}, "
        f"loss {training['loss']}, seed {training['seed']}{resumed}. {training['date'][:10]}, {machine}, {versions}, "
        f"commit {training['git_commit'] or 'unknown'}.{best}\n\n```bash\n{training['command']}\n```\n"
    )
