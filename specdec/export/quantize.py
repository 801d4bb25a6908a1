"""Quantized drafters: the matrices of an export in eight bits, in the layout of the library compressed-tensors.

Every output channel of a matrix has a scale, by its largest absolute weight; nothing is searched or calibrated. An
engine rounds what a matrix reads as it runs, by the largest absolute number of each token (*dynamic* scales, which no
file holds). vLLM and SGLang read the layout (https://github.com/vllm-project/compressed-tensors). Embedding, head,
norms, biases and vocabulary maps stay as they are.

Legend: r rows (output channels), c columns of a matrix.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafter import MLA
from specdec.export import tensors as named
from specdec.export.subject import Subject
from specdec.export.tensors import Raw, Weights
from specdec.target import NotServable
from specdec.utils.extras import require

# The modules of a drafter's layers that an engine builds as its quantizable linear layers.
LAYER_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSION_MATRIX = "fc"
SCALE = "weight_scale"
# No engine quantizes the head of a drafter by the target "Linear"; the library goes by this list.
HEAD_MODULE = "lm_head"
# A weight is divided by its scale in float32, so it may be rounded across the middle of two numbers.
DIVISION = 1.0001


class Quantization(NamedTuple):
    """A kind of eight bits, by its names in compressed-tensors."""

    name: str  # of --quantize
    dtype: torch.dtype  # of the stored matrices
    preset: str  # of weights and activations
    format: str  # of the files
    words: str

    @property
    def scheme(self) -> Any:
        """The library's scheme: a scale for each output channel, and for each token of the activations."""
        from compressed_tensors.quantization import preset_name_to_scheme

        return preset_name_to_scheme(self.preset, ["Linear"])

    def rounded(self, weight_rc: Tensor) -> tuple[Tensor, Tensor]:
        """Return a matrix in :attr:`dtype` (r, c) and its scales (r, 1), float32, by the library's own functions.

        A scale is the row's largest absolute weight over the number range's half, 127.5 or 448, so no weight lies
        further than half a step from its number times the scale.
        """
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        weights = self.scheme.weights
        weight_rc = weight_rc.float()
        least_r1 = weight_rc.amin(1, keepdim=True)
        most_r1 = weight_rc.amax(1, keepdim=True)
        scale_r1, _ = calculate_qparams(least_r1, most_r1, weights)
        small_rc = quantize(
            x=weight_rc, scale=scale_r1, zero_point=None, args=weights, dtype=self.dtype
        )
        return small_rc.contiguous(), scale_r1.float().contiguous()


INT8 = Quantization(
    "int8", torch.int8, "INT8", "int-quantized", "8-bit integers (W8A8, compressed-tensors)"
)
FP8 = Quantization(
    "fp8", torch.float8_e4m3fn, "FP8_DYNAMIC", "float-quantized", "FP8 E4M3 (W8A8, compressed-tensors)"
)  # fmt: skip
QUANTIZATIONS = {quantization.name: quantization for quantization in (INT8, FP8)}


def check_quantization(name: str, format: str, matrices: Collection[str], subject: Subject) -> None:
    """Raise ValueError for a quantization that there is not, or that no engine reads of this drafter in this format.

    Args:
        format: of ``export``.
        matrices: the modules that the format's engine quantizes.
    """
    if name not in QUANTIZATIONS:
        raise ValueError(
            f"unknown quantization {name!r}: choose from {', '.join(QUANTIZATIONS)}, or leave --quantize out"
        )
    if format == "gguf":
        raise ValueError(
            "--quantize is not for GGUF files: export without it, and run llama.cpp's own tool: llama-quantize "
            "drafter.gguf drafter-q8_0.gguf Q8_0"
        )
    if not matrices:
        raise ValueError(
            f"--quantize is not for --format {format}: specdec writes the drafter in the dtype of the target's own "
            "module; leave it out"
        )
    if type(subject.config.attention) is MLA:
        raise NotServable(
            f"--quantize {name}: multi-head latent attention (MLA) in eight bits was compared with no engine: leave it "
            "out"
        )
    require("compressed_tensors", "quantized", f"--quantize {name}")


