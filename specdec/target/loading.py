"""From a directory, a GGUF file or a Hub id to a model and a tokenizer, or to a line why not; and which model it is."""

import contextlib
import hashlib
import json
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file, is_accelerate_available, is_gguf_available, logging

from specdec.utils.files import check_sum, read_json
from specdec.utils.text import how_many, printable, tensor_fault

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# the largest number of a config.json, by its name's pattern; the first that fits counts
LARGEST = {
    r"(num|n|decoder|encoder)_(\w+_)?layers?|depth": 1_000,
    r"(num|n)_(\w+_)?experts": 10_000,
    r"num_(?!param)\w+": 2**20,
    r"(\w+_)?(size|dim)|\w+_(token_ids?|position_embeddings|window)|n_(embd|inner|positions|ctx|head)": 2**31,
    r"partial_rotary_factor|rotary_pct": 1,
    r"time_step_limit|(\w+_)?max_length": math.inf,  # some say "no end" so
    r".*": 2**53,
}
EXPERTS = 50_000  # of all layers together
SPARE, TIMES = 2**26, 2  # weights that a model may have beyond this many times those in its files: what lacks is named
REMEDY = "compare the .json files with the original's, or download them again"
LONG_ID = re.compile(rb":\s*(\d{8,})\s*[,}]")  # tokenizers makes a list as long as the largest id
FILE = 2**29  # bytes of a file beside the weights, at most
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
    gguf = gguf_file(source)
    for file in _files_beside(source) if gguf is None else [gguf]:  # of a model that comes with its hashes
        if file.is_file():
            check_sum(file)
    config = _read_config(source, revision, trust_remote_code)
    _check_architecture(source, config, trust_remote_code)
    _check_sizes(source, revision, config, trust_remote_code)
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what its report lists over pages is one line below
    try:
        model, report = _read(
            _auto(config),
            source,
            revision,
            trust_remote_code,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            attn_implementation="eager" if capped else None,  # sdpa would leave the cap out
            device_map=device_map,
            **({} if gguf is None else {"quantization_config": GgufConfig(dequantize=True)}),
        )
    finally:
        logging.set_verbosity(verbosity)
    _check_ends(source, model)
    tokenizer = None
    if gguf is not None or not is_local(source) or any((Path(source) / name).exists() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(source, revision, trust_remote_code)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if name in report["missing_keys"]}
    found: dict[str, Any] = dict.fromkeys(report["unexpected_keys"] if wanted else (), ())
    if not wanted:
        for name, there, said in sorted(report["mismatched_keys"]):
            found[name], wanted[name] = there, said
    if fault := tensor_fault(found, wanted):
        raise ValueError(f"{source}: its weights are not as config.json says: {fault}")
    if device_map is None:
        for tensor in (*model.parameters(), *model.buffers()) if where.type == "cpu" else ():
            tensor.data = tensor.detach().clone()  # mapped, they would change with the file, or end the run by SIGBUS
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
    with failing_in_one_line(source):
        _check_files(source)
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, source, revision, trust_remote_code)
    if not isinstance(tokenizer.model_max_length, int | float):  # every text's length is held against it
        raise ValueError(f"{source}: tokenizer_config.json: model_max_length is no number: correct it")
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
            config, trust_remote_code=trust_remote_code, attn_implementation=None
        )  # as load_model has it: what config.json names may be code of the Hub


