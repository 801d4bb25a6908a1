"""``export``: a drafter as a checkpoint that an engine reads, written whole, verified and hashed, or not at all."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.decoding import warn_unless_made_for
from specdec.drafter import Drafter, Narrow, load_drafter
from specdec.drafter.io import check_finite, located, weights_sha256
from specdec.export import card, keys, mtp
from specdec.export.checkpoint import FORMAT, OURS, Checkpoint, read_checkpoint
from specdec.export.engine_targets import target_facts
from specdec.export.formats import DrafterCheckpoint, Format, drafts_of
from specdec.export.known_formats import FORMATS
from specdec.export.planned import missing_kernels
from specdec.export.push import check_repository
from specdec.export.push import push as push_export
from specdec.export.quantize import (
    check_quantization,
    quantization_lines,
    quantization_record,
    quantized,
    rounding_faults,
)
from specdec.export.read import config_of_checkpoint, contradictions, import_checkpoint
from specdec.export.subject import EMBEDDING, HEAD, Subject
from specdec.export.switches import VLLM, dropped
from specdec.export.tensors import Raw, Weights, normalize_name
from specdec.export.weights import same_numbers
from specdec.target import NotServable, Target, TargetSource
from specdec.target.identity import IDENTIFYING, whole_of
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.machine import provenance
from specdec.utils.numbers import Depth, check_numbers
from specdec.utils.reading import sha256
from specdec.utils.text import how_many
from specdec.utils.trust import redacted

log = logging.getLogger(__name__)

# The dtypes that a target is loaded in, beside float64.
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


def export(
    *,
    drafter: str,
    out: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    format: str = "vllm",
    quantize: Literal["int8", "fp8"] | None = None,
    draft_tokens: Depth | None = None,
    evaluation: list[Path] = [],  # noqa: B006
    push: str | None = None,
) -> None:
    """A saved drafter as a checkpoint that vLLM, SGLang or llama.cpp serves; prints the line that serves it.

    Example: specdec export --target Qwen/Qwen3-4B --drafter runs/a/drafter --out served/a --format vllm

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub
        out: directory of the checkpoint, not there yet
        target: the model that it drafts for
        format: vllm, speculators, sglang, or gguf for llama.cpp; mtp for a copy of the target with the drafter as its
            own module
        quantize: int8 or fp8: the matrices in eight bits with a scale per output channel (compressed-tensors W8A8),
            which vLLM and SGLang run with activations rounded token by token; by default the drafter's own dtype
        draft_tokens: drafts a pass, in the line that serves it; 3, or as many as a block drafter makes, if not given
        evaluation: directories of specdec evaluate that the model card quotes; by default those in the run's folder
        push: put the export on the Hugging Face Hub as well, as USER/NAME; see specdec push

    Raises:
        ValueError: an argument is wrong, or the engine cannot serve the drafter.
    """
    if Path(out).exists():  # before anything is loaded
        raise ValueError(f"{out} exists already: choose another place or remove it first")
    if push is not None:
        check_repository(push)
        if format == mtp.FORMAT:
            raise ValueError(
                "--push is for drafters: put a copy of the target on the Hub with hf upload"
            )
    directory = located(drafter)
    exported = export_drafter(
        load_drafter(directory, dtype=None), target.load(), out, format, quantize=quantize, draft_tokens=draft_tokens,
        served=target, evaluation=evaluation, run=directory,
    )  # fmt: skip
    log.info("wrote %s; this serves it:", out)
    sys.stdout.write(f"{exported.command}\n")
    if push is not None:
        push_export(drafter=exported.directory, repo=push)


class Exported(NamedTuple):
    """The result of an export."""

    directory: Path
    checkpoint: DrafterCheckpoint  # what engines are told about it
    command: str  # the line that serves it


def export_drafter(
    drafter: Drafter, target: Target, directory: Path | str, format: str = "vllm", *,
    quantize: str | None = None, draft_tokens: Depth | None = None, served: TargetSource | None = None,
    evaluation: Sequence[Path] = (), run: Path | None = None,
) -> Exported:  # fmt: skip
    """Write a drafter for a serving engine, in its own dtype or with its matrices in eight bits.

    Args:
        target: whose drafter it is; embedding and head that are the target's own are left to it, rounded ones too.
        format: ``vllm``, ``speculators``, ``sglang`` or ``gguf``; or ``mtp``, which writes a copy of the target's
            checkpoint with the drafter in place of the module of multi-token prediction that it had.
        quantize: ``int8`` or ``fp8``, for the formats ``vllm``, ``speculators`` and ``sglang``; see
            :mod:`specdec.export.quantize`.
        draft_tokens: drafts a pass, in the line that serves it; see :func:`specdec.export.formats.drafts_of`.
        served: where the engine finds the target, if not at ``target.source``.
        evaluation: directories of ``specdec evaluate``, which the model card quotes.
        run: the drafter's directory, around which evaluations and the record of its training are looked for.

    Raises:
        NotServable: the engine cannot express the drafter; the message names each switch and the engine's version.
        ValueError: the drafter is of another target, no engine reads the quantization in this format, or the directory
            exists or cannot be written.
    """
    check_numbers(export_drafter, {"draft_tokens": draft_tokens})
    directory = Path(directory)
    made_for = warn_unless_made_for(target, drafter)
    drafts = drafts_of(drafter.config.drafting.fixed_drafts, draft_tokens)
    subject = subject_of(drafter, target)
    _check(subject, target, format, quantize)
    served = served or TargetSource(target.source)
    if format == mtp.FORMAT:
        line = mtp.stitch(drafter, target, subject, served, directory, drafts)
        module = DrafterCheckpoint(directory, mtp.FORMAT, subject.architecture)
        return Exported(directory, module, line)
    chosen = FORMATS[format]
    chosen.check(subject)
    line = chosen.command(str(directory.resolve()), subject, served, drafts)
    record = _record(drafter, subject, chosen, served, drafts, line)
    record["target"] |= _identity(target, drafter, made_for)
    record["training"] = card.trained(run) if run else None
    if run or evaluation:
        record["evaluations"] = card.evaluations(run or directory, record, evaluation)
    _warn_before_serving(drafter, target, subject, chosen.engine)
    plain = chosen.tensors(drafter, subject)
    check_finite(plain)
    tensors = quantized(plain, quantize, chosen.matrices) if quantize else plain
    record["quantization"] = _quantization(plain, tensors)
    number = how_many(len(tensors), "tensor")
    log.info("writing %s for %s, method %s", number, chosen.engine, subject.method)
    with staged_directory(directory) as temporary, _naming(directory):
        chosen.write(temporary, tensors, subject, served, drafts)
        record["weights_sha256"] = sha256(temporary / chosen.weights_file)
        write_json(temporary / OURS, record)
        write_text(temporary / card.README, str(card.model_card(record, str(directory.resolve()))))
        log.info("reading it back, to the last bit")
        chosen.verify(temporary, tensors, subject)
        if chosen.published:
            _verify(temporary, drafter, target, subject, chosen)
    return Exported(directory, DrafterCheckpoint.of(directory, subject), line)


@contextlib.contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Raise ValueError, which names the directory of the export, if its weights cannot be written."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{directory}: the weights cannot be written: {error}") from error


def _quantization(plain: Weights, tensors: Weights) -> Raw | None:
    """Return what an export records of its quantization, and say it; None without one."""
    record = quantization_record(plain, tensors)
    for sentence in quantization_lines(record):
        log.info("%s", sentence)
    return record


def _identity(target: Target, drafter: Drafter, made_for: bool) -> Raw:
    """Return the target's fields by which it is known again; one that was put together from parts has no whole one, and
    the drafter's is taken, if it was made for this target."""
    identity = target.identity
    if not identity["fingerprint"] and made_for:
        identity = identity | whole_of(drafter.config.target, str(identity["dtype"]))
    return {name: identity[name] for name in IDENTIFYING}


