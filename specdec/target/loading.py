"""From a directory or a Hub id to a model and a tokenizer, or to one line that says why not; and which model it is."""

import contextlib
import hashlib
import json
import re
import textwrap
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

from specdec.utils.files import check_sum
from specdec.utils.text import tensor_fault

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_model(
    source: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool, device_map: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load in evaluation form; see :class:`specdec.target.target.TargetSource`."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not available: {_one_line(error)}") from error
    if device_map is not None and not is_accelerate_available():
        raise ValueError(f"device_map={device_map} needs the package accelerate: pip install accelerate")
    for file in Path(source).iterdir() if is_directory(source) else ():  # of a model that comes with its hashes
        if file.is_file():
            check_sum(file)
    config = _read(AutoConfig, source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    model, report = _read(
        AutoModelForCausalLM,
        source,
        revision,
        trust_remote_code,
        config=config,
        dtype=DTYPES[dtype],
        use_safetensors=True,
        output_loading_info=True,
        attn_implementation="eager" if capped else None,  # sdpa would leave the cap out
        device_map=device_map,
    )
    tokenizer = None
    if not is_directory(source) or any((Path(source) / name).exists() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(source, revision, trust_remote_code)
    missing = sorted(report["missing_keys"])
    if missing:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name in missing}
        fault = tensor_fault(dict.fromkeys(report["unexpected_keys"], ()), {name: shapes[name] for name in missing})
        raise ValueError(f"{source}: its weights are not as config.json says: {fault}")
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
    """A target's tokenizer, without its weights; ``ValueError`` if there is none or it cannot be read."""
    return _read(AutoTokenizer, source, revision, trust_remote_code)


def load_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The configuration of a target's text model; ``ValueError`` if there is none or it cannot be read."""
    return _read(AutoConfig, source, revision, trust_remote_code).get_text_config(decoder=True)


def skeleton(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A target without weights, on the meta device: a directory with its ``config.json`` is enough.

    Raises:
        ValueError: there is none, it cannot be read, or the model is none that can be a target.
    """
    config = _read(AutoConfig, source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    with _failing_in_one_line(source), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _read(auto: Any, source: str, revision: str | None, trust_remote_code: bool, **more: Any) -> Any:
    """From a directory, without any network, or from the Hub."""
    more |= {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": is_directory(source)}
    with _failing_in_one_line(source):
        return auto.from_pretrained(source, **more)


def _check_architecture(source: str, config: Any, trust_remote_code: bool) -> None:
    if trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{source}: a {config.model_type!r} model is not a causal language model that specdec can use")


def is_directory(source: str) -> bool:
    """Whether it is one; False for a Hub id, and ValueError for what is neither."""
    path = Path(source)
    if path.is_dir():
        return True
    if path.exists():
        raise ValueError(f"{source}: a file; a target is a model directory or a Hub id")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"{source}: no such directory")
    return False


@contextlib.contextmanager
def _failing_in_one_line(source: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = _one_line(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "the weights have other shapes than config.json says; the report above lists them"
        elif "trust_remote_code" in str(error):
            reason = "it runs its own code: read that code, then allow it with trust_remote_code"
        elif isinstance(error, OSError) and not Path(source).is_dir():
            reason = f"no such directory here, nor to be had from the Hugging Face Hub ({reason})"
        raise ValueError(f"{source}: {reason}") from error


def _one_line(error: BaseException) -> str:
    return textwrap.shorten(str(error), 240, placeholder="…")


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
            values = tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
            width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            bits = values.contiguous().flatten().view(width)
            places = torch.linspace(0, bits.numel() - 1, min(SAMPLES, bits.numel()), dtype=torch.float64)
            sample = bits[places.long().to(bits.device)]
            digest.update(sample.cpu().numpy().tobytes())
            digest.update(str(bits.sum(dtype=torch.int64).item()).encode())
    return digest.hexdigest()


def _essence(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(k): _essence(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if k not in _INCIDENTAL and "attn_implementation" not in k}
    return [_essence(v) for v in value] if isinstance(value, list | tuple) else value
