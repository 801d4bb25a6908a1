"""``import``: a drafter out of a checkpoint, whoever published it. Nothing in its files is run."""

import dataclasses
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.drafter import (
    Concat,
    Drafter,
    DrafterConfig,
    KVInjection,
    LastLayer,
    Narrow,
    Norms,
    PreNorm,
    Wide,
    save_drafter,
)
from specdec.drafter.io import FORMAT as DRAFTER
from specdec.export import boundaries, keys, mtp
from specdec.export import tensors as named
from specdec.export.checkpoint import (
    LATENT_DOWN,
    OURS,
    QUERIES,
    Checkpoint,
    fetch_checkpoint,
    read_checkpoint,
)
from specdec.export.formats import flat
from specdec.export.subject import HEAD
from specdec.export.summary import (
    SPECFORGE,
    checkpoint_layout,
    checkpoint_summary,
    misread_by_engines,
)
from specdec.export.tensors import Raw, Weights
from specdec.export.weights import BIAS, load_weights, read_vocabulary, tied_head
from specdec.target import Target, TargetSource
from specdec.target.identity import target_difference
from specdec.utils.files import claimed
from specdec.utils.numbers import MOST_LAYERS
from specdec.utils.text import nearest_name

log = logging.getLogger(__name__)

QUERY_BIAS = "layers.0.self_attn.q_proj.bias"
OUTPUT_BIAS = "layers.0.self_attn.o_proj.bias"
QUERY_NORM = "layers.0.self_attn.q_norm.weight"
FC = "fc.weight"
CONTEXT = "hidden_norm.weight"  # only in block drafters, where every layer reads what it norms
MARKOV = "markov_head.markov_w1.weight"  # only in DSpark
EAGLE1 = Norms(embed=False, hidden=False, output=False)


def import_command(
    *,
    checkpoint: str,
    out: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    revision: str | None = None,
    aux_layers: list[int] | None = None,
) -> None:
    """A published EAGLE checkpoint, whoever wrote it, or the module of multi-token prediction (MTP) that a target's own
    checkpoint has, as a drafter to evaluate and to train on; prints its directory.

    Example: specdec import --checkpoint AngelSlim/Qwen3-4B_eagle3 --target Qwen/Qwen3-4B --out drafters/angelslim

    Args:
        checkpoint: a directory or a Hub id; the target's own for its module
        out: the drafter's directory, not there yet
        target: the model that it drafts for
        revision: a branch, tag or commit of the checkpoint on the Hub
        aux_layers: boundaries that it was trained with, where its config does not say so rightly

    Raises:
        ValueError: an argument is wrong, or the checkpoint is no drafter of this target.
    """
    with claimed(Path(out)):  # before anything is fetched
        save_drafter(import_drafter(checkpoint, target, revision, aux_layers), out, replace=True)
    log.info(
        "wrote the drafter; measure it with: specdec evaluate --target %s --drafter %s",
        target.source,
        out,
    )
    sys.stdout.write(f"{out}\n")


def import_drafter(
    checkpoint: str | Path,
    target: Target | TargetSource,
    revision: str | None = None,
    aux_layers: Sequence[int] | None = None,
) -> Drafter:
    """Return a published EAGLE checkpoint as a drafter, in the dtype of its weights; see :func:`import_command`.

    Raises:
        ValueError: there is none, or it is no drafter of this target.
    """
    log.info("reading the checkpoint %s", checkpoint)
    directory = fetch_checkpoint(str(checkpoint), revision)
    family = mtp.family_of(directory)
    if family is not None:
        if aux_layers:
            raise ValueError(
                f"{checkpoint}: a target's own module reads the target's last state: leave out --aux_layers"
            )
        return mtp.read_module(directory, family, _loaded(target))
    contents = read_checkpoint(directory)
    loaded = _loaded(target)
    drafter = import_checkpoint(contents, loaded, tuple(aux_layers) if aux_layers else None)
    config = drafter.config
    if contents.ours is not None:
        trained_for = DrafterConfig.from_json(contents.ours.get("drafter"), OURS).target
        if difference := target_difference(loaded.identity, trained_for):
            log.warning(
                "%s was trained for another target (%s) of the same shape: its %s differs; the drafter is imported as "
                "one of %s", checkpoint, trained_for.get("source"), difference, loaded.source,
            )  # fmt: skip
    if (
        checkpoint_layout(contents) == SPECFORGE
        and keys.config_to_keys(config, "eagle3")["norm_output"]
    ):
        log.warning(
            "SpecForge trained norm_output with the raw state fed back until its pull request 879 (September 2026): a "
            "checkpoint of before drafts otherwise here, and in every engine, than it was trained"
        )
    for line in checkpoint_summary(contents, config, aux_layers_given=bool(aux_layers)):
        log.info("%s", line)
    for line in misread_by_engines(contents, config, loaded):
        log.warning("%s", line)
    return drafter


