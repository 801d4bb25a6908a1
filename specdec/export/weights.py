"""The weights of a published checkpoint, as those of a drafter.

Legend: D draft vocabulary, V target vocabulary.
"""

import functools

import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, Narrow
from specdec.drafter.io import WHOLE, check_finite
from specdec.drafter.model import skeleton_of
from specdec.export import tensors as named
from specdec.export.checkpoint import Checkpoint
from specdec.export.formats import VOCABULARY, flat
from specdec.export.subject import EMBEDDING, HEAD
from specdec.export.tensors import Weights
from specdec.target import Target
from specdec.utils.text import how_many, tensor_fault

BIAS = "fc.bias"
# Among this many draft tokens some two always stand side by side in the target's vocabulary.
ALWAYS_NEIGHBORS = 16


def load_weights(
    config: DrafterConfig,
    ids_D: Tensor,
    tensors: Weights,
    order_D: Tensor,
    target: Target,
) -> Drafter:
    """Return a drafter with the checkpoint's weights, in a dtype that holds all of them.

    The drafter is built once the shapes fit.

    Args:
        ids_D: the draft vocabulary as target ids, ascending.
        tensors: the checkpoint's tensors, by name.
        order_D: row of the checkpoint's head for every draft token.
    """
    weights = {name: value for name, value in tensors.items() if name not in named.MAPS}
    dtypes = {value.dtype for value in weights.values()}
    if odd := dtypes - {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise ValueError(f"weights of {odd.pop()}: only unquantized ones can be read")
    own_head = HEAD in weights
    if config.hidden_size == target.hidden_size:
        weights.setdefault(EMBEDDING, target.embedding_weight())
        if config.draft_vocab_size == config.vocab_size:
            weights.setdefault(HEAD, target.head_weight())
    _drop_doubles(weights, config)
    if named.MASK in weights:  # P-EAGLE's learned states are published flat
        mask = weights[named.MASK]
        if mask.numel() % target.hidden_size:
            raise ValueError(
                f"mask_hidden has {mask.numel()} numbers, no multiple of {target.hidden_size}"
            )
        weights[named.MASK] = mask.reshape(-1, target.hidden_size)
    state = skeleton_of(config).state_dict()
    del state[VOCABULARY]
    checkpoint_name = named.name_table(config)
    wanted = {
        str(named.translate(name, checkpoint_name)): list(value.shape)
        for name, value in named.to_published(state, config).items()
    }
    if fault := tensor_fault({name: value.shape for name, value in weights.items()}, wanted):
        raise ValueError(fault)
    check_finite(weights)
    if own_head:
        weights[HEAD] = weights[HEAD][order_D]
    published_name = {name: module for module, name in checkpoint_name.items()}
    dtype = functools.reduce(torch.promote_types, dtypes)
    published = {
        str(named.translate(name, published_name)): value.to("cpu", dtype)
        for name, value in weights.items()
    }
    drafter = Drafter(config, ids_D).to(dtype)
    state = named.from_published(state, published, config)
    drafter.load_state_dict(state | {VOCABULARY: drafter.vocab.target_ids_D})
    return drafter.eval().requires_grad_(False)


def _drop_doubles(weights: Weights, config: DrafterConfig) -> None:
    """Remove what engines need and what carries nothing: zero biases, and the second name of a further layer's input
    norm."""
    for i in range(1, config.num_layers):
        first = f"layers.{i}.input_layernorm.weight"
        second = f"layers.{i}.hidden_norm.weight"
        if second in weights:
            double = weights.pop(second)
            if not torch.equal(weights.setdefault(first, double).double(), double.double()):
                raise ValueError(f"{second} and {first} differ: engines take one or the other")
    zeros = [BIAS] if config.entry == Narrow(bias=False) else []
    if config.attention_bias == "qkv":
        zeros += [f"layers.{i}.self_attn.o_proj.bias" for i in range(config.num_layers)]
    for name in zeros:
        if name in weights and not weights[name].any():
            del weights[name]


def read_vocabulary(tensors: Weights, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Return the draft vocabulary of a checkpoint, which may order its tokens by frequency.

    Returns:
        Target ids, ascending, and for each of them its row in the checkpoint's head: both (D,), int64.

    Raises:
        ValueError: d2t or t2d is missing, of another shape or dtype, or names no draft vocabulary.
    """
    V = config.vocab_size
    D = config.draft_vocab_size
    offsets_D = tensors.get(named.DRAFT_TO_TARGET)
    if offsets_D is None:
        if D < V:
            raise ValueError(
                f"it lacks d2t, which says what its {how_many(D, 'draft token')} are of {V:,}"
            )
        offsets_D = torch.zeros(D, dtype=torch.int64)
    if offsets_D.shape != (D,):
        raise ValueError(
            f"d2t has shape {list(offsets_D.shape)}, the config says {how_many(D, 'draft token')}"
        )
    if offsets_D.dtype not in WHOLE or offsets_D.dtype == torch.bool:
        raise ValueError(f"d2t is {offsets_D.dtype}, wanted integers")
    offsets_D = offsets_D.long()
    # Two neighbors in the target's vocabulary have equal offsets, so offsets never rise everywhere, as ids would.
    if ALWAYS_NEIGHBORS <= D < V and (offsets_D.diff() > 0).all():
        raise ValueError(
            "d2t rises with every token, as target ids do: it must hold offsets, target id less draft id"
        )
    ids_D, order_D = (torch.arange(D) + offsets_D).sort()
    if (ids_D.diff() <= 0).any() or ids_D[0] < 0 or ids_D[-1] >= V:
        raise ValueError(
            f"d2t must hold offsets to distinct tokens in 0..{V - 1}, target id less draft id"
        )
    members_V = tensors.get(named.TARGET_TO_DRAFT)
    if members_V is None:
        return ids_D, order_D
    if members_V.shape != (V,) or members_V.dtype not in WHOLE:
        raise ValueError(
            f"t2d is {members_V.dtype} of shape {list(members_V.shape)}, wanted bool of [{V}]"
        )
    if not torch.equal(members_V.bool().nonzero()[:, 0], ids_D):
        raise ValueError("t2d and d2t name different tokens")
    return ids_D, order_D


def tied_head(checkpoint: Checkpoint, target: Target) -> Tensor | None:
    """Return the embedding of an EAGLE-3 checkpoint that has no head and says that the two are tied.

    None if nothing is tied, or the embedding equals the target's head.

    Raises:
        ValueError: the draft vocabulary is smaller than the embedding.
    """
    config = flat(checkpoint.raw)
    if config.get("tie_word_embeddings") is not True or HEAD in checkpoint.tensors:
        return None
    size = config.get("draft_vocab_size")
    if size not in (None, config.get("vocab_size")):
        raise ValueError(
            f"tie_word_embeddings is true and there is no {HEAD}: an embedding of {config.get('vocab_size')} tokens is "
            f"no head over {size}, and engines would draft from an untrained one"
        )
    embedding = checkpoint.tensors.get(EMBEDDING, target.embedding_weight().detach().cpu())
    return None if same_numbers(embedding, target.head_weight()) else embedding


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal number by number, whatever their dtypes and devices."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.shape == b.shape and torch.equal(a.to("cpu", dtype), b.to("cpu", dtype))
