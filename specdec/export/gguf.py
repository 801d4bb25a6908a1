"""``export --format gguf``: an EAGLE-3, DFlash or DSpark drafter as one file for llama.cpp, as its own converter writes
one; see :mod:`specdec.export.gguf_layouts`.

Queries and keys of EAGLE-3 are stored in the order in which llama.cpp's rope rotates neighbors.
"""

import json
import logging
import shlex
import struct
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.drafter import DrafterConfig
from specdec.export.formats import DrafterCheckpoint, Format
from specdec.export.gguf_layouts import layout_of
from specdec.export.subject import Subject
from specdec.export.switches import LLAMA_CPP, SWITCHES, UNCHECKED
from specdec.export.tensors import DRAFT_TO_TARGET, MAPS, Weights
from specdec.nn.rope import frequencies
from specdec.target import NotServable, TargetSource
from specdec.utils.extras import require

log = logging.getLogger(__name__)

FILE = "drafter.gguf"
REMEDY = "Train with --model.drafter eagle3, dflash or dspark, or serve this drafter with vLLM (--format vllm)"
QUERIES = "attn_q.weight"
KEYS = "attn_k.weight"
MASK = "tokenizer.ggml.mask_token_id"
ROPE_FACTORS = "rope_freqs.weight"
# GGUF's numbers of the kinds of a token
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


class GgufFormat(Format):
    """``--format gguf``: one file of fields and tensors."""

    name: ClassVar[str] = "gguf"
    engine: ClassVar[str] = LLAMA_CPP
    weights_file: ClassVar[str] = FILE
    published: ClassVar[bool] = False  # others do publish it, but `import` does not read it
    matrices: ClassVar[tuple[str, ...]] = ()  # llama-quantize makes other files of it

    def check(self, subject: Subject) -> None:
        """Raise NotServable for what llama.cpp ignores or refuses, and for what was never compared."""
        try:
            super().check(subject)
        except NotServable as error:
            raise NotServable(f"{error}. {REMEDY}") from error
        if subject.block and (subject.config.rope["rope_type"], _rotated(subject.config)) != (
            "default",
            subject.config.head_dim,
        ):
            raise NotServable(
                f"what {LLAMA_CPP} makes of the rope {dict(subject.config.rope)} in a block was not compared. {REMEDY}"
            )
        unchecked = [
            switch.name
            for switch in SWITCHES
            if switch.used(subject) and switch.cell(LLAMA_CPP).evidence == UNCHECKED
        ]
        if unchecked:
            raise NotServable(f"what {LLAMA_CPP} makes of {'; '.join(unchecked)} was not compared")
        require("gguf", "llama", "writing a GGUF file")

    def write(
        self, folder: Path, weights: Weights, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> None:  # fmt: skip
        """Write the file, in the drafter's dtype except for norms, which llama.cpp has in float32."""
        fields = gguf_fields(subject.config) | token_fields(target, subject.config.vocab_size)
        architecture = layout_of(subject.config).architecture
        write_gguf(folder / FILE, architecture, fields, gguf_tensors(weights, subject.config))

    def verify(self, folder: Path, weights: Weights, subject: Subject) -> None:
        """Read the file back; ValueError if a field or a bit is another than it was meant to be."""
        fields, tensors = read_gguf(folder / FILE)
        lost = [
            name
            for name, value in gguf_fields(subject.config).items()
            if fields.get(name) != as_stored(value)
        ]
        wanted = gguf_tensors(weights, subject.config)
        names = {**wanted, **tensors}
        lost += [name for name in names if not _same(wanted.get(name), tensors.get(name))]
        if lost:
            raise ValueError(
                f"{folder / FILE}: {', '.join(lost)} read back otherwise than written: nothing was exported"
            )

    def command(
        self, directory: str, subject: Subject, target: TargetSource, draft_tokens: int
    ) -> str:
        """Return the line that serves a chain of drafts a pass; the target has to be a GGUF file, too."""
        model = target.source if target.is_gguf else "TARGET.gguf"
        drafter = DrafterCheckpoint.of(directory, subject)
        return shlex.join(["llama-server", *llama_arguments(Path(model), drafter, draft_tokens)])


def llama_arguments(
    target: Path,
    drafter: DrafterCheckpoint | None = None,
    draft_tokens: int = 0,
    min_probability: float = 0.0,
) -> list[str]:
    """Return the arguments of ``llama-server`` for a target, alone or with an exported drafter.

    Args:
        min_probability: a draft below it ends the chain; llama.cpp's own default is not 0.
    """
    arguments = ["--model", str(target)]
    if drafter is not None:
        file = Path(drafter.directory) / FILE
        arguments += ["--spec-draft-model", str(file), "--spec-type", f"draft-{drafter.method}"]
        arguments += ["--spec-draft-n-max", str(draft_tokens)]
        arguments += ["--spec-draft-p-min", f"{min_probability:g}"]
    return arguments


def gguf_fields(config: DrafterConfig) -> dict[str, Any]:
    """Return the file's fields that describe the drafter, by their full names."""
    rope = config.rope
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": _rotated(config),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    layout = layout_of(config)
    fields |= layout.fields(config)
    _, factor = _frequencies(config)
    if factor != 1.0:
        fields["rope.scaling.attn_factor"] = factor
    full = {f"{layout.architecture}.{name}": value for name, value in fields.items()}
    if config.drafting.fixed_drafts:
        full[MASK] = config.recurrence.mask_token_id  # type: ignore[attr-defined]
    return full


def gguf_tensors(weights: Weights, config: DrafterConfig) -> Weights:
    """Return the tensors by llama.cpp's names.

    Args:
        weights: as vLLM's format has them.

    Raises:
        NotServable: they are in float64, which llama.cpp cannot multiply.
    """
    layout = layout_of(config)
    names = layout.names(config)
    tensors: Weights = {}
    for name, value in weights.items():
        if name in MAPS:
            continue
        if value.dtype == torch.float64:
            raise NotServable(
                f"{LLAMA_CPP} cannot multiply float64 weights: save the drafter in float32 or bfloat16 first"
            )
        tensors[names[name]] = value.float() if value.dim() == 1 else value
    heads = {QUERIES: config.num_attention_heads, KEYS: config.num_key_value_heads}
    for name, value in tensors.items():
        kind = ".".join(name.split(".")[2:])
        if layout.neighbors and kind in heads:
            tensors[name] = neighbors_together(value, heads[kind], _rotated(config))
    if config.rope["rope_type"] != "default":
        tensors[ROPE_FACTORS] = _rope_factors(config)
    if DRAFT_TO_TARGET in weights:
        offsets_D = weights[DRAFT_TO_TARGET]
        tensors[DRAFT_TO_TARGET] = offsets_D + torch.arange(len(offsets_D))
    return tensors


def neighbors_together(weight: Tensor, heads: int, rotated: int) -> Tensor:
    """Return rows j and j + r/2 of every head's first r as rows 2j and 2j + 1, (heads * d, width).

    transformers rotates the former together, llama.cpp's rope the latter.
    """
    by_head = weight.unflatten(0, (heads, -1))
    turned = by_head[:, :rotated].unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, by_head[:, rotated:]], 1).flatten(0, 1).contiguous()