def quantized(tensors: Weights, name: str, matrices: Collection[str]) -> Weights:
    """Return a checkpoint's tensors with its matrices in eight bits, each followed by its ``weight_scale``.

    Queries, keys and values each have their scales, one a row, as have gate and up, so an engine that puts them into
    one matrix puts the scales into one column.

    Args:
        tensors: see :meth:`specdec.export.formats.Format.tensors`.
        name: ``int8`` or ``fp8``.
        matrices: the modules that the format's engine quantizes.
    """
    quantization = QUANTIZATIONS[name]
    written: Weights = {}
    for tensor_name, value in tensors.items():
        if module_of(tensor_name) in matrices and value.ndim == 2:
            written[tensor_name], written[f"{tensor_name}_scale"] = quantization.rounded(value)
        else:
            written[tensor_name] = value
    return written


def module_of(tensor_name: str) -> str:
    """Return the last name of the module that a weight belongs to, ``q_proj`` of ``midlayer.self_attn.q_proj.weight``;
    empty for a tensor that is no weight."""
    module, _, kind = tensor_name.rpartition(".")
    return module.rpartition(".")[2] if kind == "weight" else ""


def quantization_of(tensors: Weights) -> Quantization | None:
    """Return the quantization of a checkpoint's matrices by their dtype; None if they are plain."""
    dtypes = {value.dtype for name, value in tensors.items() if name.endswith(".weight")}
    return next((kind for kind in QUANTIZATIONS.values() if kind.dtype in dtypes), None)


def quantization_config(tensors: Weights) -> Raw:
    """Return the key ``quantization_config`` of a ``config.json``, as these tensors need it; no key if they are plain.

    vLLM gives every linear layer the scheme unless ``ignore`` names it, so the list has each matrix that is plain. In
    vLLM names begin with ``model.``, which the regular expressions allow for.
    """
    quantization = quantization_of(tensors)
    if quantization is None:
        return {}
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    plain = {
        module_of(name) for name, value in tensors.items() if value.dtype != quantization.dtype
    }
    left = sorted(plain & {*LAYER_MATRICES, FUSION_MATRIX})
    config = QuantizationConfig(
        config_groups={"group_0": quantization.scheme},
        format=quantization.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[HEAD_MODULE, *(rf"re:(.*\.)?{re.escape(module)}$" for module in left)],
    )
    return {"quantization_config": config.model_dump(mode="json", exclude_none=True)}


def half_steps(stored_rc: Tensor, scale_r1: Tensor) -> Tensor:
    """Return how far a weight may lie from its number times the scale, (r, c) float64.

    The numbers of int8 are 1 apart. Those of FP8 E4M3 have three bits behind the first, and at least 2^-9 between them.

    Args:
        stored_rc: int8 or float8_e4m3fn.
    """
    scale_r1 = scale_r1.double()
    if stored_rc.dtype == torch.int8:
        return (scale_r1 / 2).expand(stored_rc.shape)
    # Zero is as far from its neighbors as the least number.
    _, exponent_rc = stored_rc.double().abs().clamp_min(2**-9).frexp()
    return scale_r1 * torch.exp2((exponent_rc - 5).clamp_min(-10).double())


def rounding_faults(plain: Weights, written: Weights) -> list[str]:
    """Return what of a quantized checkpoint is not the rounding of the plain one, in a sentence each.

    A matrix must be within half a step of the plain one, everything else equal to the last bit.

    Args:
        plain: a checkpoint's tensors as they are exported without quantization.
        written: the quantized checkpoint's, by the same names.
    """
    faults = []
    scales = {name for name in written if name.endswith(f".{SCALE}")}
    if odd := (plain.keys() - written.keys()) | (written.keys() - plain.keys() - scales):
        return [f"{min(odd)} is in one of the two alone"]
    for name, value in plain.items():
        stored = written[name]
        scale = written.get(f"{name}_scale")
        scales.discard(f"{name}_scale")
        if stored.dtype == value.dtype and scale is None:
            if not torch.equal(stored, value):
                faults.append(f"{name} is another tensor than the drafter's")
            continue
        try:
            faults += _faults_of_matrix(name, value, stored, scale)
        except ValueError as error:
            faults.append(f"{name}: {error}")
    return [*faults, *(f"{name} has no matrix" for name in sorted(scales))]