def _record(
    drafter: Drafter, subject: Subject, chosen: Format, served: TargetSource, drafts: int, line: str
) -> Raw:
    """Return what an export records of itself; see :mod:`specdec.export.card`."""
    return {
        "format": FORMAT, "exported_as": chosen.name, "engine": chosen.engine, "method": subject.method,
        "parallel": subject.parallel,
        "needs": chosen.needs(subject), "draft_tokens": drafts, "serve": redacted(line), "evaluations": [],
        "drafter": subject.config.to_json(),
        "drafter_sha256": weights_sha256(drafter), "provenance": provenance(),
        "target": {
            "source": redacted(served.source), "revision": redacted(served.revision),
            "trust_remote_code": served.trust_remote_code,
            "architecture": subject.architecture,
        },
    }  # fmt: skip


def _warn_before_serving(drafter: Drafter, target: Target, subject: Subject, engine: str) -> None:
    """Warn of everything that makes an engine draft differently from this drafter."""
    warn_if_rounded(drafter, target, subject)
    warn_of_engines(subject, engine)
    if kernels := missing_kernels(drafter.config):
        log.warning("%s", kernels)
    if target.recurrent:
        log.warning(
            "the target has recurrent layers, whose state an engine must put back where drafts are refused; vLLM 0.32 "
            "on a CPU does not put back its convolutions', and says other text then: check yours with specdec parity "
            "--engine vllm"
        )


