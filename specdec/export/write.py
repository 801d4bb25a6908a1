"""``export``: a drafter as a checkpoint that an engine reads, written whole, verified and hashed, or not at all."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdec.decoding import warn_unless_made_for
from specdec.drafter import Drafter, Narrow
from specdec.embedded.source import TargetSource
from specdec.export.adopt import adopt, contradictions, described, finite
from specdec.export.arguments import found_at
from specdec.export.card import card, quoted
from specdec.export.checkpoint import CONFIG, FORMAT, OURS, SINGLE, read_checkpoint
from specdec.export.format import Format, Served
from specdec.export.formats import FORMATS
from specdec.export.shared import is_targets, warn_if_rounded, weights
from specdec.export.switches import EMBEDDING, HEAD, NotServable, Subject
from specdec.files import sha256, staged_directory, write_json, write_text
from specdec.provenance import provenance
from specdec.sums import write_sums
from specdec.target import Target

DRAFT_TOKENS = 3


class Exported(NamedTuple):
    """What an export leaves."""

    directory: Path
    method: str
    """``eagle`` or ``eagle3``, as engines call it."""
    command: str
    """The line that serves it."""


def export_drafter(
    drafter: Drafter,
    target: Target,
    directory: Path | str,
    format: str = "vllm",
    *,
    draft_tokens: int = DRAFT_TOKENS,
    served: TargetSource | None = None,
    replace: bool = False,
    evaluation: Path | str | None = None,
    command: list[str] | None = None,
) -> Exported:
    """Write a drafter for a serving engine, in its own dtype.

    Args:
        target: whose drafter it is; embedding and head that are the target's own are left to it, rounded ones too.
        format: ``vllm``, ``speculators`` or ``sglang``.
        draft_tokens: drafts a pass, in the line that serves it.
        served: where the engine finds the target, if not at ``target.source``.
        replace: an older export in ``directory`` goes once the new one is there.
        evaluation: a directory of ``specdec evaluate``, which the model card quotes.
        command: the command line, for the record.

    Raises:
        NotServable: the engine cannot express the drafter; the message names each switch and the engine's version.
        ValueError: the drafter is of another target, or the directory exists, and is not an export to be replaced, or
            cannot be written.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1, not {draft_tokens}")
    directory, chosen = Path(directory), FORMATS[format]
    if replace and directory.exists() and not (directory / OURS).is_file():
        raise ValueError(f"{directory} is no export, for want of {OURS}, and is not replaced: remove it yourself")
    _check_target(drafter, target)
    subject = subject_of(drafter, target)
    chosen.check(subject)
    where = Served(target.source, _architectures(target), draft_tokens)
    if served is not None:
        where = where._replace(
            target=found_at(served), revision=served.revision, trust_remote_code=served.trust_remote_code
        )
    line = chosen.command(str(directory.resolve()), subject, where)
    quote = quoted(evaluation, drafter, target) if evaluation is not None else None
    rounding = warn_if_rounded(drafter, target, subject)
    tensors = chosen.tensors(drafter, subject)
    finite(tensors)
    with staged_directory(directory, replace) as temporary:
        file = temporary / SINGLE[0]
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ValueError(f"{directory}: the weights cannot be written: {error}") from error
        write_json(temporary / CONFIG, chosen.config(subject, where))
        write_json(temporary / OURS, _record(chosen, subject, sha256(file), line, command))
        write_text(temporary / "README.md", card(subject, where, chosen, line, quote, rounding))
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


def _architectures(target: Target) -> list[str]:
    return list(target.model.config.architectures or [type(target.model).__name__])


def _check_target(drafter: Drafter, target: Target) -> None:
    config = drafter.config
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden_size, target.hidden_size),
        ("num_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise ValueError(f"the drafter is for a target of {name} {ours}, {target.source} has {theirs}")
    warn_unless_made_for(target, drafter)


def _record(chosen: Format, subject: Subject, digest: str, line: str, command: list[str] | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "exported_as": chosen.name,
        "engine": chosen.engine,
        "method": subject.method,
        "serve": line,
        "weights_sha256": digest,
        "drafter": subject.config.to_json(),
        "provenance": provenance(command),
    }


def _verify(directory: Path, drafter: Drafter, target: Target, subject: Subject) -> None:
    """Read the checkpoint back as if anyone had written it: what engines see must be the drafter, to the last bit.

    What stays with the target must be as the target has it.
    """
    checkpoint = read_checkpoint(directory)
    if lost := contradictions(drafter.config, described(checkpoint, target)):
        raise NotServable(f"the checkpoint does not say all of the drafter: {', '.join(lost)} read back otherwise")
    state, theirs = drafter.state_dict(), weights(target)
    for name, value in adopt(checkpoint, target).state_dict().items():
        wanted = theirs[name].to(state[name].dtype) if name in subject.shared else state[name]
        if not torch.equal(value, wanted.cpu()) or value.dtype != wanted.dtype:
            raise ValueError(f"{directory}: {name} reads back otherwise than it was written: nothing was exported")
