"""From a directory, a GGUF file or a Hub id to a model and a tokenizer, or to a line why not."""

import contextlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file, is_accelerate_available, logging

from specdec.target.files import (
    check_config_numbers,
    check_ends,
    check_files,
    check_sizes,
    failing_in_one_line,
    files_beside,
    gguf_file,
    is_local,
    one_line,
    place_of,
    read_tensors,
)
from specdec.target.model_parts import model_parts
from specdec.utils.reading import check_sum
from specdec.utils.text import tensor_fault

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)


def load_model(
    source: str,
    revision: str | None,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    device_map: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load in evaluation form; see :class:`specdec.target.source.TargetSource`."""
    where = _device(device, dtype)
    if device_map is not None and not is_accelerate_available():
        raise ValueError(
            f"device_map={device_map} needs the package accelerate: pip install accelerate"
        )
    gguf = gguf_file(source)
    # of a model that comes with its hashes
    for file in files_beside(source) if gguf is None else [gguf]:
        if file.is_file():
            check_sum(file)
    config = _read_config(source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    # its own code may build itself as it likes
    if not (trust_remote_code and getattr(config, "auto_map", None)):
        check_sizes(source, revision, config, lambda: _on_meta(source, config, trust_remote_code))
    quantized = getattr(config, "quantization_config", None)
    if isinstance(quantized, dict) and quantized.get("quant_method") == "compressed-tensors":
        # now, and not at the first forward, which would change what the model is
        quantized["dequantize"] = True
    model, report = _read_weights(source, revision, trust_remote_code, config, dtype, device_map)
    check_ends(source, model)
    tokenizer = _tokenizer(source, revision, trust_remote_code)
    _check_weights(source, model, report)
    if device_map is None:
        for tensor in (*model.parameters(), *model.buffers()) if where.type == "cpu" else ():
            # mapped, they would change with the file, or end the run by SIGBUS
            tensor.data = tensor.detach().clone()
        return model.to(where), tokenizer
    if outside := sorted(
        {str(place) for place in devices_of_layers(model)} & {"disk", "cpu", "meta"}
    ):
        raise ValueError(
            f"{source}: device_map={device_map} leaves layers on {outside[0]}: free GPU memory, take more GPUs, or "
            "store the features with specdec cache --engine vllm"
        )
    return model, tokenizer


def _read_weights(
    source: str,
    revision: str | None,
    trust_remote_code: bool,
    config: Any,
    dtype: str,
    device_map: str | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model with its weights, and transformers' report of what was missing or left over."""
    options: dict[str, Any] = {
        "config": config,
        "dtype": DTYPES[dtype],
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "attn_implementation": _attention(config),
        "device_map": device_map,
    }
    # transformers 5.16 has no setting for a GGUF file, and always unpacks it
    if gguf_file(source) is not None and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what its report lists over pages is one line in _check_weights
    try:
        return _read(_auto(config), source, revision, trust_remote_code, **options)
    finally:
        logging.set_verbosity(verbosity)


def _check_weights(source: str, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise ValueError, in one line, if transformers reports tensors that are missing or of another shape."""
    state = model.state_dict()
    wanted = {name: state[name].shape for name in state if name in report["missing_keys"]}
    stored: dict[str, Any] = {}
    if wanted:
        stored = dict.fromkeys(report["unexpected_keys"], ())
    else:
        for name, stored_shape, shape in sorted(report["mismatched_keys"]):
            stored[name] = stored_shape
            wanted[name] = shape
    if fault := tensor_fault(stored, wanted):
        raise ValueError(f"{source}: its weights are not as config.json says: {fault}")


def load_parts(
    source: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model on the meta device, except for embedding, final norm and head, which are read by name from the
    safetensors.

    Its layers need not be in the files, nor in a dtype that torch computes in. ``ValueError`` if a part is missing.
    """
    if gguf_file(source) is not None:
        raise ValueError(
            f"{source}: parts are read from safetensors: of a GGUF file give the whole target"
        )
    where = _device(device, dtype)
    kind = DTYPES[dtype]
    config = _read_config(source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    model = _on_meta(source, config, trust_remote_code).to(kind)
    with failing_in_one_line(source):
        parts = named_parts(model)
        stored_as = dict[str, str]()

        def choose(names: Collection[str]) -> Collection[str]:
            for name, _ in parts.values():
                alike = [name]
                if name not in names:
                    alike = [stored for stored in names if _alike(stored, name)]
                if len(alike) > 1:
                    raise ValueError(f"{name} may be any of {', '.join(sorted(alike)[:3])}")
                stored_as.update(dict.fromkeys(alike, name))
            return stored_as

        tensors = read_tensors(source, revision, choose)
        values = {stored_as[stored]: value for stored, value in tensors.items()}
        for name, value in values.items():
            if not value.is_floating_point() or value.itemsize < 2:
                raise ValueError(
                    f"{name} is quantized: the parts of a target must be plain weights"
                )
        shapes = {name: value.shape for name, value in values.items()}
        if fault := tensor_fault(shapes, {name: value.shape for name, value in parts.values()}):
            raise ValueError(f"among the parts of a target {fault}")
    weights = {
        name: nn.Parameter(value.to(where, kind, copy=True), requires_grad=False)
        for name, value in values.items()
    }
    for module in model.modules():  # a tied head has the embedding's
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if id(parameter) in parts:
                setattr(module, name, weights[parts[id(parameter)][0]])
    # where it has none, as with from_pretrained, the config's ends count
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            source, revision=revision, local_files_only=is_local(source)
        )
    check_ends(source, model)
    return model, _tokenizer(source, revision, trust_remote_code)


def named_parts(model: PreTrainedModel) -> dict[int, tuple[str, Tensor]]:
    """Name and value of each weight of embedding, final norm and head, by its id; a tied head's are the embedding's."""
    modules = (
        model.get_input_embeddings(),
        model_parts(model).final_norm,
        model.get_output_embeddings(),
    )
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        id(value): (name, value) for name, value in model.named_parameters() if id(value) in ids
    }


def _alike(stored: str, name: str) -> bool:
    """Whether files may call so what a model calls ``name``: what stands before differs (``language_model.``)."""
    end = ".".join(name.split(".")[-2:])
    return (stored == end or stored.endswith(f".{end}")) and not re.search(
        r"layers|blocks|visi|visual|mtp", stored
    )


def _device(name: str, dtype: str) -> torch.device:
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=(where := torch.device(name)))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not available: {one_line(error)}") from error
    return where