def _loaded(target: Target | TargetSource) -> Target:
    return target if isinstance(target, Target) else target.load()


def import_checkpoint(
    checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None
) -> Drafter:
    """Return the drafter that a checkpoint describes, in the dtype of its weights.

    What a checkpoint leaves to the target, embedding or head, is taken from it.

    Args:
        aux_layers: boundaries that the checkpoint was trained with, where its config does not say so rightly.

    Raises:
        ValueError: the checkpoint is not a drafter of this target, or has parts that drafters here have not.
    """
    try:
        config = config_of_checkpoint(checkpoint, target, aux_layers)
        if checkpoint.ours is not None:
            stored = DrafterConfig.from_json(checkpoint.ours.get("drafter"), OURS)
            if differing := contradictions(stored, config):
                raise ValueError(
                    f"{OURS} and config.json differ in {', '.join(differing)}: undo the change, or remove {OURS} to go "
                    "by config.json alone"
                )
            config = stored
            if not target.is_of(stored.target):  # wherever the target lies now
                config = dataclasses.replace(stored, target=dict(target.identity))
        tensors = checkpoint.tensors
        head = tied_head(checkpoint, target) if isinstance(config.entry, Wide) else None
        if head is not None:
            tensors = {**tensors, HEAD: head}
        ids_D, order_D = read_vocabulary(tensors, config)
        return load_weights(config, ids_D, tensors, order_D, target)
    except ValueError as error:
        raise ValueError(f"{checkpoint.where}: {error}") from error


def contradictions(stored: DrafterConfig, read: DrafterConfig) -> list[str]:
    """Return the fields in which our own config differs from what the checkpoint's says.

    Some fields are not compared: no checkpoint tells whose head it was trained with, nor a zero bias from none, and
    the target is the one at hand.
    """
    ignored = {"head", "target"}
    if isinstance(stored.entry, Narrow) and isinstance(read.entry, Narrow):
        ignored.add("entry")
    if stored.attention_bias == "qkv" and read.attention_bias is True:
        ignored.add("attention_bias")
    read_fields = read.to_json()
    return [
        name
        for name, value in stored.to_json().items()
        if name not in ignored and value != read_fields[name]
    ]


