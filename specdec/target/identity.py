"""Which model a target is: a hash of its configuration and weights."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

SAMPLES = 1024  # values hashed per tensor
SUMMED = 2**22  # values summed at once: torch makes them eight bytes wide for it
# fields that say where, when and how a model was stored or is run, not what it is
_INCIDENTAL = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
}


def model_fingerprint(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, of a configuration and tensors: names, shapes and values in bfloat16.

    So a model loaded in float32 and in bfloat16 is one model. Of the values it hashes ``SAMPLES`` evenly spaced
    ones, and the exact sum of all their bit patterns. The sum runs at memory speed on any device and does not depend
    on the order of addition; it changes with any single value, while the samples tell permutations and
    rearrangements apart. This is a check against mistakes, not forgery.
    """
    digest = hashlib.sha256(json.dumps(_essence(config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            flat = tensor.detach().flatten()
            places = torch.linspace(
                0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64
            )
            digest.update(_bits(flat[places.long().to(flat.device)]).cpu().numpy().tobytes())
            total = torch.zeros((), dtype=torch.int64, device=flat.device)
            for piece in flat.split(SUMMED):
                total += _bits(piece).sum(dtype=torch.int64)
            digest.update(str(total.item()).encode())
    return digest.hexdigest()


def _bits(values: Tensor) -> Tensor:
    """Return the bit patterns of floats in bfloat16, and of other numbers as they are."""
    values = values.to(torch.bfloat16) if values.is_floating_point() else values.contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.element_size()])


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
