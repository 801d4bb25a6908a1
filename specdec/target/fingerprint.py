"""Is this the target that the drafter was trained for? A hash of configuration and weights that costs no wait."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

SAMPLES = 1024  # values hashed per tensor
# fields that say where, when and how a model was stored or is run, not what it is
_INCIDENTAL = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}


def fingerprint(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, of a configuration and of tensors: names, shapes and values, these in bfloat16.

    So a model loaded in float32 and in bfloat16 is one model. Of the values it hashes ``SAMPLES`` evenly spaced
    ones, and the exact sum of all their bit patterns. The sum runs at memory speed on any device and does not depend
    on the order of addition; it changes with any single value, while the samples tell permutations and
    rearrangements apart. This is a check against mistakes, not forgery.
    """
    digest = hashlib.sha256(json.dumps(_essence(config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            values = tensor.detach()
            bits = _bits(values.to(torch.bfloat16) if values.is_floating_point() else values)
            places = torch.linspace(0, bits.numel() - 1, min(SAMPLES, bits.numel()), dtype=torch.float64)
            sample = bits[places.long().to(bits.device)]
            digest.update(sample.cpu().numpy().tobytes())
            digest.update(str(bits.sum(dtype=torch.int64).item()).encode())
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    width = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return tensor.contiguous().flatten().view(integer)


def _essence(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(k): _essence(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if k not in _INCIDENTAL and "attn_implementation" not in k}
    if isinstance(value, list | tuple):
        return [_essence(v) for v in value]
    return value
