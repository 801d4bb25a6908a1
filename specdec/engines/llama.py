"""A llama.cpp server for a target in a GGUF file, with a drafter or alone, as a child process.

Where there is no ``llama-server``, the package xllamacpp stands in for it: llama.cpp's own server, built as a wheel.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec.engines.client import Endpoint
from specdec.engines.server import TIMEOUT, Server, check_flags, free_port, running_server
from specdec.export.formats import DrafterCheckpoint
from specdec.export.gguf import llama_arguments
from specdec.export.gguf_layouts import ARCHITECTURES
from specdec.target import TargetSource, load_config
from specdec.utils.extras import is_installed, require
from specdec.utils.numbers import Count, Depth, Port, Positive, Share, check_numbers

ENGINE = "llama.cpp"
VARIABLE = "SPECDEC_LLAMA_SERVER"
KEY = "LLAMA_API_KEY"  # llama.cpp's own variable
INSIDE = Path(__file__).parent / "inside_llama" / "server.py"
HOW = (
    'install a prebuilt one with pip install "specdec-lightning[llama]", or build llama.cpp and name its llama-server '
    f"by {VARIABLE}"
)
_SPECDECS = (
    "-m --model -md --model-draft --spec-draft-model --spec-type --spec-draft-n-max --spec-draft-p-min --draft-p-min "
    "--host --port"
)
REFUSED = dict.fromkeys(_SPECDECS.split(), "specdec gives it to llama.cpp itself") | {
    "--api-key": f"set {KEY} in the environment"
}
# Caches of keys and values, the target's and the drafter's.
CACHES = ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v")


def find_llama_server() -> list[str]:
    """Return the command of a llama.cpp server; ValueError, with a remedy, if there is none."""
    name = os.environ.get(VARIABLE)
    if name:
        path = shutil.which(name)
        if path is None:
            raise ValueError(
                f"{VARIABLE} {name}: no such executable: name a llama-server, or unset it to take that of the PATH or "
                "the package xllamacpp"
            )
        return [path]
    if path := shutil.which("llama-server"):
        return [path]
    if not is_installed("xllamacpp"):
        raise ValueError(f"there is no llama.cpp: {HOW}")
    return [sys.executable, "-I", str(INSIDE)]


def target_file(target: TargetSource, given: Path | None, is_exact: bool = False) -> Path:
    """Return the target's GGUF file.

    Args:
        is_exact: whether llama.cpp may round no more in it than the target's dtype does.

    Raises:
        ValueError: none is given and the target is none; or the file is not there, of another model, or rounded.
    """
    if given is None and not target.is_gguf:
        raise ValueError(
            f"llama.cpp reads GGUF files, and {target.source} is none: give the same model as --target_gguf FILE (from "
            "the Hub, or made by llama.cpp's convert_hf_to_gguf.py)"
        )
    file = given or Path(target.source)
    if not file.is_file():
        raise ValueError(f"--target_gguf {file}: no such file")
    description = read_description(file)
    _check_sizes(file, description.fields, target)
    if is_exact:
        _check_unquantized(file, description.types, target.dtype)
    return file


def _check_sizes(file: Path, fields: Mapping[str, Any], target: TargetSource) -> None:
    """Raise ValueError if the file is a drafter, or its fields are not of the target's sizes."""
    kind = fields.get("general.architecture")
    if kind in ARCHITECTURES:
        raise ValueError(f"--target_gguf {file}: it is a drafter: give the target's file")
    if target.is_gguf:
        return
    config = load_config(target.directory(), target.revision, target.trust_remote_code)
    sizes = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
    }
    for name, size in sizes.items():
        stored = fields.get(f"{kind}.{name}", size)
        if stored != size:
            raise ValueError(
                f"--target_gguf {file}: {name} is {stored} there, and {size} in {target.source}: give the same model"
            )