def _check(subject: Subject, target: Target, format: str, quantize: str | None) -> None:
    """Raise ValueError for a format that there is not, a quantization that it does not have, a drafter of another
    target's sizes, or a rope that is changed.

    Engines raise its length to the server's.
    """
    if format not in (known := (*FORMATS, mtp.FORMAT)):
        raise ValueError(f"unknown format {format!r}: choose from {', '.join(known)}")
    if quantize is not None:
        matrices = () if format == mtp.FORMAT else FORMATS[format].matrices
        check_quantization(quantize, format, matrices, subject)
    config = subject.config
    of_drafter = config.vocab_size, config.target_hidden_size, config.num_target_layers
    of_target = target.vocab_size, target.hidden_size, target.num_layers
    if of_drafter != of_target:
        raise ValueError(
            f"the drafter is for a target of vocabulary, hidden size and layers {of_drafter}, {target.source} has "
            f"{of_target}"
        )
    longest = target.config.max_position_embeddings
    if config.max_position_embeddings < longest:
        raise NotServable(
            f"the drafter's max_position_embeddings is {config.max_position_embeddings:,} and the target's "
            f"{longest:,}: engines raise it to the server's length, and its rope {config.rope['rope_type']} then "
            "rotates otherwise than in training: give --model.drafter.rope_theta for a separate rope"
        )


def subject_of(drafter: Drafter, target: Target) -> Subject:
    """Return the properties that engines differ in, of a drafter with its positions raised to the target's."""
    config = keys.reaching(drafter.config, target.config.max_position_embeddings)
    state = drafter.state_dict()
    target_state = _weights(target)
    bias = state.get("entry.feature_fc.bias")
    architectures = target.model.config.architectures or [type(target.model).__name__]
    return Subject(
        config,
        own_embedding=not is_targets(state[EMBEDDING], target_state[EMBEDDING]),
        own_head=not is_targets(state[HEAD], target_state[HEAD]),
        entry_bias=type(config.entry) is Narrow and bias is not None and bool(bias.any()),
        **target_facts(target.config, architectures[0]),
    )


def _check_rounding(
    checkpoint: Checkpoint, drafter: Drafter, target: Target, subject: Subject, chosen: Format
) -> None:
    """Raise ValueError unless a quantized checkpoint's matrices are within half a step of the drafter's, everything
    else equal to the last bit, and the imported drafter what the file's numbers stand for."""
    plain = chosen.tensors(drafter, subject)
    faults = rounding_faults(plain, load_file(Path(checkpoint.where) / chosen.weights_file))
    imported = chosen.tensors(import_checkpoint(checkpoint, target), subject)
    faults += [
        f"{name} is imported otherwise than it stands in the file"
        for name, value in imported.items()
        if not same_numbers(value, checkpoint.tensors[str(normalize_name(name))])
    ]
    if faults:
        raise ValueError(f"{checkpoint.where}: {faults[0]}: nothing was exported")


