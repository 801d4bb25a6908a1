"""``import``: a drafter out of a checkpoint, whoever published it.

Legend: D draft vocabulary, V target vocabulary.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafter import Concat, Drafter, DrafterConfig, LastLayer, Narrow, Norms, PreNorm, Wide, load, save
from specdec.drafter.io import FORMAT as DRAFTER
from specdec.export import keys
from specdec.export import tensors as named
from specdec.export.checkpoint import OURS, Checkpoint, fetch, read_checkpoint
from specdec.export.formats import VOCABULARY, format_of
from specdec.export.switches import EMBEDDING, HEAD
from specdec.target import Target, TargetSource

BIAS = "fc.bias"
NEVER = 16  # draft tokens of which some two are neighbours in the target's vocabulary
EAGLE1 = Norms(embed=False, hidden=False, output=False)


def import_command(
    *,
    checkpoint: str,
    out: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    revision: str | None = None,
    aux_layers: list[int] | None = None,
    force: bool = False,
) -> None:
    """A published EAGLE checkpoint, whoever wrote it, as a drafter to evaluate and to train on; prints its directory.

    Example: specdec import --checkpoint AngelSlim/Qwen3-4B_eagle3 --target Qwen/Qwen3-4B --out drafters/angelslim

    Args:
        checkpoint: a directory or a Hub id
        out: the drafter's directory, not there yet
        target: the model that it drafts for
        revision: a branch, tag or commit of the checkpoint on the Hub
        aux_layers: boundaries that it was trained with, where its config does not say so rightly
        force: replace a drafter that is there

    Raises:
        ValueError: an argument is wrong, or the checkpoint is no drafter of this target.
    """
    if Path(out).exists():
        if not force:
            raise ValueError(f"{out} exists already: choose another place, remove it first, or give --force")
        load(out)  # nothing else is replaced
    read = read_checkpoint(fetch(checkpoint, revision))
    save(import_checkpoint(read, target.load(), tuple(aux_layers) if aux_layers else None), out, replace=force)
    sys.stdout.write(f"{out}\n")


def import_checkpoint(checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None) -> Drafter:
    """The drafter that a checkpoint describes, in the dtype of its weights.

    What a checkpoint leaves to the target, embedding or head, is taken from it.

    Args:
        aux_layers: boundaries that the checkpoint was trained with, where its config does not say so rightly.

    Raises:
        ValueError: the checkpoint is not an EAGLE drafter of this target, or has parts that drafters here have not.
    """
    try:
        finite(checkpoint.tensors)
        config = _config(checkpoint, target, aux_layers)
        ids_D, order_D = _vocabulary(checkpoint.tensors, config)
        return _filled(Drafter(config, ids_D), checkpoint.tensors, order_D, target)
    except ValueError as error:
        raise ValueError(f"{checkpoint.where}: {error}") from error


def finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight is NaN or infinite."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"the weights {name} are not all finite: such a drafter accepts nothing")


def _config(checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None) -> DrafterConfig:
    read = described(checkpoint, target, aux_layers)
    if checkpoint.ours is None:
        return read
    stored = DrafterConfig.from_json(checkpoint.ours.get("drafter"), OURS)
    if differing := contradictions(stored, read):
        raise ValueError(
            f"{OURS} and config.json differ in {', '.join(differing)}: undo the change, or remove {OURS} to go by "
            "config.json alone"
        )
    same = stored.target.get("fingerprint") == target.identity["fingerprint"]  # wherever it lies now
    return stored if same else dataclasses.replace(stored, target=dict(target.identity))


def contradictions(stored: DrafterConfig, read: DrafterConfig) -> list[str]:
    """Fields in which our own config differs from what the checkpoint's says.

    No checkpoint tells whose head it was trained with, nor a zero bias from none; the target is whichever is given.
    """
    one, two = (json.loads(json.dumps(config.to_json())) for config in (stored, read))
    both_narrow = isinstance(stored.entry, Narrow) and isinstance(read.entry, Narrow)
    silent = {"head", "target"} | ({"entry"} if both_narrow else set())
    return [name for name in one if name not in silent and one[name] != two[name]]


def described(checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None) -> DrafterConfig:
    """The drafter's config as config.json, the tensors' names and the target tell it.

    Raises:
        ValueError: they do not tell an EAGLE drafter of this target.
    """
    tensors = checkpoint.tensors
    if checkpoint.raw.get("format") == DRAFTER:
        raise ValueError("no EAGLE drafter as others publish them, but specdec's own, which needs no import")
    flat = format_of(checkpoint.raw).flat(checkpoint.raw)
    queries = tensors.get("layers.0.self_attn.q_proj.weight")
    if queries is None or "fc.weight" not in tensors:
        raise ValueError("no EAGLE drafter: it lacks layers.0.self_attn.q_proj.weight (or midlayer.*) or fc.weight")
    for name in ("layers.0.self_attn.q_proj.weight", "fc.weight"):
        if tensors[name].ndim != 2:
            raise ValueError(f"{name} is {list(tensors[name].shape)}, wanted a matrix")
    hidden = len(tensors["fc.weight"])
    method = "eagle3" if queries.shape[1] == 2 * hidden else "eagle"
    found = keys.read(flat, method)
    # before anything of the config's size is made
    last, down = f"layers.{found['num_layers'] - 1}.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight"
    if last not in tensors:
        raise ValueError(f"it lacks {last}; the config says {found['num_layers']} layers")
    size = [found["hidden_size"], found["intermediate_size"]]
    if down in tensors and list(tensors[down].shape) != size:
        raise ValueError(f"{down} is {list(tensors[down].shape)}, the config says {size}")
    whole = HEAD not in tensors and found.get("draft_vocab_size") == found["vocab_size"]
    base: dict[str, Any] = {"recurrence": PreNorm(), "head": "target" if whole else "own"}
    changes = found.pop("norms") | {"query_key": "layers.0.self_attn.q_norm.weight" in tensors}
    if method == "eagle":
        found |= {"aux_layers": (target.num_layers,), "draft_vocab_size": found["vocab_size"], "head": "target"}
        found |= {"fusion": LastLayer(), "entry": Narrow(bias=BIAS in tensors), "target_hidden_size": hidden}
    else:
        found["aux_layers"] = aux_layers or keys.boundaries(flat, target.num_layers)
        found |= {"fusion": Concat(), "entry": Wide()}
    found["norms"] = dataclasses.replace(EAGLE1 if method == "eagle" else Norms(), **changes)
    for field, theirs in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if found[field] != theirs:
            raise ValueError(f"it is for a target of {field} {found[field]}, {target.source} has {theirs}")
    return DrafterConfig(**{**base, **found}, num_target_layers=target.num_layers, target=dict(target.identity))


def _vocabulary(tensors: Mapping[str, Tensor], config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """The draft vocabulary ascending, and where its tokens stand in the checkpoint: some order them by frequency."""
    D, V = config.draft_vocab_size, config.vocab_size
    offsets_D = tensors.get(named.DRAFT_TO_TARGET)
    if offsets_D is None:
        if D < V:
            raise ValueError(f"it lacks d2t, which says what its {D} draft tokens are of {V}")
        offsets_D = torch.zeros(D, dtype=torch.int64)
    if offsets_D.shape != (D,):
        raise ValueError(f"d2t has shape {list(offsets_D.shape)}, the config says {D} draft tokens")
    if offsets_D.is_floating_point() or offsets_D.is_complex() or offsets_D.dtype == torch.bool:
        raise ValueError(f"d2t is {offsets_D.dtype}, wanted integers")
    offsets_D = offsets_D.to(torch.int64)
    # offsets stand still wherever two tokens of the target follow each other, which some always do; ids never do
    if D >= NEVER and D < V and bool((offsets_D.diff() > 0).all()):
        raise ValueError("d2t rises with every token, as target ids do: it must hold offsets, target id less draft id")
    ids_D, order_D = (torch.arange(D) + offsets_D).sort()
    if bool((ids_D.diff() <= 0).any()) or int(ids_D[0]) < 0 or int(ids_D[-1]) >= V:
        raise ValueError(f"d2t must hold offsets to tokens of their own in 0..{V - 1}, target id less draft id")
    members_V = tensors.get(named.TARGET_TO_DRAFT)
    if members_V is not None and not torch.equal(members_V.bool().nonzero()[:, 0], ids_D):
        raise ValueError("t2d and d2t name different tokens")
    return ids_D, order_D


def _filled(drafter: Drafter, tensors: Mapping[str, Tensor], order_D: Tensor, target: Target) -> Drafter:
    config = drafter.config
    weights = {name: value for name, value in tensors.items() if name not in named.MAPS}
    dtype = _dtype(weights)
    ordered = HEAD in weights
    if not ordered and config.draft_vocab_size == config.vocab_size and config.hidden_size == target.hidden_size:
        weights[HEAD] = target.head_weight()
    if EMBEDDING not in weights and config.hidden_size == target.hidden_size:
        weights[EMBEDDING] = target.embedding_weight()
    _drop_doubles(weights, config)
    state = {name: value for name, value in drafter.state_dict().items() if name != VOCABULARY}
    rows = named.table(config)
    shapes = named.published({name: value.to("meta") for name, value in state.items()}, config)
    wanted = {str(named.translate(name, rows)): list(value.shape) for name, value in shapes.items()}
    if unknown := sorted(set(weights) - set(wanted)):
        raise ValueError(f"it has weights that no drafter here has: {', '.join(unknown[:6])}")
    if missing := sorted(set(wanted) - set(weights)):
        raise ValueError(f"it lacks {', '.join(missing[:6])}")
    for name, value in weights.items():
        if list(value.shape) != wanted[name]:
            raise ValueError(f"{name} is {list(value.shape)}, the config says {wanted[name]}")
    if ordered:
        weights[HEAD] = weights[HEAD][order_D]
    back = {theirs: ours for ours, theirs in rows.items()}
    published = {str(named.translate(name, back)): value.to("cpu", dtype) for name, value in weights.items()}
    made = named.merged(state, published, config)
    drafter.to(dtype).load_state_dict(made | {VOCABULARY: drafter.vocab.target_ids_D})
    return drafter.eval().requires_grad_(False)


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The widest of the floating ones."""
    dtypes = {value.dtype for value in weights.values()}
    if odd := [dtype for dtype in dtypes if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]:
        raise ValueError(f"weights of {odd[0]}: only unquantised ones can be read")
    widest = torch.float16 if dtypes == {torch.float16} else torch.bfloat16
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _drop_doubles(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    """What SGLang needs and says nothing: a zero bias, a further layer's input norm under its second name."""
    for i in range(1, config.num_layers):
        first, second = f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"
        if second in weights:
            double = weights.pop(second)
            if first in weights and not torch.equal(weights[first], double):
                raise ValueError(f"{second} and {first} differ: engines take one or the other")
            weights[first] = double
    if config.entry == Narrow(bias=False) and BIAS in weights and not weights[BIAS].any():
        del weights[BIAS]
