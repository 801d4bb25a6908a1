"""The matrices that vLLM 0.32.0 reads in eight bits from a drafter's directory, after its documented semantics.

Written apart from the drafter and from the exporter; see :mod:`specdec.diagnostics.parity_reference`. vLLM gives every
linear layer of a drafter the scheme of the drafter's own ``quantization_config``, unless ``ignore`` names the layer as
vLLM has it: queries, keys and values are one layer, gate and up another, and names begin with ``model.``. Head,
embedding and norms are no linear layers. A layer with a scheme takes eight-bit numbers and a scale for each row; one
without takes numbers for weights, whatever they are.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.diagnostics.parity_settings import Misread, Raw

# The engine's layers, by what a file calls their matrices.
LAYERS = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "o_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj", "fc": "fc",
}  # fmt: skip
# The stored dtype by the config's type of weights.
STORED = {"int": torch.int8, "float": torch.float8_e4m3fn}
FORMATS = {"int": "int-quantized", "float": "float-quantized"}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST_SCALE = 1 / (448 * 512)  # of an activation in FP8
Matrices = dict[str, Tensor]


def read_quantized(
    raw: Raw, tensors: Mapping[str, Tensor], layers: int
) -> tuple[Matrices, dict[str, torch.dtype]]:
    """Return the tensors with plain matrices, numbers times scales in float32, and how the engine rounds activations.

    Args:
        raw: ``config.json``.
        tensors: the file's, by its names.
        layers: of the target, from which the engine numbers the drafter's.

    Returns:
        The tensors, and the dtype to which the engine rounds what a module reads, by the module's name in the file.

    Raises:
        Misread: the engine would refuse the matrices, or take numbers for weights.
    """
    config = raw.get("quantization_config")
    stored = None if config is None else _stored_dtype(config)
    ignore = [] if config is None else config.get("ignore") or []
    plain: Matrices = {}
    rounded: dict[str, torch.dtype] = {}
    scales = {name for name in tensors if name.endswith(".weight_scale")}
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale") if kind == "weight" else None
        if name in scales:
            continue
        if kind == "weight" and stored and _has_scheme(module, ignore, layers):
            plain[name] = _dequantized(name, value, scale, stored)
            rounded[module] = stored
            scales.discard(f"{module}.weight_scale")
        elif kind == "weight" and value.dtype in LARGEST:
            raise Misread(
                f"{name} is {value.dtype}, and by config.json the engine reads plain weights there"
            )
        else:
            plain[name] = value
    if scales:
        raise Misread(f"{min(scales)}: by config.json the engine has no scale there and fails")
    return plain, rounded


def _stored_dtype(config: Any) -> torch.dtype:
    """Return the dtype of matrices with the config's scheme; Misread for any but W8A8 by rows and tokens."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    if not isinstance(groups, Mapping) or config.get("quant_method") != "compressed-tensors":
        raise Misread("quantization_config: only compressed-tensors' config_groups were compared")
    schemes = [scheme for scheme in groups.values() if "Linear" in scheme.get("targets", ())]
    if len(groups) != 1 or not schemes:
        raise Misread("quantization_config: only one group, of all Linear layers, was compared")
    weights = schemes[0].get("weights") or {}
    activations = schemes[0].get("input_activations") or {}
    kind = weights.get("type")
    wanted = {
        "weights": {"num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        },
    }
    stated = {"weights": weights, "input_activations": activations}
    for part, keys in wanted.items():
        for key, value in keys.items():
            if stated[part].get(key) != value:
                raise Misread(
                    f"quantization_config: {part}.{key} is {stated[part].get(key)!r}, compared was {value!r} only"
                )
    if kind not in STORED or config.get("format") != FORMATS[kind]:
        raise Misread(
            f"quantization_config: format {config.get('format')!r} does not go with weights of type {kind!r}"
        )
    return STORED[kind]


def _has_scheme(module: str, ignore: list[str], layers: int) -> bool:
    """Return whether the engine quantizes the layer to which a module of the file belongs."""
    parts = re.sub(r"^midlayer\.", "layers.0.", module).split(".")
    layer = LAYERS.get(parts[-1])
    if layer is None:
        return False
    if parts[0] == "layers":
        parts[1] = str(layers + int(parts[1]))
    name = ".".join(["model", *parts[:-1], layer])
    return not any(
        re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore
    )


def _dequantized(name: str, value: Tensor, scale: Tensor | None, stored: torch.dtype) -> Tensor:
    """Return a matrix's numbers times its rows' scales; Misread if the engine would not load them as these."""
    if value.dtype != stored:
        raise Misread(
            f"{name} is {value.dtype}: by config.json the engine reads {stored} there: name its layer in ignore, or "
            "quantize it"
        )
    if scale is None:
        raise Misread(
            f"it lacks {name}_scale, which the engine leaves uninitialized without a word"
        )
    if list(scale.shape) != [len(value), 1]:
        raise Misread(f"{name}_scale is {list(scale.shape)}, the engine's is {[len(value), 1]}")
    return value.float() * scale.float()


def round_tokens(x: Tensor, stored: torch.dtype) -> Tensor:
    """Return what an engine multiplies in place of ``x`` (..., W): each token's numbers in eight bits, by the largest
    absolute one of the token."""
    scale = x.abs().amax(-1, keepdim=True).float() / LARGEST[stored]
    if stored == torch.int8:
        return ((x.float() / scale.clamp_min(1e-30)).round() * scale).to(x.dtype)
    scale = scale.clamp_min(LEAST_SCALE)
    return ((x.float() * scale.reciprocal()).clamp(-448, 448).to(stored).float() * scale).to(
        x.dtype
    )


def moved(x: Tensor, share: float) -> Tensor:
    """Return numbers moved by up to a share of themselves, each by another one, the same in every call."""
    if not share:
        return x
    generator = torch.Generator().manual_seed(0)
    noise = 2 * torch.rand(x.shape, generator=generator) - 1
    return x * (1 + share * noise.to(x))
