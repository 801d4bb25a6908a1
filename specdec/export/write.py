"""``export``: a drafter as a checkpoint that an engine reads, written whole, verified and hashed, or not at all."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.decoding import warn_unless_made_for
from specdec.drafter import Concat, Drafter, Narrow, PostNorm, load_drafter
from specdec.drafter.io import weights_sha256
from specdec.export import read
from specdec.export.formats import FORMATS, Format
from specdec.export.switches import EMBEDDING, HEAD, NotServable, Subject
from specdec.target import Target, TargetSource
from specdec.utils.config import canonical
from specdec.utils.files import read_json, sha256, staged_directory, write_json, write_sums, write_text
from specdec.utils.machine import provenance

log = logging.getLogger(__name__)

DRAFT_TOKENS = 3
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)  # what a target is loaded in, beside float64


def export(
    *,
    drafter: str,
    out: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    format: str = "vllm",
    draft_tokens: int = DRAFT_TOKENS,
    evaluation: str | None = None,
) -> None:
    """A saved drafter as a checkpoint that vLLM or SGLang serves; prints the line that serves it.

    Example: specdec export --target Qwen/Qwen3-4B --drafter runs/a/drafter --out served/a --format vllm

    Args:
        drafter: the drafter's directory
        out: directory of the checkpoint, not there yet
        target: the model that it drafts for
        format: vllm, speculators or sglang
        draft_tokens: drafts a pass, in the line that serves it
        evaluation: a directory of specdec evaluate, whose acceptance the model card quotes

    Raises:
        ValueError: an argument is wrong, or the engine cannot serve the drafter.
    """
    if Path(out).exists():  # before anything is loaded
        raise ValueError(f"{out} exists already: choose another place or remove it first")
    of = load_drafter(drafter, dtype=None), target.load(), out, format
    exported = export_drafter(*of, draft_tokens=draft_tokens, served=target, evaluation=evaluation)
    sys.stdout.write(f"{exported.command}\n")


class Exported(NamedTuple):
    """What an export leaves."""

    directory: Path
    method: str  # ``eagle`` or ``eagle3``, as engines call it
    command: str  # the line that serves it


def export_drafter(
    drafter: Drafter, target: Target, directory: Path | str, format: str = "vllm", *,
    draft_tokens: int = DRAFT_TOKENS, served: TargetSource | None = None, evaluation: Path | str | None = None,
) -> Exported:  # fmt: skip
    """Write a drafter for a serving engine, in its own dtype.

    Args:
        target: whose drafter it is; embedding and head that are the target's own are left to it, rounded ones too.
        format: ``vllm``, ``speculators`` or ``sglang``.
        draft_tokens: drafts a pass, in the line that serves it.
        served: where the engine finds the target, if not at ``target.source``.
        evaluation: a directory of ``specdec evaluate``, which the model card quotes.

    Raises:
        NotServable: the engine cannot express the drafter; the message names each switch and the engine's version.
        ValueError: the drafter is of another target, or the directory exists or cannot be written.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1, not {draft_tokens}")
    directory, chosen = Path(directory), FORMATS[format]
    config = drafter.config
    of_drafter = config.vocab_size, config.target_hidden_size, config.num_target_layers
    of_target = target.vocab_size, target.hidden_size, target.num_layers
    if of_drafter != of_target:
        sizes = f"is for a target of vocabulary, hidden size and layers {of_drafter}, {target.source} has {of_target}"
        raise ValueError(f"the drafter {sizes}")
    warn_unless_made_for(target, drafter)
    subject = subject_of(drafter, target)
    chosen.check(subject)
    served = served or TargetSource(target.source)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    line = chosen.command(str(directory.resolve()), subject, served, draft_tokens)
    metrics = _evaluated(evaluation, drafter, target) if evaluation is not None else None
    warn_if_rounded(drafter, target, subject)
    tensors = chosen.tensors(drafter, subject)
    read.finite(tensors)
    with staged_directory(directory) as temporary:
        file = temporary / read.WEIGHTS
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ValueError(f"{directory}: the weights cannot be written: {error}") from error
        write_json(temporary / read.CONFIG, chosen.config(subject, served.directory(), architectures, draft_tokens))
        record = {
            "format": read.FORMAT, "exported_as": format, "engine": chosen.engine, "method": subject.method,
            "serve": line, "weights_sha256": sha256(file), "drafter": config.to_json(), "provenance": provenance(),
        }  # fmt: skip
        write_json(temporary / read.OURS, record)
        write_text(temporary / "README.md", _card(subject, served.directory(), chosen, line, metrics))
        write_sums(temporary)
        _verify(temporary, drafter, target, subject)
    return Exported(directory, subject.method, line)


def subject_of(drafter: Drafter, target: Target) -> Subject:
    """What engines differ in, of a drafter and its target."""
    config, state = drafter.config, drafter.state_dict()
    bias = state.get("entry.feature_fc.bias")
    return Subject(
        config,
        own_embedding=not is_targets(state[EMBEDDING], target.embedding_weight()),
        own_head=not is_targets(state[HEAD], target.head_weight()),
        entry_bias=type(config.entry) is Narrow and bias is not None and bool(bias.any()),
    )