def _read(auto: Any, source: str, revision: str | None, trust_remote_code: bool, **more: Any) -> Any:
    """From a directory or a file, without any network, or from the Hub."""
    more |= {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": is_local(source)}
    with failing_in_one_line(source):
        place, named = _place(source)
        return auto.from_pretrained(place, **named, **more)


def gguf_file(source: str) -> Path | None:
    """The GGUF file that a target is: itself, or the only one of a directory without ``config.json``; else None.

    Raises:
        ValueError: no such file, several in the directory, or the packages that read one are missing.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{source}: no such file")
    elif not path.is_dir() or (path / "config.json").exists() or not (found := sorted(path.glob("*.gguf"))):
        return None
    elif len(found) > 1:
        raise ValueError(f"{source}: has {len(found)} GGUF files: give one of them, {found[0].name} for example")
    else:
        path = found[0]
    if not (is_gguf_available() and is_accelerate_available()):
        raise ValueError(f"{source}: a GGUF file is read by two more packages: pip install gguf accelerate")
    return path


def _place(source: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a target, and the argument that names a GGUF file there."""
    file = gguf_file(source)
    return (source, {}) if file is None else (str(file.parent), {"gguf_file": file.name})


def _files_beside(source: str) -> Iterator[Path]:
    """All that lies in a local target's directory."""
    if is_local(source):
        path = Path(source)
        yield from (path if path.is_dir() else path.parent).iterdir()


def _check_files(source: str) -> None:
    """Refuse files beside the weights that take more than a file may: devices, giants, a token's id of ten digits."""
    for path in _files_beside(source):
        if path.suffix in (".json", ".jinja", ".model", ".txt", ".safetensors") and path.exists():
            if not path.is_file():  # reading would not end
                raise ValueError(f"{path.name}: no file: a device, a pipe or a directory")
            if path.suffix != ".safetensors" and path.stat().st_size > FILE:
                raise ValueError(f"{path.name}: larger than {FILE // 2**20} MiB")
            if path.name == "tokenizer.json" and (found := LONG_ID.search(path.read_bytes())):
                raise ValueError(f"{path.name}: {found[1].decode()[:20]} is no token's id: download it again")


def _read_config(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """A target's configuration, whose numbers are looked at first: transformers makes lists as long as they say.

    It checks their types itself.
    """
    with failing_in_one_line(source):
        _check_files(source)
        (place, named), local = _place(source), is_local(source)
        if find_adapter_config_file(place, revision=revision, local_files_only=local):  # it may name any other model
            raise ValueError("adapter_config.json: it holds a PEFT adapter: merge that into its model, or remove it")
        raw, _ = PreTrainedConfig.get_config_dict(place, revision=revision, local_files_only=local, **named)
        layers, experts = [1.0], [1.0]
        for name, number in _numbers(raw):
            most = next(most for pattern, most in LARGEST.items() if re.fullmatch(pattern, name))
            if not number <= most:  # NaN is not, either
                raise ValueError(f"config.json: {name} is {number:,}, at most {most:,} can be: correct it")
            if name.endswith("layers"):
                layers.append(number)
            elif name.endswith("experts"):
                experts.append(number)
        if max(layers) * max(experts) > EXPERTS:
            raise ValueError(
                f"config.json: {max(layers):g} layers of {max(experts):g} experts are too many: correct it"
            )
    return _read(AutoConfig, source, revision, trust_remote_code)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON document, by the last name above them."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(child, key if isinstance(key, str) else name)
    elif isinstance(value, int | float):
        yield printable(name)[:60], value


def _check_sizes(source: str, revision: str | None, config: Any, trust_remote_code: bool) -> None:
    """Hold what a configuration describes against what the files' headers hold, before memory is taken for it."""
    if trust_remote_code and getattr(config, "auto_map", None):
        return  # its own code may build itself as it likes
    with failing_in_one_line(source):
        tensors, held, gguf = 0, 0, gguf_file(source)
        for path in _weight_files(source, revision) if gguf is None else [gguf]:
            try:
                shapes = _shapes(path)
            except (SafetensorError, OSError, ValueError, IndexError, KeyError) as error:
                raise ValueError(f"{path.name}: {error}: it is damaged or cut off, download it again") from error
            tensors, held = tensors + len(shapes), held + sum(map(math.prod, shapes))
        if not tensors:
            return  # transformers says what it lacks
        layers = config.get_text_config(decoder=True).num_hidden_layers
        if layers > tensors:
            raise ValueError(
                f"config.json says {layers} layers, the files hold {how_many(tensors, 'tensor')}: correct it"
            )
        model = _on_meta(source, config, trust_remote_code)
        described = sum(part.numel() for part in (*model.parameters(), *model.buffers()))
        packed = 32 if getattr(config, "quantization_config", None) else 1  # values of one bit in 32-bit words
        if described > TIMES * packed * held + SPARE:
            raise ValueError(
                f"config.json describes a model of {described:,} weights, the files hold {held:,}: one of the two is "
                "of another model, download both again"
            )


def _shapes(path: Path) -> list[list[int]]:
    """Of the tensors in a file of weights, from its header."""
    if path.suffix == ".gguf":
        from gguf import GGUFReader  # an optional package

        return [tensor.shape.tolist() for tensor in GGUFReader(path).tensors]
    with safe_open(path, framework="pt") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  no mapping


def _weight_files(source: str, revision: str | None) -> list[Path]:
    """The safetensors that transformers will read, from the Hub if need be; none where there are none."""
    found: dict[str, Path] = {}
    for name in (WEIGHTS, INDEX):
        if is_local(source):
            found |= {name: Path(source) / name} if (Path(source) / name).exists() else {}
        elif not found:
            with contextlib.suppress(EntryNotFoundError):
                found[name] = Path(hf_hub_download(source, name, revision=revision))
    if WEIGHTS in found or not found:
        return list(found.values())[:1]
    index = read_json(found[INDEX])
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX}: it has no weight_map of tensors to files: download it again")
    files = sorted(set(names.values()))
    if outside := [name for name in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)]:
        raise ValueError(f"{INDEX}: {printable(outside[0])[:100]} is no safetensors file beside it: download it again")
    if is_local(source):
        return [Path(source) / name for name in files]
    return [Path(hf_hub_download(source, name, revision=revision)) for name in files]