def _tokenizer(
    source: str, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    here = is_local(source) and gguf_file(source) is None
    if here and not any((Path(source) / name).exists() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(source, revision, trust_remote_code)


def devices_of_layers(model: PreTrainedModel) -> set[Any]:
    """The devices that a model's layers are spread over; empty where they all lie on one."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return places if len(places) > 1 else set()


def load_tokenizer(
    source: str, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """A target's tokenizer, without its weights; ``ValueError`` if there is none or it cannot be read."""
    with failing_in_one_line(source):
        check_files(source)
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, source, revision, trust_remote_code)
    # every text's length is held against it
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(
            f"{source}: tokenizer_config.json: model_max_length is no number: correct it"
        )
    return tokenizer


def load_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The configuration of a target's text model; ``ValueError`` if there is none or it cannot be read."""
    config = _read_config(source, revision, trust_remote_code)
    with failing_in_one_line(source):
        return config.get_text_config(decoder=True)


def skeleton(source: str, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A target without weights, on the meta device: a directory with its ``config.json`` is enough.

    Raises:
        ValueError: there is none, it cannot be read, or the model is none that can be a target.
    """
    config = _read_config(source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    return _on_meta(source, config, trust_remote_code)


def _on_meta(source: str, config: Any, trust_remote_code: bool) -> PreTrainedModel:
    with failing_in_one_line(source), torch.device("meta"):
        return _auto(config).from_config(
            config, trust_remote_code=trust_remote_code, attn_implementation=_attention(config)
        )


def _attention(config: Any) -> str | None:
    """The kernel, which is not what config.json names: that may be code of the Hub; sdpa would leave a cap out."""
    capped = (
        getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    )
    return "eager" if capped else None


def _read(
    auto: Any, source: str, revision: str | None, trust_remote_code: bool, **options: Any
) -> Any:
    """From a directory or a file, without any network, or from the Hub."""
    options |= {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": is_local(source),
    }
    with failing_in_one_line(source):
        place, named = place_of(source)
        return auto.from_pretrained(place, **named, **options)


def _read_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """A target's configuration, whose numbers are looked at first: transformers makes lists as long as they say.

    It checks their types itself.
    """
    with failing_in_one_line(source):
        check_files(source)
        place, named = place_of(source)
        local = is_local(source)
        # it may name any other model
        if find_adapter_config_file(place, revision=revision, local_files_only=local):
            raise ValueError(
                "adapter_config.json: it holds a PEFT adapter: give that as target.adapter from a separate folder, "
                "or merge it into its model"
            )
        raw, _ = PreTrainedConfig.get_config_dict(
            place, revision=revision, local_files_only=local, **named
        )
        check_config_numbers(raw)
    return _read(AutoConfig, source, revision, trust_remote_code)


def _auto(config: Any) -> Any:
    """What loads it: a causal language model or, if there is none of its kind, one that takes images, too, of which the
    text backbone is used."""
    kind = type(config)
    images = (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _check_architecture(source: str, config: Any, trust_remote_code: bool) -> None:
    if trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    ):
        raise ValueError(
            f"{source}: a {config.model_type!r} model is not a causal language model that specdec can use"
        )