def _verify(directory: Path, drafter: Drafter, target: Target, subject: Subject) -> None:
    """Read the checkpoint back as if anyone had written it: to the last bit the drafter, or what the target has."""
    checkpoint = read.read_checkpoint(directory)
    if lost := read.contradictions(drafter.config, read.described(checkpoint, target)):
        raise NotServable(f"the checkpoint does not say all of the drafter: {', '.join(lost)} read back otherwise")
    state, theirs = drafter.state_dict(), _weights(target)
    for name, value in read.import_checkpoint(checkpoint, target).state_dict().items():
        wanted = theirs[name].to(state[name].dtype) if name in subject.shared else state[name]
        if not torch.equal(value, wanted.cpu()) or value.dtype != wanted.dtype:
            raise ValueError(f"{directory}: {name} reads back otherwise than it was written: nothing was exported")


def is_targets(ours: Tensor, theirs: Tensor) -> bool:
    """Whether weights are the target's, though one of the two was rounded to another dtype, as a whole.

    A float32 checkpoint loaded in bfloat16 is the same target. A drafter copies what it was trained with, and may be
    stored wider or exported with the target in another dtype. Of trained weights, not all numbers are such roundings.
    """
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    return _rounding(ours, theirs) is not None or _equal(ours.to(theirs.dtype), theirs)


def warn_if_rounded(drafter: Drafter, target: Target, subject: Subject) -> None:
    """Warn of what stays with the target but is rounded in the drafter: it is not served as it was in training."""
    state, theirs = drafter.state_dict(), _weights(target)
    dtypes = {name: _rounding(state[name].cpu(), theirs[name].cpu()) for name in subject.shared}
    rounded = {name: dtype for name, dtype in dtypes.items() if dtype not in (None, theirs[name].dtype)}
    if rounded:
        log.warning(
            "this drafter has weights of the target rounded, %s: an engine reads them as the target has them, and "
            "close drafts may fall otherwise than in training; specdec parity --target.dtype compares in that dtype",
            " and ".join(f"{name} to {str(dtype).removeprefix('torch.')}" for name, dtype in rounded.items()),
        )


def _weights(target: Target) -> dict[str, Tensor]:
    """The target's, by the drafter's names."""
    return {EMBEDDING: target.embedding_weight(), HEAD: target.head_weight()}


def _rounding(ours: Tensor, theirs: Tensor) -> torch.dtype | None:
    """The dtype in which theirs are ours, their own if nothing is rounded; None if there is none."""
    return next((dtype for dtype in (theirs.dtype, *ROUNDED) if _equal(ours, theirs.to(dtype))), None)


def _equal(one: Tensor, two: Tensor) -> bool:
    """Number by number, of any dtypes."""
    dtype = torch.promote_types(one.dtype, two.dtype)
    return torch.equal(one.to(dtype), two.to(dtype))


def _evaluated(evaluation: Path | str, drafter: Drafter, target: Target) -> Mapping[str, Any]:
    """The ``metrics.json`` of an evaluation; ValueError if it is of another drafter, in any bit, dtype or target."""
    where = Path(evaluation) / "metrics.json"
    metrics: dict[str, Any] = read_json(where)
    of, fingerprint = metrics.get("drafter", {}), metrics.get("target", {}).get("fingerprint")
    design = {name: of.get(name) for name in drafter.config.to_json()}
    for what, same in (
        ("target", fingerprint == target.identity["fingerprint"]),
        ("drafter's weights", of.get("weights_sha256") == weights_sha256(drafter)),
        ("drafter", canonical(design) == canonical(drafter.config.to_json())),
    ):
        if not same:
            raise ValueError(f"{where}: not an evaluation of this {what} ({of.get('directory')}): evaluate again")
    return metrics


def _card(subject: Subject, target: str, chosen: Format, line: str, metrics: Mapping[str, Any] | None) -> str:
    """The model card, ``README.md``: what it is, how it is served, and what was measured."""
    config = subject.config
    generation = "EAGLE-1"
    if isinstance(config.fusion, Concat):
        newest = config.norms.aux == "each" and isinstance(config.recurrence, PostNorm)
        generation = "EAGLE-3.1" if newest else "EAGLE-3"
    measured = "Nothing was measured: no evaluation was given at export."
    if metrics:
        rows = ["| Shape | Acceptance length | Prompts |\n|---|---|---|\n"]
        for result in metrics["results"]:
            found = result["acceptance_length"]
            interval = f" [{found['low']:.2f}, {found['high']:.2f}]" if found.get("low") is not None else ""
            rows.append(f"| {result['shape']} | {found['mean']:.3f}{interval} | {result['prompts']} |\n")
        prompts = ", ".join(Path(path).name for path in metrics["settings"]["prompts"])
        measured = (
            f"By `specdec evaluate` on {prompts}, at most {metrics['settings']['max_new_tokens']} new tokens; tokens "
            f"committed per target pass, the target's own token included:\n\n{''.join(rows)}"
        )
    return f"""---
base_model: {target}
tags: [speculative-decoding, {subject.method}, specdec]
---

# {generation} drafter for {config.target.get("source", target)}

Reads boundaries {", ".join(str(b) for b in config.aux_layers)} of `{target}`'s {config.num_target_layers} layers
and drafts over {config.draft_vocab_size} of its {config.vocab_size} tokens. Written for {chosen.engine}, format
{chosen.name}, method {subject.method}; it needs {chosen.needs(subject) or "no release in particular"} at least.

```bash
{line}
```

## Measured acceptance

{measured}

`specdec.json` holds the drafter's complete config; `specdec import` reads it back.
"""