def _check_ends(source: str, model: PreTrainedModel) -> None:
    """Refuse an end of text that is no token."""
    with failing_in_one_line(source):
        config: Any = model.config
        rows = config.get_text_config(decoder=True).vocab_size
        for name, holder in (("config.json", config), ("generation_config.json", model.generation_config)):
            value = getattr(holder, "eos_token_id", None)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and (type(token) is not int or token >= rows):
                    raise ValueError(f"{name}: eos_token_id {token!r} is none of {rows:,} tokens: correct it")


def _auto(config: Any) -> Any:
    """What loads it: a causal language model or, if there is none of its kind, one that takes images, too, of which the
    text backbone is used."""
    kind = type(config)
    images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _check_architecture(source: str, config: Any, trust_remote_code: bool) -> None:
    if trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(f"{source}: a {config.model_type!r} model is not a causal language model that specdec can use")


def is_local(source: str) -> bool:
    """Whether it is a directory or a GGUF file here; False for a Hub id, and ValueError for what is none of them."""
    path = Path(source)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return True
    if path.exists():
        raise ValueError(f"{source}: a file; a target is a model directory, a GGUF file or a Hub id")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"{source}: no such directory")
    return False


@contextlib.contextmanager
def failing_in_one_line(source: str) -> Iterator[None]:
    """Whatever transformers raises inside about a model's files, which may be anything, as a ValueError of one line."""
    try:
        yield
    except (torch.OutOfMemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of tokenizers, in Rust
            raise
        reason = _one_line(error)
        if reason.startswith(f"{source}: "):
            raise
        if "trust_remote_code" in str(error):
            reason = "it runs its own code: read that code, then allow it with trust_remote_code"
        elif isinstance(error, OSError) and not Path(source).exists():
            reason = f"no such directory here, nor to be had from the Hugging Face Hub ({reason})"
        elif not isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
            reason = f"transformers cannot make a model of its files ({type(error).__name__}: {reason}): {REMEDY}"
        raise ValueError(f"{source}: {reason}") from error


def _one_line(error: BaseException) -> str:
    return textwrap.shorten(printable(str(error)), 240, placeholder="…")


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