def _faults_of_matrix(
    name: str, value_rc: Tensor, stored_rc: Tensor, scale: Tensor | None
) -> list[str]:
    """Return the fault of a matrix that should be the rounding of another one, none or a sentence."""
    if module_of(name) not in (*LAYER_MATRICES, FUSION_MATRIX):
        return [f"{name} is {stored_rc.dtype}, and engines have no scales for it"]
    if stored_rc.dtype not in (INT8.dtype, FP8.dtype) or scale is None:
        return [f"{name} is {stored_rc.dtype} and has {'no' if scale is None else 'a'} scale"]
    rows = len(stored_rc)
    if list(scale.shape) != [rows, 1] or stored_rc.shape != value_rc.shape:
        return [
            f"{name} is {list(stored_rc.shape)} with scales {list(scale.shape)}, wanted "
            f"{list(value_rc.shape)} and {[rows, 1]}"
        ]
    if not (scale > 0).all() or not scale.isfinite().all():
        row = int((~((scale > 0) & scale.isfinite())).nonzero()[0, 0])
        return [f"{name}: the scale of row {row} is {float(scale[row, 0]):g}"]
    apart_rc = (stored_rc.double() * scale.double() - value_rc.double()).abs()
    beyond_r = (apart_rc > half_steps(stored_rc, scale) * DIVISION).any(1)
    if not beyond_r.any():
        return []
    row = int(beyond_r.nonzero()[0, 0])
    return [
        f"{name}: {int(beyond_r.sum())} of {rows} rows are not within half a step of the drafter's, the first is row "
        f"{row}"
    ]


def largest_errors(plain: Weights, written: Weights) -> dict[str, float]:
    """Return the largest relative error of an output channel by the kind of its matrix.

    The error of a channel is the Euclidean length of what rounding changed, over that of its weights.

    Args:
        plain: a checkpoint's tensors before quantization.
        written: the same afterwards.
    """
    errors: dict[str, float] = {}
    read = named.dequantized(written)
    for name, value in plain.items():
        if written[name].dtype == value.dtype:
            continue
        value_rc = value.double()
        lost_r = (read[name].double() - value_rc).norm(dim=1)
        relative = float((lost_r / value_rc.norm(dim=1).clamp_min(1e-30)).max())
        kind = module_of(name)
        errors[kind] = max(errors.get(kind, 0.0), relative)
    return errors


def quantization_record(plain: Weights, written: Weights) -> Raw | None:
    """Return what an export records of its quantization; None if it has none."""
    quantization = quantization_of(written)
    if quantization is None:
        return None
    return {
        "name": quantization.name,
        "words": quantization.words,
        "bytes": sum(value.nbytes for value in written.values()),
        "bytes_before": sum(value.nbytes for value in plain.values()),
        "largest_relative_errors": largest_errors(plain, written),
    }


def quantization_lines(record: Raw | None) -> list[str]:
    """Return sentences about a quantization, for whoever exports; see :func:`quantization_record`."""
    if record is None:
        return []
    errors = record["largest_relative_errors"].items()
    listed = ", ".join(f"{kind} {error:.2%}" for kind, error in errors)
    size = f"{record['bytes'] / 1e6:,.2f} MB instead of {record['bytes_before'] / 1e6:,.2f} MB"
    return [
        f"quantized to {record['words']}: {size}",
        f"largest relative weight error of an output channel: {listed}",
        "an engine also rounds what the matrices read, token by token, which specdec evaluate does not: measure the "
        "acceptance of the served drafter",
    ]
