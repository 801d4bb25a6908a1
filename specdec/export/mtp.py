"""Multi-token prediction (MTP, https://arxiv.org/abs/2412.19437): a target's own module, out of its checkpoint as a
drafter, and back into a copy of the checkpoint.

transformers leaves the module out when it loads a target, so it is read by its tensors' names. Engines give it the
target's embedding and head, whatever else the checkpoint has under these names; so it is here.
"""

import dataclasses
import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, PostNorm, PreNorm, Recurrence
from specdec.drafter.io import FLOATS, check_finite, measure
from specdec.drafter.model import ROUTER_BIAS, skeleton_of
from specdec.export import tensors as named
from specdec.export.subject import EMBEDDING, HEAD, Subject
from specdec.export.tensors import Raw, Weights
from specdec.target import NotServable, Target, TargetSource
from specdec.target.files import weight_files
from specdec.training.building import config_for
from specdec.utils import hub
from specdec.utils.files import staged_directory
from specdec.utils.reading import SUMS, check_listed, read_json
from specdec.utils.text import how_many, tensor_fault

log = logging.getLogger(__name__)

FORMAT = "mtp"
# The files of a repository on the Hub that are copied.
COPIED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.md")
LAYER = "layers.layers.0.block."
EXPERTS = re.compile(r"(.*mlp\.experts)\.(gate_up|down)_proj")
SHARED = {"vocab.target_ids_D", EMBEDDING, HEAD}  # a module has none of these
# Engines do not read these, which some checkpoints have beside the module.
DOUBLES = {"embed_tokens.weight", "shared_head.head.weight"}


class Family(NamedTuple):
    """The names of the module's parts in a family's checkpoints, and what vLLM 0.32 feeds back."""

    prefix: str  # with {} for the number of the target's layers
    layer: str  # of the decoder layer, after the prefix
    names: Mapping[str, str]  # of what else there is, by our names
    recurrence: Recurrence = PostNorm()


_NEXTN = {
    "entry.fc": "eh_proj",
    "norms.embed": "enorm",
    "norms.hidden": "hnorm",
    "norms.output": "shared_head.norm",
}
_MTP = {"entry.fc": "fc", "norms.embed": "pre_fc_norm_embedding", "norms.hidden": "pre_fc_norm_hidden",
        "norms.output": "norm"}  # fmt: skip
_GLM = Family("model.layers.{}.", "", _NEXTN, PreNorm())  # transformers feeds back the normed state
_QWEN = Family("mtp.", "layers.0.", _MTP)
FAMILIES = {  # by the target's class
    "DeepseekV3ForCausalLM": Family("model.layers.{}.", "", _NEXTN),
    "Glm4MoeForCausalLM": _GLM,
    "Glm4MoeLiteForCausalLM": _GLM,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
}


# Why another family's module is not read, by the target's class.
UNREAD = {
    "MiMoForCausalLM": (
        "it reads [state; embedding], where every drafter here reads [embedding; state], and transformers has no class "
        "of the target's"
    ),
}
OF_A_MODULE = re.compile(r"(model\.)?mtp(_layers|_block)?\.|.*\.(eh_proj|enorm)\.weight$")


def family_of(directory: Path) -> Family | None:
    """Return the family whose module a directory may hold; None if it is no checkpoint of a known family.

    Raises:
        ValueError: it holds another family's module, which is not read; the message says why.
    """
    raw = read_json(directory / "config.json")
    architectures = raw.get("architectures") if isinstance(raw, dict) else None
    kind = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    names = (name for file in directory.glob("*.safetensors") for name in measure(file))
    if kind in FAMILIES or not any(map(OF_A_MODULE.match, names)):
        return FAMILIES.get(kind)
    why = UNREAD.get(kind, "its layer was not compared with transformers' own")
    raise ValueError(
        f"{directory}: it holds the module of multi-token prediction (MTP) of a target of class {kind or '(none)'}, "
        f"which is not read: {why}. Modules of {', '.join(FAMILIES)} are; for this one train a drafter with specdec fit"
    )


class Place(NamedTuple):
    """Where numbers stand: ``ours[index]`` are those of the checkpoint's tensor ``in_checkpoint``."""

    ours: str  # by its published name, see :func:`specdec.export.tensors.to_published`
    index: Any
    in_checkpoint: str


def module_places(ours: Weights, family: Family, layers: int) -> Iterator[Place]:
    """Yield where every tensor of the module stands in the checkpoint.

    There each expert has a separate tensor, and gates are apart from what they gate.
    """
    prefix = family.prefix.format(layers)
    for name, value in ours.items():
        module, _, kind = name.rpartition(".")
        if module in family.names:
            yield Place(name, ..., f"{prefix}{family.names[module]}.{kind}")
            continue
        published = f"{prefix}{family.layer}{name.removeprefix(LAYER)}"
        experts = EXPERTS.fullmatch(published)
        if experts is None:
            yield Place(name, ..., published)
            continue
        parts = {"down": slice(None)}
        if experts[2] == "gate_up":
            half = value.shape[1] // 2
            parts = {"gate": slice(half), "up": slice(half, None)}
        for expert in range(len(value)):
            for part, rows in parts.items():
                yield Place(name, (expert, rows), f"{experts[1]}.{expert}.{part}_proj.weight")


def _module_state(state: Weights, config: DrafterConfig) -> Weights:
    """Return a drafter's state without what the target gives it, by published names."""
    return named.to_published(
        {name: value for name, value in state.items() if name not in SHARED}, config
    )


