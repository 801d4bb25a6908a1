"""Where an exported directory is not what its drafter exports, by key and tensor: the names behind a difference.

This goes by the exporter's own tables, and so it proves nothing; the numbers do that.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.drafter import Drafter
from specdec.export import FORMATS, names, subject_of
from specdec.export.checkpoint import CONFIG, OURS
from specdec.export.format import Format, Served
from specdec.export.formats import format_of
from specdec.export.switches import Subject
from specdec.files import read_json
from specdec.target import Target

NOBODY = Served("", [], 1)  # what a checkpoint is served with says nothing of the drafter


class Finding(NamedTuple):
    """One difference."""

    text: str
    differs: bool = True
    """False for keys that are there besides or are left out, unless they switch something on."""


def differences(directory: Path, drafter: Drafter, target: Target) -> list[Finding]:
    """Every key of ``config.json`` and every tensor that is there and should not be, or lacks, or differs."""
    try:
        raw, subject, chosen = read_json(directory / CONFIG), subject_of(drafter, target), format_at(directory)
        tensors = (Finding(text) for text in _tensors(directory, chosen, drafter, subject))
        return [*_keys(raw, chosen, subject), *tensors]
    except (ValueError, SafetensorError) as error:
        return [Finding(" ".join(str(error).split()))]


def format_at(directory: Path) -> Format:
    """What a checkpoint says that it is, else what it looks like.

    Raises:
        ValueError: its files cannot be read.
    """
    ours = read_json(directory / OURS) if (directory / OURS).is_file() else {}
    return FORMATS.get(str(ours.get("exported_as"))) or format_of(read_json(directory / CONFIG))


def _keys(raw: dict[str, Any], chosen: Format, subject: Subject) -> Iterator[Finding]:
    wanted = json.loads(json.dumps(chosen.flat(chosen.config(subject, NOBODY))))
    found = chosen.flat(raw)
    for key, value in wanted.items():
        if key == "architectures":
            continue
        if key not in found:
            text = f"config.json lacks {key}, which is {json.dumps(value)} for this drafter"
            yield Finding(text, differs=value is True)
        elif found[key] != value:
            yield Finding(f"config.json: {key} is {json.dumps(found[key])}, for this drafter {json.dumps(value)}")
    if more := sorted(set(found) - set(wanted)):
        yield Finding(f"config.json has also {', '.join(more)}", differs=False)


def _tensors(directory: Path, chosen: Format, drafter: Drafter, subject: Subject) -> Iterator[str]:
    wanted = {names.canonical(name): (name, value) for name, value in chosen.tensors(drafter, subject).items()}
    found: dict[str | None, tuple[str, Tensor]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= {names.canonical(name): (name, value) for name, value in load_file(file).items()}
    for known, (name, value) in found.items():
        if known not in wanted:
            yield f"{name} is in the file, this drafter exports no such tensor"
            continue
        own = wanted[known][1].to(value.dtype)
        if own.shape != value.shape:
            yield f"{name} is {list(value.shape)}, of this drafter {list(own.shape)}"
        elif not torch.equal(own, value):
            yield f"{name} differs in {int((own != value).sum())} of {own.numel()} numbers"
    for known, (name, _) in wanted.items():
        if known not in found:
            yield f"{name} is not in the file"
