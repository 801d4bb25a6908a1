"""What lies in a target's directory, GGUF file or Hub repository, looked at before anything is made of it.

It may be a stranger's: numbers that take the machine's memory, files that have no end and weights of another model are
refused in a line.
"""

import contextlib
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_accelerate_available, is_gguf_available

from specdec.utils.reading import read_json
from specdec.utils.text import how_many, printable

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# the largest number of a config.json, by its name's pattern; the first that fits counts
LARGEST = {
    r"(num|n|decoder|encoder)_(\w+_)?layers?|depth": 1_000,
    r"(num|n)_(\w+_)?experts": 10_000,
    r"num_(?!param)\w+": 2**20,
    r"(\w+_)?(size|dim)|\w+_(token_ids?|position_embeddings|window)|n_(embd|inner|positions|ctx|head)": 2
    ** 31,
    r"partial_rotary_factor|rotary_pct": 1,
    r"time_step_limit|(\w+_)?max_length": math.inf,  # some say "no end" so
    r".*": 2**53,
}
EXPERTS = 50_000  # of all layers together
# weights that a model may have beyond this many times those in its files: what lacks is named
SPARE = 2**26
TIMES = 2
REMEDY = "compare the .json files with the original's, or download them again"
LONG_ID = re.compile(rb":\s*(\d{8,})\s*[,}]")  # tokenizers makes a list as long as the largest id
FILE = 2**29  # bytes of a file beside the weights, at most


def is_local(source: str) -> bool:
    """Whether it is a directory or a GGUF file here; False for a Hub id, and ValueError for what is none of them."""
    path = Path(source)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return True
    if path.exists():
        raise ValueError(
            f"{source}: a file; a target is a model directory, a GGUF file or a Hub id"
        )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"{source}: no such directory")
    return False


def gguf_file(source: str) -> Path | None:
    """The GGUF file that a target is: itself, or the only one of a directory without ``config.json``; else None.

    Raises:
        ValueError: no such file, several in the directory, or the packages that read one are missing.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{source}: no such file")
    else:
        if not path.is_dir() or (path / "config.json").exists():
            return None
        files = sorted(path.glob("*.gguf"))
        if not files:
            return None
        if len(files) > 1:
            raise ValueError(
                f"{source}: has {len(files)} GGUF files: give one of them, {files[0].name} for example"
            )
        path = files[0]
    if not (is_gguf_available() and is_accelerate_available()):
        raise ValueError(
            f"{source}: a GGUF file is read by two more packages: pip install gguf accelerate"
        )
    return path


def place_of(source: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a target, and the argument that names a GGUF file there."""
    file = gguf_file(source)
    return (source, {}) if file is None else (str(file.parent), {"gguf_file": file.name})


def files_beside(source: str) -> Iterator[Path]:
    """All that lies in a local target's directory."""
    if is_local(source):
        path = Path(source)
        yield from (path if path.is_dir() else path.parent).iterdir()


def check_files(source: str) -> None:
    """Refuse files next to the weights that take more than a file may: devices, giants, a token's id of ten digits."""
    for path in files_beside(source):
        if path.suffix in (".json", ".jinja", ".model", ".txt", ".safetensors") and path.exists():
            if not path.is_file():  # reading would not end
                raise ValueError(f"{path.name}: no file: a device, a pipe or a directory")
            if path.suffix != ".safetensors" and path.stat().st_size > FILE:
                raise ValueError(f"{path.name}: larger than {FILE // 2**20} MiB")
            if path.name == "tokenizer.json" and (number := LONG_ID.search(path.read_bytes())):
                raise ValueError(
                    f"{path.name}: {number[1].decode()[:20]} is no token's id: download it again"
                )


def check_config_numbers(raw: dict[str, Any]) -> None:
    """Refuse a ``config.json`` whose numbers cannot be: transformers makes lists as long as they say."""
    layers = [1.0]
    experts = [1.0]
    for name, number in numbers(raw):
        most = next(most for pattern, most in LARGEST.items() if re.fullmatch(pattern, name))
        if not number <= most:  # NaN is not, either
            raise ValueError(
                f"config.json: {name} is {number:,}, at most {most:,} can be: correct it"
            )
        if name.endswith("layers"):
            layers.append(number)
        elif name.endswith("experts"):
            experts.append(number)
    if max(layers) * max(experts) > EXPERTS:
        raise ValueError(
            f"config.json: {max(layers):g} layers of {max(experts):g} experts are too many: correct it"
        )


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON document, by the last name above them."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(child, key if isinstance(key, str) else name)
    elif isinstance(value, int | float):
        yield printable(name)[:60], value


