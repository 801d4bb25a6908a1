"""The Markdown of a model card, for people."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from specdec.data.rows import HUB_NAME
from specdec.drafter import Concat, DrafterConfig, LastLayer, PostNorm, TargetLayer, Wide
from specdec.export.formats import FORMATS
from specdec.export.subject import Subject
from specdec.report.tables import FEW_PROMPTS
from specdec.target import EMBEDDED, TargetSource
from specdec.utils.config import normalize_config, to_text
from specdec.utils.text import how_many

Record = Mapping[str, Any]
LOOPING_SHARE = 0.05  # of the answers; from here on the card warns, as an evaluation does
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


def card_body(record: Record, config: DrafterConfig, name: str, target: str) -> str:
    """Return the card below its YAML.

    Args:
        name: the repository on the Hub, or the directory.
        target: the target's name on the Hub, or its directory.
    """
    sections = [*_design(record, config, target)]
    if "exported_as" in record:
        sections.append(_export_usage(record, config, name, target))
    else:
        sections.append(_drafter_usage(config, name, target))
    sections.append("## Measured\n")
    if record["evaluations"]:
        sections += _measured(record["evaluations"])
    else:
        sections.append("Nothing was measured.\n")
    sections += ["## Training\n", training_text(record["training"])]
    sections += _limits(record, config)
    sections.append(f"\nSHA-256 of the drafter's weights: `{record['drafter_sha256']}`\n")
    return "\n".join(sections)


def _design(record: Record, config: DrafterConfig, target: str) -> Iterator[str]:
    identity = record["target"]
    revision = f" at {identity['revision']}" if identity["revision"] else ""
    yield f"""# {generation(config)} drafter for {hub_id(target) or Path(target).name}

A draft model for speculative decoding: it reads hidden states of `{target}` and proposes its next tokens, which that
model verifies, so that what is said is the target's own. It is no language model by itself.

## Design

| | |
|---|---|
| Target | {target}{revision} |
| Target's fingerprint | `{identity["fingerprint"]}` |"""
    for axis in AXES:
        yield f"| {axis} | {to_text(normalize_config(record['drafter'][axis])).strip('{}[]')} |"
    yield f"| Draft vocabulary | {config.draft_vocab_size:,} of {config.vocab_size:,} tokens |\n\n## Use\n"


def _export_usage(record: Record, config: DrafterConfig, name: str, target: str) -> str:
    identity = record["target"]
    source = TargetSource(
        target, identity["revision"], trust_remote_code=identity["trust_remote_code"]
    )
    subject = Subject(config, False, False, False, str(identity.get("architecture")))
    line = FORMATS[record["exported_as"]].command(name, subject, source, record["draft_tokens"])
    needs = record["needs"] or "no release in particular"
    written_for = f"{record['engine']}, format {record['exported_as']}, method {subject.method}"
    return f"""Written for {written_for}; it needs {needs} at least.

```bash
{line}
```

`specdec.json` has the drafter's complete config, and `specdec import` reads the drafter back:

```bash
specdec import --checkpoint {name} --target {target} --out drafter
```
"""


def _drafter_usage(config: DrafterConfig, name: str, target: str) -> str:
    arguments = f"--target {target} --drafter {name}"
    export = f"specdec export {arguments} --out served"
    serving = f"specdec serve {arguments}                # in vLLM\n{export}  # for vLLM, or --format sglang"
    if isinstance(config.attention, TargetLayer):
        serving = f"{export} --format mtp  # a copy of the target with it, for vLLM"
    return f"""```bash
pip install specdec-lightning
specdec evaluate {arguments} --prompts question.jsonl --shape chain tree
{serving}
```

```python
from specdec import SpeculativeDecoder, Target, load_drafter

decoder = SpeculativeDecoder(Target.load({target!r}), load_drafter({name!r}))
made = decoder.generate("def add(a, b):", max_new_tokens=64)
print(made.text, made.acceptance_length)
```
"""


