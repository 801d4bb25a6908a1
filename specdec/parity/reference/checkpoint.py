"""A drafter's directory as vLLM 0.32.0 loads it, by its tensors' own names.

Legend: V target vocabulary, D draft vocabulary, H width of the target.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.parity.reference.misread import Misread
from specdec.parity.reference.settings import Settings, settings
from specdec.parity.reference.tensors import EMBEDDING, HEAD, MAP, compare


class Served(NamedTuple):
    """A drafter as the engine has it."""

    settings: Settings
    weights: dict[str, Tensor]
    """By the file's names, ``midlayer`` being ``layers.0``; embedding and head are there, whosever they are."""
    target_ids_D: Tensor
    """int64, the target's token for each of the drafter's."""


def load(directory: Path, method: str, embedding_VH: Tensor, head_VH: Tensor) -> Served:
    """Load a directory beside a target.

    Args:
        method: ``eagle`` or ``eagle3``, as it is served.
        embedding_VH: the target's token embedding, whose dtype and device all weights get.
        head_VH: its output head.

    Raises:
        Misread: the engine would not load it, or not as what it was.
    """
    read = settings(_config(directory / "config.json"), method)
    for key, told, wanted in zip(
        ("vocab_size", "target_hidden_size"), (read.vocab, read.target_width), embedding_VH.shape, strict=True
    ):
        if told != wanted:
            raise Misread(f"config.json: {key} is {told}, the target has {wanted}")
    found = dict(_tensors(directory, read))
    compare(found, read)
    shared = read.width == read.target_width
    if EMBEDDING not in found and not shared:
        raise Misread(f"it lacks {EMBEDDING}, for which the target's is too wide or too narrow")
    if HEAD not in found and not (shared and read.drafts == read.vocab):
        raise Misread(f"it lacks {HEAD}: the engine would take the first {read.drafts} rows of the target's")
    ids_D = _target_ids(found.pop(MAP, None), read).to(embedding_VH.device)
    weights = {EMBEDDING: embedding_VH, HEAD: head_VH}
    return Served(read, weights | {name: value.to(embedding_VH) for name, value in found.items()}, ids_D)


def _config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Misread(f"{path.name} is missing or no JSON") from error
    if not isinstance(value, dict):
        raise Misread(f"{path.name} is no JSON object")
    return value


def _tensors(directory: Path, read: Settings) -> Iterator[tuple[str, Tensor]]:
    """What the engine looks for a place for; the names left out here it drops without a word."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise Misread("there is no .safetensors file in it")
    for file in files:
        try:
            stored = load_file(file)
        except SafetensorError as error:
            raise Misread(f"{file.name} is damaged or cut off ({error})") from error
        for name, value in stored.items():
            if "t2d" in name or "rotary_emb.inv_freq" in name or (name.endswith(".bias") and not read.biases):
                continue
            yield name.replace("midlayer.", "layers.0."), value


def _target_ids(offsets_D: Tensor | None, read: Settings) -> Tensor:
    """A draft token's own number plus its offset."""
    ids_D = torch.arange(read.drafts)
    if offsets_D is not None:
        ids_D = ids_D + offsets_D.to(torch.int64)
        outside = ((ids_D < 0) | (ids_D >= read.vocab)).nonzero()
        if len(outside):
            draft = int(outside[0])
            raise Misread(f"d2t: draft token {draft} and its offset make {int(ids_D[draft])}, which is no token")
    return ids_D
