"""From a directory or a Hub id to a model and a tokenizer, or to one line that says why not; and which model it is."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_accelerate_available

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_model(
    source: str,
    revision: str | None,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    device_map: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load in evaluation form; see :meth:`specdec.target.target.Target.load`."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    where = device_named(device)
    if device_map is not None and not is_accelerate_available():
        raise ValueError(f"device_map={device_map} needs the package accelerate: pip install accelerate")
    local = _is_directory(source)
    common = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
    with _told_in_one_line(source, local):
        config = AutoConfig.from_pretrained(source, **common)
        _check_architecture(source, config, trust_remote_code)
        text = config.get_text_config(decoder=True)
        capped = getattr(text, "attn_logit_softcapping", None) is not None  # sdpa would leave the cap out
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation="eager" if capped else None,
            device_map=device_map,
            **common,
        )
        tokenizer = None
        if not local or any((Path(source) / name).exists() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(source, **common)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{source}: {len(missing)} weights are missing from the checkpoint, {missing[0]} for one")
    if device_map is None:
        return model.to(where), tokenizer
    if outside := sorted({str(place) for place in spread(model)} & {"disk", "cpu", "meta"}):
        raise ValueError(
            f"{source}: device_map={device_map} leaves layers on {outside[0]}: free GPU memory, take more GPUs, or "
            "store the features with specdec cache --engine vllm"
        )
    return model, tokenizer


def spread(model: PreTrainedModel) -> set[Any]:
    """The devices that a model's layers are spread over; empty where they all lie on one."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return places if len(places) > 1 else set()


def load_tokenizer(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """A target's tokenizer, without its weights.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    local = _is_directory(source)
    with _told_in_one_line(source, local):
        return AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local
        )


def load_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The configuration of a target's text model, without its weights.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    return _read_config(source, revision, trust_remote_code).get_text_config(decoder=True)


def skeleton(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A target without weights, on the meta device: a directory with its ``config.json`` is enough.

    Raises:
        ValueError: there is none, it cannot be read, or the model is none that can be a target.
    """
    config = _read_config(source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    with _told_in_one_line(source, local=False), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _read_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    local = _is_directory(source)
    with _told_in_one_line(source, local):
        return AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local
        )


def _check_architecture(source: str, config: Any, trust_remote_code: bool) -> None:
    if trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{source}: a {config.model_type!r} model is not a causal language model that specdec can use")


def device_named(device: str) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: it is not.
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not available: {_one_line(error)}") from error
    return where


def _is_directory(source: str) -> bool:
    path = Path(source)
    if path.is_dir():
        return True
    if path.exists():
        raise ValueError(f"{source}: a file; a target is a model directory or a Hub id")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"{source}: no such directory")
    return False


@contextlib.contextmanager
def _told_in_one_line(source: str, local: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = _one_line(error)
        if reason.startswith(f"{source}: "):
            raise
        if "ignore_mismatched_sizes" in reason:
            reason = "the weights have other shapes than config.json says; the report above lists them"
        elif "trust_remote_code" in str(error):
            reason = "it runs its own code: read that code, then allow it with trust_remote_code"
        elif isinstance(error, OSError) and not local:
            reason = f"no such directory here, nor to be had from the Hugging Face Hub ({reason})"
        raise ValueError(f"{source}: {reason}") from error


def _one_line(error: BaseException, limit: int = 240) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


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