def _verify(
    directory: Path, drafter: Drafter, target: Target, subject: Subject, chosen: Format
) -> None:
    """Read the checkpoint back as a stranger's, and compare it with the drafter: to the last bit, or its matrices to
    half a step if they are quantized."""
    checkpoint = read_checkpoint(directory)
    lost = contradictions(subject.config, config_of_checkpoint(checkpoint, target))
    if lost:
        raise NotServable(
            f"the checkpoint does not say all of the drafter: {', '.join(lost)} read back otherwise"
        )
    if checkpoint.eight_bits:
        _check_rounding(checkpoint, drafter, target, subject, chosen)
        return
    state = drafter.state_dict()
    target_state = _weights(target)
    for name, value in import_checkpoint(checkpoint, target).state_dict().items():
        wanted = state[name]
        if name in subject.shared and name not in checkpoint.tensors:
            wanted = target_state[name].to(wanted.dtype)
        if not torch.equal(value, wanted.cpu()) or value.dtype != wanted.dtype:
            raise ValueError(
                f"{directory}: {name} reads back otherwise than it was written: nothing was exported"
            )


def is_targets(weight: Tensor, target_weight: Tensor) -> bool:
    """Return whether a drafter's weight is the target's, though one of the two may be rounded to another dtype.

    A float32 checkpoint loaded in bfloat16 is the same target. A drafter copies what it was trained with, and may be
    stored wider or exported with the target in another dtype. Trained weights are not such roundings everywhere.
    """
    if weight.shape != target_weight.shape:
        return False
    if _rounding(weight, target_weight) is not None:
        return True
    return same_numbers(weight.to(target_weight.dtype), target_weight)


def warn_if_rounded(drafter: Drafter, target: Target, subject: Subject) -> None:
    """Warn of weights that are left to the target and rounded in the drafter, which trained with the rounded ones."""
    state = drafter.state_dict()
    target_state = _weights(target)
    rounded = []
    for name in subject.shared:
        dtype = _rounding(state[name], target_state[name])
        if dtype not in (None, target_state[name].dtype):
            rounded.append(f"{name} to {str(dtype).removeprefix('torch.')}")
    if rounded:
        log.warning(
            "this drafter has weights of the target rounded, %s: an engine reads them as the target has them, and "
            "close drafts may fall otherwise than in training; specdec parity --target.dtype compares in that dtype",
            " and ".join(rounded),
        )


def warn_of_engines(subject: Subject, engine: str) -> None:
    """Warn of engines that would load the drafter and draft differently, by name.

    Args:
        engine: that the export is for.
    """
    if engine == VLLM and subject.method == "dspark":
        log.warning(
            "vLLM 0.32 drafts with DSpark on GPUs only, which we have not run: we read its source (docs/engines.md)"
        )
    elif engine == VLLM and subject.block and subject.config.num_layers > 1:
        log.warning(
            "the drafter has several layers, and vLLM 0.32's build for CPUs norms the context's keys of all by the "
            "first one's k_norm: it drafts otherwise; by its source its GPU builds do not: check yours with specdec "
            "parity --engine vllm"
        )
    groups: dict[str, list[str]] = {}
    for engine, names in dropped(subject).items():
        groups.setdefault(", ".join(names), []).append(engine)
    for switches, engines in groups.items():
        log.warning(
            "%s load this drafter but ignore %s, so they propose other tokens and report no error: serve it with "
            "another engine (docs/engines.md has the table), or train without",
            " and ".join(engines),
            switches,
        )


def _weights(target: Target) -> Weights:
    """Return the target's embedding and head under the drafter's names."""
    return {EMBEDDING: target.embedding_weight().cpu(), HEAD: target.head_weight().cpu()}


def _rounding(weight: Tensor, target_weight: Tensor) -> torch.dtype | None:
    """Return the dtype to which the target's weight was rounded, its own if it was not, None if the two differ."""
    for dtype in (target_weight.dtype, *ROUNDED):
        if same_numbers(weight, target_weight.to(dtype)):
            return dtype
    return None
