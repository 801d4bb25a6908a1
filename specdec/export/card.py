"""The model card that goes with a checkpoint: what it is, how it is served, and what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.drafter import Concat, Drafter, PostNorm
from specdec.drafter.io import weights_sha256
from specdec.export.formats import Format, ServingTarget
from specdec.export.switches import Subject
from specdec.target import Target
from specdec.utils.config_diff import canonical
from specdec.utils.files import read_json


def quoted(evaluation: Path | str, drafter: Drafter, target: Target) -> Mapping[str, Any]:
    """The ``metrics.json`` of an evaluation, if it is of this drafter, to the last bit, and this target.

    Raises:
        ValueError: there is none, or it is of another drafter, dtype or target.
    """
    where = Path(evaluation) / "metrics.json"
    metrics = read_json(where)
    try:
        design = dict(metrics["drafter"])
        where_from, digest = design.pop("directory"), design.pop("weights_sha256")
        fingerprint, results = metrics["target"]["fingerprint"], metrics["results"]
        [(result["shape"], result["acceptance_length"]["mean"], result["prompts"]) for result in results]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: not of specdec evaluate, for want of {error}") from error
    if fingerprint != target.identity["fingerprint"]:
        raise ValueError(f"{where}: the evaluation is of another target (its fingerprint)")
    if canonical(design) != canonical(drafter.config.to_json()):
        raise ValueError(f"{where}: the evaluation is of another drafter ({where_from})")
    if digest != weights_sha256(drafter):
        raise ValueError(f"{where}: the evaluation is of other weights than these ({where_from}): evaluate again")
    return metrics


def card(
    subject: Subject,
    served: ServingTarget,
    chosen: Format,
    line: str,
    metrics: Mapping[str, Any] | None,
    rounding: str = "",
) -> str:
    """``README.md``; ``rounding`` is what :func:`specdec.export.write.warn_if_rounded` found."""
    config = subject.config
    generation = "EAGLE-1"
    if isinstance(config.fusion, Concat):
        newest = config.norms.aux == "each" and isinstance(config.recurrence, PostNorm)
        generation = "EAGLE-3.1" if newest else "EAGLE-3"
    rows = [
        ("Target", f"`{served.target}` ({config.target.get('model_type')}, {config.num_target_layers} layers)"),
        ("Written for", f"{chosen.engine}, format {chosen.name}, method {subject.method}"),
        ("Needs at least", chosen.needs(subject) or "no release in particular"),
        ("Boundaries of the target read", ", ".join(str(b) for b in config.aux_layers)),
        ("Draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("Layers, width", f"{config.num_layers}, {config.hidden_size}"),
        ("Token embedding", "its own" if subject.own_embedding else "the target's, not in the file"),
        *([("Rounded in training, here as the target has them", rounding)] if rounding else []),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
tags: [speculative-decoding, {subject.method}, specdec]
---

# {generation} drafter for {config.target.get("source", served.target)}

| | |
|---|---|
{table}

## Serving

```bash
{line}
```

## Measured acceptance

{_measured(metrics) if metrics else "Nothing was measured: no evaluation was given at export."}

`specdec.json` holds the drafter's complete config; `specdec import` reads it back.
"""


def _measured(metrics: Mapping[str, Any]) -> str:
    settings = metrics.get("settings", {})
    prompts = ", ".join(Path(path).name for path in settings.get("prompts", []))
    rows = []
    for result in metrics["results"]:
        found = result["acceptance_length"]
        interval = f" [{found['low']:.2f}, {found['high']:.2f}]" if found.get("low") is not None else ""
        rows.append(f"| {result['shape']} | {found['mean']:.3f}{interval} | {result['prompts']} |")
    table = "\n".join(rows)
    return f"""By `specdec evaluate`, tokens committed per target pass, the target's own token included:

| Shape | Acceptance length | Prompts |
|---|---|---|
{table}

Prompts {prompts}; at most {settings.get("max_new_tokens")} new tokens; {metrics.get("provenance", {}).get("date")}."""