def config_of_checkpoint(
    checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None
) -> DrafterConfig:
    """Return the drafter's config that config.json, the tensors' names and shapes and the target give.

    Args:
        aux_layers: boundaries that the checkpoint was trained with; the config's are not read then.

    Raises:
        ValueError: they give none.
    """
    if checkpoint.raw.get("format") == DRAFTER:
        raise ValueError(
            "no drafter as others publish them, but specdec's own, which needs no import"
        )
    design = _Design(checkpoint, target)
    raw = design.raw
    tensors = checkpoint.tensors
    fields: Raw = {"recurrence": PreNorm()} | keys.keys_to_fields(raw, design.method)
    masked = named.MASK in tensors
    if not design.block and masked != fields["recurrence"].drafting().one_call:
        lacks = "mask_token_id in config.json" if masked else "the tensor mask_hidden"
        raise ValueError(
            f"a parallel drafter (P-EAGLE) has a mask token and a learned state: it lacks {lacks}"
        )
    fields["attention_bias"] = _biases(tensors, fields["attention_bias"])
    norms = EAGLE1 if design.method == "eagle" else Norms(embed=design.method == "eagle3")
    changed_norms = fields.pop("norms") | {"query_key": QUERY_NORM in tensors}
    fields["norms"] = dataclasses.replace(norms, **changed_norms)
    fields |= design.entry_and_head(fields) | design.fusion(aux_layers)
    for field, of_target in (
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        if fields[field] != of_target:
            raise ValueError(
                f"it is for a target of {field} {fields[field]}, {target.source} has {of_target}"
            )
    config = DrafterConfig(
        **fields, num_target_layers=target.num_layers, target=dict(target.identity)
    )
    return keys.reaching(config, target.config.max_position_embeddings)


class _Design:
    """The design of a drafter, as far as a checkpoint's tensors show it."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        """Look at names and shapes; ValueError if the config contradicts them."""
        self.checkpoint = checkpoint
        self.target = target
        self.raw = raw = {**flat(checkpoint.raw)}
        tensors = checkpoint.tensors
        if (LATENT_DOWN in tensors) != (raw.get("kv_lora_rank") is not None):
            lacks = "kv_lora_rank in config.json" if LATENT_DOWN in tensors else LATENT_DOWN
            raise ValueError(
                f"of a drafter with multi-head latent attention (MLA) it lacks {lacks}"
            )
        reads = (
            LATENT_DOWN if LATENT_DOWN in tensors else QUERIES
        )  # what reads the first layer's input
        says_last_state = boundaries.reads_last_state(raw)
        # EAGLE-3 without fc reads the target's last state.
        self.last_state = says_last_state and FC not in tensors
        _check_matrices(tensors, (reads,) if self.last_state else (reads, FC))
        input_size = tensors[reads].shape[1]
        self.hidden_size = input_size // 2 if self.last_state else len(tensors[FC])
        wide = input_size == 2 * self.hidden_size
        if wide and not self.last_state and says_last_state:
            raise ValueError(
                "use_aux_hidden_state is false and the file has fc.weight, which engines drop: remove one"
            )
        self.method = "eagle3" if wide or self.last_state else "eagle"
        self.block = CONTEXT in tensors
        if self.block:
            self._check_block()
            self.method = "dspark" if MARKOV in tensors else "dflash"
        raw["num_hidden_layers"] = _layers(tensors, raw.get("num_hidden_layers"))

    def _check_block(self) -> None:
        """Raise ValueError for a block drafter of another target, or with a mask that has a separate embedding."""
        if (Path(self.checkpoint.where) / "mask_embedding.pt").exists():
            raise ValueError(
                "it has a mask_embedding.pt, a mask with a separate embedding, which drafters here do not have"
            )
        target = self.target
        layers = self.raw.get("num_target_layers", target.num_layers)
        if layers != target.num_layers:
            raise ValueError(
                f"it is for a target of {layers!r:.60} layers, {target.source} has {target.num_layers}"
            )

    def entry_and_head(self, fields: Raw) -> Raw:
        """Return the fields that say how the drafter reads its input and whose head it has."""
        tensors = self.checkpoint.tensors
        block = self.block
        if self.method == "eagle":
            return {
                "entry": Narrow(bias=BIAS in tensors),
                "head": "target",
                "target_hidden_size": self.hidden_size,
                "draft_vocab_size": fields["vocab_size"],
            }
        shared = HEAD not in tensors and fields["draft_vocab_size"] == fields["vocab_size"]
        shared = shared and (block or tied_head(self.checkpoint, self.target) is None)
        return {
            "entry": KVInjection() if block else Wide(),
            "head": "target" if shared else "own",
        }

    def fusion(self, aux_layers: tuple[int, ...] | None) -> Raw:
        """Return the fields that say which of the target's states the drafter reads."""
        layers = self.target.num_layers
        if self.last_state or self.method == "eagle":
            if aux_layers:
                raise ValueError(
                    "a drafter without fused states reads the target's last state: leave out --aux_layers"
                )
            return {"fusion": LastLayer(), "aux_layers": (layers,)}
        # The config's boundaries are not even read if the caller names some: they may be what is wrong.
        if aux_layers is None and self.block:
            aux_layers = boundaries.block_boundaries(self.raw)
        elif aux_layers is None:
            checkpoint = self.checkpoint
            one_numbering = (
                checkpoint.ours is not None or "speculators_model_type" in checkpoint.raw
            )
            aux_layers = boundaries.aux_boundaries(self.raw, layers, one_numbering)
        return {"fusion": Concat(), "aux_layers": aux_layers}


def _check_matrices(tensors: Weights, wanted: Sequence[str]) -> None:
    """Raise ValueError unless the file has these matrices; the message names one of a similar name."""
    lacking = [name for name in wanted if name not in tensors or tensors[name].ndim != 2]
    if lacking:
        also = " (or midlayer.*)" if lacking[0] == QUERIES else ""
        near = nearest_name(lacking[0], tensors)
        raise ValueError(
            f"no drafter: it lacks a matrix {lacking[0]}{also}; {near}".removesuffix("; ")
        )


def _layers(tensors: Weights, stated: Any) -> Any:
    """Return how many layers a checkpoint has: what its config says, or fewer where the file's are numbered 0..n-1.

    EAGLE's authors kept the target's 40 in the config of a drafter of one layer.
    """
    numbers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    if not numbers or numbers != set(range(len(numbers))):
        return stated
    too_many = type(stated) is int and len(numbers) < stated <= MOST_LAYERS
    return len(numbers) if stated is None or too_many else stated


def _biases(tensors: Weights, stated: Any) -> Any:
    """Return ``attention_bias``, which ``stated`` decides except for the bias on the output.

    Raises:
        ValueError: the file has biases that the config does not switch on.
    """
    if stated is False and QUERY_BIAS in tensors:
        raise ValueError(
            f"the file has {QUERY_BIAS}, and neither attention_bias nor qkv_bias is true in config.json: engines would "
            "drop it without a word; write qkv_bias: true there if the drafter was trained with it"
        )
    if stated is True and QUERY_BIAS in tensors and OUTPUT_BIAS not in tensors:
        return "qkv"
    return stated