class Description(NamedTuple):
    """What a GGUF file says of itself."""

    fields: dict[str, Any]  # but no arrays
    types: set[str]  # of its matrices, such as F32 and Q8_0


def read_description(file: Path) -> Description:
    """Read a file's fields and the types of its matrices; ValueError if it is no GGUF file."""
    require("gguf", "llama", f"{file}: a GGUF file")
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types[:1] != [gguf.GGUFValueType.ARRAY]
        }
    except (ValueError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"--target_gguf {file}: not a GGUF file: {error}") from error
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    return Description(fields, {tensor.tensor_type.name for tensor in matrices})


def _check_unquantized(file: Path, types: set[str], dtype: str) -> None:
    """Raise ValueError if llama.cpp would round more in this file's matrices than the target's dtype does."""
    exact = {"F32"} if dtype == "float32" else {"F32", "F16", "BF16"}
    if others := types - exact:
        raise ValueError(
            f"--target_gguf {file}: it has matrices in {', '.join(sorted(others))}, which round otherwise than the "
            f"target in {dtype}: compare with a file that convert_hf_to_gguf.py makes with --outtype f32"
        )


@dataclass(frozen=True)
class LlamaLaunch:
    """The way that llama.cpp is started for a target; ValueError for a flag that specdec gives, or a wrong number."""

    command: Sequence[str]  # see :func:`find_llama_server`
    target: TargetSource  # the model that the file holds
    file: Path
    host: str = "127.0.0.1"
    port: Port = 8000  # 0 for one that is free
    timeout: Positive = TIMEOUT  # seconds until it must be healthy
    draft_tokens: Depth | None = None  # a pass; see DrafterCheckpoint.drafts
    extra: Sequence[str] = ()  # further flags of llama-server
    slots: Count | None = None  # texts at a time; by default as many as llama.cpp takes
    context: Count | None = None  # tokens of each text; by default as many as the model can have
    min_probability: Share = 0.0  # of a draft, below which it ends the chain

    format = "gguf"

    def __post_init__(self) -> None:
        check_flags(self.extra, REFUSED)
        check_numbers(LlamaLaunch, vars(self))

    def engine_name(self, server: Endpoint) -> str:
        """Return the name and version of a server that runs; the package xllamacpp does not name its build."""
        if str(INSIDE) in self.command:
            return f"{ENGINE} (xllamacpp {importlib.metadata.version('xllamacpp')})"
        build = json.loads(server.text("/props")).get("build_info", "of an unknown build")
        return f"{ENGINE} {build} ({self.command[0]})"

    def server(
        self, drafter: DrafterCheckpoint | None, log: Path, caching: bool = True
    ) -> contextlib.AbstractContextManager[Server]:
        """Return the server, to be entered.

        Args:
            caching: not used: a request says itself whether its prompt's cache is used.
        """
        drafts = drafter.drafts(self.draft_tokens) if drafter else 0
        port = self.port or free_port(self.host)
        arguments = llama_arguments(self.file, drafter, drafts, self.min_probability)
        arguments += ["--host", self.host, "--port", str(port)]
        slots = self.slots or 1
        if self.slots:
            arguments += ["--parallel", str(slots)]
        if self.context:
            arguments += ["--ctx-size", str(self.context * slots)]
        command = [*self.command, *arguments, *self.extra]  # the last of two flags counts
        return running_server(command, self.host, port, log, self.timeout, ENGINE)


def complete(
    endpoint: Endpoint, prompt: list[int], tokens: int, temperature: float = 0.0, ignore_eos: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Return a server's answer to a prompt of token ids, without its cache: ``tokens``, ``content``, ``timings``.

    Raises:
        RequestError: there is none.
    """
    body = {
        "prompt": prompt, "n_predict": tokens, "temperature": temperature, "ignore_eos": ignore_eos,
        "return_tokens": True, "cache_prompt": False,
    }  # fmt: skip
    return endpoint.complete("/completion", body)
