"""What a target is: one identity of everything that decides its numbers, which all who compare targets ask.

An identity is JSON-ready. Its ``fingerprint`` is of the configuration and all weights, ``parts`` of the configuration
and embedding, final norm and head alone. Both are of weights in bfloat16, so that a model loaded in float32 and in
bfloat16 is one model. ``exact`` and ``exact_parts`` are of the weights' own bits, and count between models of one
``dtype``. ``tokenizer`` is of what makes tokens of texts, the chat template included. What an identity does not hold,
or holds as None, is unknown, and says nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SAMPLES = 1024  # values hashed per tensor
# values summed at once, which torch makes eight bytes wide for it: on a CPU they stay in its cache
SUMMED = 2**22
SUMMED_ON_CPU = 2**17
IDENTIFYING = ("fingerprint", "parts", "exact", "exact_parts", "dtype", "tokenizer")
"""The fields of an identity that are compared; the others say where it lies, and its sizes."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# fields that say where, when and how a model was stored or is run, not what it is
_INCIDENTAL = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
}

WEIGHTS = "weights or configuration"
PARTS = "embedding, final norm, head or configuration"
TOKENIZER = "tokenizer or chat template"

Identity = Mapping[str, Any]


class Digests(NamedTuple):
    """Of a configuration and tensors: SHA-256, in hexadecimal, of the values in bfloat16, and of their own bits."""

    fingerprint: str
    exact: str


def model_digests(config: dict[str, Any], tensors: dict[str, Tensor]) -> Digests:
    """Return the digests of a configuration and of tensors: names, shapes and values.

    Of the values it hashes ``SAMPLES`` evenly spaced ones, and the exact sum of all their bit patterns. The sums run at
    memory speed on any device and do not depend on the order of addition; they change with any single value, while
    the samples tell permutations and rearrangements apart. This is a check against mistakes, not forgery.
    """
    rounded = hashlib.sha256(json.dumps(_essence(config), sort_keys=True, default=str).encode())
    exact = rounded.copy()
    for name, tensor in sorted(tensors.items()):
        rounded.update(f"{name} {tuple(tensor.shape)}".encode())
        exact.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            flat = tensor.detach().flatten()
            sampled = flat[_places(flat)]
            rounded.update(_bits(_rounded(sampled)).cpu().numpy().tobytes())
            total = torch.zeros((), dtype=torch.int64, device=flat.device)
            for piece in _pieces(flat):
                total += _bits(_rounded(piece)).sum(dtype=torch.int64)
            rounded.update(str(total.item()).encode())
            exact.update(_bits(sampled).cpu().numpy().tobytes())
            if _rounded(sampled) is not sampled:
                total = _sum_of_words(flat)
            exact.update(str(total.item()).encode())
    return Digests(rounded.hexdigest(), exact.hexdigest())


def model_fingerprint(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return the digest of a configuration, and of tensors in bfloat16; see :func:`model_digests`."""
    return model_digests(config, tensors).fingerprint


def target_difference(one: Identity, other: Identity) -> str | None:
    """Return what differs between the targets of two identities, for a message; None if they are one target.

    All weights count, or where not both identities have these, those of embedding, final norm and head.
    """
    is_whole = one.get("fingerprint") and other.get("fingerprint")
    # which may be in the layers alone
    if not is_whole and one.get("adapter") != other.get("adapter"):
        return "adapter"
    rounded, exact = ("fingerprint", "exact") if is_whole else ("parts", "exact_parts")
    of_one_dtype = one.get("dtype") == other.get("dtype")
    if (
        one.get(rounded) is None
        or one.get(rounded) != other.get(rounded)
        or (of_one_dtype and _differ(exact, one, other))
    ):
        return WEIGHTS if is_whole else PARTS
    return TOKENIZER if _differ("tokenizer", one, other) else None


def same_target(one: Identity, other: Identity) -> bool:
    """Whether two identities are of one target."""
    return target_difference(one, other) is None


def whole_of(known: Identity, dtype: str) -> dict[str, Any]:
    """Return the digests of all weights that parts of a target take from the identity of the whole one.

    Args:
        dtype: of the parts; in another one the whole target's own bits are others.
    """
    exact = known.get("exact") if known.get("dtype") == dtype else None
    return {"fingerprint": known.get("fingerprint"), "exact": exact}


def distinct_targets(identities: Iterable[Identity]) -> list[Identity]:
    """Return the first identity of every target."""
    firsts: list[Identity] = []
    for identity in identities:
        if not any(same_target(identity, first) for first in firsts):
            firsts.append(identity)
    return firsts


def _differ(name: str, one: Identity, other: Identity) -> bool:
    """Whether both know a field, and not as the same."""
    return None not in (one.get(name), other.get(name)) and one[name] != other[name]


def _places(flat: Tensor) -> Tensor:
    """Return where the sampled values of a flat tensor stand."""
    count = min(SAMPLES, flat.numel())
    places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64)
    return places.long().to(flat.device)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """Return a flat tensor in pieces, each summed at once."""
    return flat.split(SUMMED_ON_CPU if flat.device.type == "cpu" else SUMMED)


def _rounded(values: Tensor) -> Tensor:
    """Return floats in bfloat16, and other numbers as they are."""
    return values.to(torch.bfloat16) if values.is_floating_point() else values


def _bits(values: Tensor) -> Tensor:
    """Return the bit patterns of numbers as integers."""
    return values.contiguous().view(INTEGERS[values.element_size()])


def _sum_of_words(flat: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of a flat tensor's bits as words of eight bytes, which torch sums where they lie.

    A single value that changes changes it.
    """
    bits = _bits(flat)
    per_word = 8 // bits.element_size()
    whole = len(bits) - len(bits) % per_word
    total = bits[whole:].sum(dtype=torch.int64)
    for piece in _pieces(bits[:whole]):
        aligned = piece if piece.storage_offset() % per_word == 0 else piece.clone()
        total += aligned.view(torch.int64).sum()
    return total


def _essence(value: Any) -> Any:
    """Return a configuration without what is incidental."""
    if isinstance(value, list | tuple):
        return [_essence(child) for child in value]
    if not isinstance(value, dict):
        return value
    fields = {str(key): _essence(child) for key, child in value.items()}
    return {
        key: child
        for key, child in fields.items()
        if key not in _INCIDENTAL and "attn_implementation" not in key
    }