def _limits(record: Record, config: DrafterConfig) -> Iterator[str]:
    yield "## Limits\n\n- It drafts for this target; a fine-tune of it accepts less, which has to be measured."
    if config.draft_vocab_size < config.vocab_size:
        yield "- Tokens outside the draft vocabulary are never proposed."
    results = [result for metrics in record["evaluations"] for result in metrics["results"]]
    if any(result["prompts"] < FEW_PROMPTS for result in results):
        yield f"- Measured on fewer than {FEW_PROMPTS} prompts: intervals are wide, and hold a little less than 95 %."
    looping_share = max((result["looping_share"] for result in results), default=0)
    if looping_share >= LOOPING_SHARE:
        yield (
            f"- Warning: up to {looping_share:.0%} of the answers repeat themselves: quote the figures without loops."
        )
    if record["target"]["source"] == EMBEDDED:
        yield (
            "- The target is the small model that comes with specdec. Its greedy text repeats phrases, which flatters "
            "every drafter: the figures say that the machinery works, not what a large chat model will give."
        )


def _measured(evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield a table for each way that evaluations were made, with a row for each suite, temperature and shape."""
    groups: dict[str, list[Record]] = {}
    for metrics in evaluations:
        settings = metrics["settings"]
        provenance = metrics["provenance"]
        how = (
            f"at most {settings['max_new_tokens']} new tokens, {settings['dtype']}, batch size "
            f"{settings['batch_size']}, {device_text(provenance)}, torch {provenance['versions']['torch']}, "
            f"{provenance['date'][:10]}"
        )
        heading = f"By `specdec evaluate`: {how}. Brackets: {settings['intervals']}.\n"
        groups.setdefault(heading, []).append(metrics)
    columns = "Temperature | Draft shape | Acceptance length | Speed-up | Identical outputs | Loops | Without loops"
    for heading, group in groups.items():
        yield f"{heading}\n| Prompts | Count | {columns} |\n|---|--:|--:|---|--:|--:|--:|--:|--:|"
        for metrics in group:
            for result in metrics["results"]:
                yield _result_row(metrics["settings"], result)
        yield ""
    yield (
        "Acceptance length is tokens committed per target pass, the target's own (bonus) token included. Loops: "
        "answers that repeat themselves, which is easy to draft, and the acceptance length without them.\n"
    )


def _result_row(settings: Record, result: Record) -> str:
    length = result["acceptance_length"]
    speedup = "-"
    if result["speedup"] is not None:
        speedup = f"{result['speedup']:.2f}x{interval_text(result['speedup_interval'] or {})}"
    compared = result["compared_outputs"]
    identical = f"{result['identical_outputs']} of {compared}" if compared else "not compared"
    others = result["acceptance_length_without_looping"]
    cells = (
        prompts_text(settings),
        result["prompts"],
        f"{settings['sampling']['temperature']:g}",
        result["shape"],
        f"{length['mean']:.2f}{interval_text(length)}",
        speedup,
        identical,
        f"{result['looping_share']:.0%}",
        f"{others['mean']:.2f}{interval_text(others)}" if others else "-",
    )
    return f"| {' | '.join(map(str, cells))} |"


def training_text(training: Record | None) -> str:
    """Return the section on how the drafter was trained."""
    if training is None:
        return "How it was trained is not recorded beside it.\n"
    steps = "an unknown number of steps"
    if training["steps"] is not None:
        steps = how_many(training["steps"], "step")
    best = ""
    chosen = training.get("chosen_by")
    if chosen is not None:
        best = (
            f" It is the one of its run's validations that decoded best: acceptance length {chosen['mean']:.2f}"
            f"{interval_text(chosen)} on validation prompts, which flatters it, as it was chosen by that figure."
        )
    tokens = f", {training['tokens']:,} tokens with padding" if training["tokens"] else ""
    data = ", ".join(map(_short_name, training["data"]))
    shares = [
        f"{part['name']} {part['share_of_rows']:.1%} of the rows and {part['share_of_supervised_tokens']:.1%} of the "
        "supervised tokens"
        for part in training.get("mix", [])
    ]
    mix = f" ({', '.join(shares)})" if shares else ""
    resumed = f", resumed {how_many(training['resumed'], 'time')}" if training["resumed"] else ""
    machine = training["gpus"][0] if training["gpus"] else training["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    return (
        f"{steps}{tokens}, on {data}{mix}; {how_many(training['ttt_steps'], 'unrolled step')}, "
        f"loss {training['loss']}, seed {training['seed']}{resumed}. {training['date'][:10]}, {machine}, {versions}, "
        f"commit {training['git_commit'] or 'unknown'}.{best}\n\n```bash\n{training['command']}\n```\n"
    )