def read_module(directory: Path, family: Family, target: Target) -> Drafter:
    """Return the module in a checkpoint of the target's as a drafter, in a dtype that holds all of it.

    Raises:
        ValueError: there is none, or more than one, or it is not of this target's shape, not finite, or quantized
            otherwise than to FP8.
    """
    raw = read_json(directory / "config.json")
    text_config = raw.get("text_config")
    config = raw | text_config if isinstance(text_config, dict) else raw
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        modules = config.get(key, 1)
        if modules != 1:
            raise ValueError(f"{directory}: {key} is {modules!r:.60}: a drafter is one such module")
    config = config_for(
        dataclasses.replace(DrafterSpec.preset("mtp"), recurrence=family.recurrence), target
    )
    skeleton = skeleton_of(config).state_dict()
    shapes = _module_state(skeleton, config)
    prefix = family.prefix.format(target.num_layers)
    places = {
        place.in_checkpoint: place for place in module_places(shapes, family, target.num_layers)
    }
    tensors = _read_tensors(directory, prefix)
    try:
        tensors = named.dequantized(tensors, named.fp8_block(raw))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    sizes = {name: list(shapes[at.ours][at.index].shape) for name, at in places.items()}
    if fault := tensor_fault({name: value.shape for name, value in tensors.items()}, sizes):
        raise ValueError(f"{directory}: of a module of multi-token prediction {fault}")
    check_finite(tensors)
    dtypes = {value.dtype for name, value in tensors.items() if not name.endswith(ROUTER_BIAS)}
    dtype = reduce(torch.promote_types, dtypes)
    ours = {
        name: torch.empty(value.shape, dtype=torch.float32 if name.endswith(ROUTER_BIAS) else dtype)
        for name, value in shapes.items()
    }
    for name, at in places.items():
        ours[at.ours][at.index] = tensors[name].to(ours[at.ours].dtype)
    drafter = Drafter(config, torch.arange(config.vocab_size)).to(dtype)
    state = named.from_published([name for name in skeleton if name not in SHARED], ours, config)
    shared = {EMBEDDING: target.embedding_weight(), HEAD: target.head_weight()}
    drafter.load_state_dict(drafter.state_dict() | shared | state)
    number = how_many(len(tensors), "tensor")
    log.info(
        "a module of multi-token prediction: %s %s*; embedding and head are the target's",
        number,
        prefix,
    )
    return drafter.eval().requires_grad_(False)


def _read_tensors(directory: Path, prefix: str) -> Weights:
    """Return the module's tensors in a checkpoint's files, without the doubles of the target's."""
    tensors: Weights = {}
    for file in weight_files(str(directory)):
        headers = {
            name: header
            for name, header in measure(file).items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in DOUBLES
        }
        if unreadable := {header.dtype for header in headers.values()} - {
            *FLOATS,
            *named.FP8.values(),
        }:
            raise ValueError(
                f"{file}: the module has weights of {unreadable.pop()}: only floats and FP8 can be read"
            )
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in headers}
    return tensors


def stitch(
    drafter: Drafter,
    target: Target,
    subject: Subject,
    served: TargetSource,
    directory: Path,
    draft_tokens: int,
) -> str:
    """Write a copy of the target's checkpoint whose module is the drafter, each tensor in the dtype that it had there;
    returns the line that serves it.

    Raises:
        NotServable: the target has no such module, or not of the drafter's design, or an FP8 one, which is read and
            not written.
        ValueError: a weight is not finite, or a directory is missing, exists or cannot be written.
    """
    source = Path(served.servable())
    if not source.is_dir():
        source = hub.fetch(served.servable(), served.revision, COPIED)
    family = family_of(source)
    if family is None:
        raise NotServable(
            f"{served.source}: --format mtp is for a target with a module: {', '.join(FAMILIES)}"
        )
    config = drafter.config.to_json()
    module_config = read_module(source, family, target).config.to_json()
    differing = [key for key in config if key != "target" and config[key] != module_config[key]]
    if differing:
        raise NotServable(
            f"vLLM serves the target's module as it is designed; the drafter differs in {differing}"
        )
    if subject.own_embedding or subject.own_head:
        raise NotServable(
            "engines give the module the target's embedding and head, and the drafter has others"
        )
    ours = _module_state(drafter.state_dict(), drafter.config)
    check_finite(ours)
    module = {
        place.in_checkpoint: ours[place.ours][place.index]
        for place in module_places(ours, family, target.num_layers)
    }
    headers: Raw = {}
    for file in weight_files(str(source)):
        headers |= measure(file)
    if any(headers[name].dtype in named.FP8.values() for name in module):
        raise NotServable(
            f"{served.source} has its module in FP8, and weights are not quantized here"
        )
    check_listed(source)
    with staged_directory(directory) as temporary:
        shutil.copytree(
            source, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", SUMS),
            copy_function=partial(_copy, module),
        )  # fmt: skip
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": draft_tokens})
    return shlex.join(
        ["vllm", "serve", str(directory.resolve()), "--speculative-config", speculative]
    )


def _copy(module: Weights, source: str, copied: str) -> None:
    """Copy a file, or write a shard with the module's tensors in place of its own and read it back."""
    names = set()
    if source.endswith(".safetensors"):
        names = module.keys() & measure(Path(source)).keys()
    if not names:
        shutil.copyfile(source, copied)
        return
    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(source)
    for name in names:
        tensors[name] = module[name].detach().to("cpu", tensors[name].dtype).contiguous()
    save_file(tensors, copied, metadata=metadata)
    written = load_file(copied)
    for name, value in tensors.items():
        if not torch.equal(_bits(written[name]), _bits(value)):
            raise ValueError(f"{copied}: {name} reads back otherwise than it was written")


def _bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor of any dtype."""
    return x.contiguous().flatten().view(torch.uint8)