def _rotated(config: DrafterConfig) -> int:
    """Return how many channels of a head are rotated."""
    inverse_r, _ = _frequencies(config)
    return 2 * len(inverse_r)


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Return the drafter's inverse frequencies, (r / 2,) float32, and its factor on cosine and sine."""
    return frequencies(config.rope, config.head_dim, config.max_position_embeddings)


def _rope_factors(config: DrafterConfig) -> Tensor:
    """Return what llama.cpp divides the plain frequencies by, (r / 2,) float32.

    So every scaling is written: llama.cpp's own yarn rounds its ramp otherwise than transformers'.
    """
    plain = {"rope_type": "default", "rope_theta": config.rope["rope_theta"]}
    plain_r, _ = frequencies(plain, _rotated(config), config.max_position_embeddings)
    scaled_r, _ = _frequencies(config)
    return plain_r / scaled_r


def token_fields(target: TargetSource, size: int) -> dict[str, Any]:
    """Return the fields of the vocabulary: the target's tokens, so that programs which compare the two see one.

    llama.cpp tokenizes with the target's file alone; this one says no pre-tokenizer.
    """
    try:
        tokenizer = target.load_tokenizer()
    except ValueError as error:
        log.warning(
            "the file names no tokens, only their numbers, because there is no tokenizer: %s", error
        )
        tokenizer = None
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    if tokenizer is not None:
        for token, number in tokenizer.get_vocab().items():
            if number < size:
                tokens[number] = token
                kinds[number] = USER_DEFINED if number in tokenizer.added_tokens_decoder else NORMAL
        for number in tokenizer.all_special_ids:
            if number < size:
                kinds[number] = CONTROL
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": _merges(tokenizer),
    }
    for name in ("bos", "eos"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None and number < size:
            fields[f"tokenizer.ggml.{name}_token_id"] = number
    return fields


def _merges(tokenizer: Any) -> list[str]:
    """Return the merges of byte-pair encoding; a pair that never applies for a tokenizer of another kind.

    llama.cpp refuses a vocabulary without any.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())
    ]
    return merges or ["[PAD] [PAD]"]


def write_gguf(path: Path, architecture: str, fields: dict[str, Any], tensors: Weights) -> None:
    """Write one file of fields and tensors, little-endian."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        _add_field(writer, key, value)
    for name, value in tensors.items():
        kind = None
        array = value
        if value.dtype == torch.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            array = value.view(torch.uint8)
        writer.add_tensor(name, array.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_field(writer: Any, key: str, value: Any) -> None:
    """Add a field in the type that llama.cpp reads it in."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def read_gguf(path: Path) -> tuple[dict[str, Any], Weights]:
    """Return a file's fields and tensors as :func:`write_gguf` took them; floats as float32 holds them."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors: Weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(tensor.data.copy())
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            value = value.view(torch.bfloat16)
        tensors[tensor.name] = value
    return fields, tensors


def as_stored(value: Any) -> Any:
    """Return a field's value as the file holds it: floats have 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return False
    return first.dtype == second.dtype and torch.equal(first, second)