def check_sizes(
    source: str, revision: str | None, config: Any, described_by: Callable[[], PreTrainedModel]
) -> None:
    """Hold what a configuration describes against what the files' headers hold, before memory is taken for it.

    ``described_by`` makes the model of it, without weights.
    """
    with failing_in_one_line(source):
        tensors = 0
        held = 0
        gguf = gguf_file(source)
        for path in weight_files(source, revision) if gguf is None else [gguf]:
            try:
                shapes = _shapes(path)
            except (SafetensorError, OSError, ValueError, IndexError, KeyError) as error:
                raise ValueError(
                    f"{path.name}: {error}: it is damaged or cut off, download it again"
                ) from error
            tensors = tensors + len(shapes)
            held = held + sum(map(math.prod, shapes))
        if not tensors:
            return  # transformers says what it lacks
        layers = config.get_text_config(decoder=True).num_hidden_layers
        if layers > tensors:
            raise ValueError(
                f"config.json says {layers} layers, the files hold {how_many(tensors, 'tensor')}: correct it"
            )
        model = described_by()
        described = sum(part.numel() for part in (*model.parameters(), *model.buffers()))
        # values of one bit in 32-bit words
        packed = 32 if getattr(config, "quantization_config", None) else 1
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


def weight_files(source: str, revision: str | None = None) -> list[Path]:
    """The safetensors that transformers will read, from the Hub if need be; none where there are none."""
    index, whole = _index(source, revision)
    return (
        [whole]
        if whole
        else [_fetched(source, name, revision) for name in sorted(set(index.values()))]
    )


def read_tensors(
    source: str, revision: str | None, choose: Callable[[Collection[str]], Collection[str]]
) -> dict[str, Tensor]:
    """Return the tensors that ``choose`` picks among all names; files without one of them are neither opened nor
    fetched."""
    index, whole = _index(source, revision)
    if whole is not None:
        with safe_open(whole, framework="pt") as file:
            index = dict.fromkeys(file.keys(), whole.name)
    chosen = set(choose(index))
    tensors = dict[str, Tensor]()
    for file_name in sorted({index[name] for name in chosen}):
        with safe_open(whole or _fetched(source, file_name, revision), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in chosen if index[name] == file_name}
    return tensors


def _fetched(source: str, name: str, revision: str | None) -> Path:
    return (
        Path(source) / name
        if is_local(source)
        else Path(hf_hub_download(source, name, revision=revision))
    )


def _index(source: str, revision: str | None) -> tuple[dict[str, str], Path | None]:
    """The file of every tensor, or the only file of weights; nothing where there are none."""
    files: dict[str, Path] = {}
    for name in (WEIGHTS, INDEX):
        if is_local(source):
            if (Path(source) / name).exists():
                files[name] = Path(source) / name
        elif not files:
            with contextlib.suppress(EntryNotFoundError):
                files[name] = _fetched(source, name, revision)
    if WEIGHTS in files or not files:
        return {}, files.get(WEIGHTS)
    index = read_json(files[INDEX])
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX}: it has no weight_map of tensors to files: download it again")
    for name in names.values():
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(
                f"{INDEX}: {printable(name)[:100]} is no safetensors file next to it: download it again"
            )
    return names, None


def check_ends(source: str, model: PreTrainedModel) -> None:
    """Refuse an end of text that is no token."""
    with failing_in_one_line(source):
        config: Any = model.config
        rows = config.get_text_config(decoder=True).vocab_size
        for name, holder in (
            ("config.json", config),
            ("generation_config.json", model.generation_config),
        ):
            value = getattr(holder, "eos_token_id", None)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and (type(token) is not int or token >= rows):
                    raise ValueError(
                        f"{name}: eos_token_id {token!r} is none of {rows:,} tokens: correct it"
                    )


@contextlib.contextmanager
def failing_in_one_line(source: str) -> Iterator[None]:
    """Whatever transformers raises inside about a model's files, which may be anything, as a ValueError of one line."""
    try:
        yield
    except (torch.OutOfMemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # of tokenizers, in Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_line(error)
        if reason.startswith(f"{source}: "):
            raise
        if "trust_remote_code" in str(error):
            reason = "it runs its own code: read that code, then allow it with trust_remote_code"
        elif isinstance(error, OSError) and not Path(source).exists():
            reason = f"no such directory here, nor to be had from the Hugging Face Hub ({reason})"
        elif not isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
            reason = f"transformers cannot make a model of its files ({type(error).__name__}: {reason}): {REMEDY}"
        raise ValueError(f"{source}: {reason}") from error


def one_line(error: BaseException) -> str:
    return textwrap.shorten(printable(str(error)), 240, placeholder="…")
