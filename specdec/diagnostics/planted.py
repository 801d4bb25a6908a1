"""Faults that an export can have and an engine does not complain about: each is planted in a copy of its files.

``specdec parity --engine vllm`` asks of every fault how many of the proposals it compared would have been other tokens.
A fault that changes none of them could not have been seen, and the report says so.

Legend: H hidden, D draft vocabulary, V target vocabulary, h heads, d head width, r rotated width.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.diagnostics.parity_reference import HEAD, IDS, MAP, Files, rotary
from specdec.utils.files import write_json

WINDOW = 8  # positions, of the planted one
Weights = dict[str, Tensor]


class ExportFiles(NamedTuple):
    """An export's files, which a fault changes in place, and what it knows of the target."""

    raw: dict[str, Any]  # config.json
    weights: Weights
    target_head_VH: Tensor
    target_layers: int

    @property
    def layer(self) -> dict[str, Any]:
        """The keys that describe the drafter's layers, which the speculators format nests."""
        nested: dict[str, Any] | None = self.raw.get("transformer_layer_config")
        return self.raw if nested is None else nested

    @property
    def eagle3(self) -> bool:
        """Whether it is an EAGLE-3 drafter's, chained or parallel, and not EAGLE-1's or DFlash's."""
        return any(name.endswith(".hidden_norm.weight") for name in self.weights)

    def names(self, end: str) -> list[str]:
        """The tensors of this name, in whatever module."""
        return [name for name in self.weights if name == end or name.endswith(f".{end}")]


def _window(files: ExportFiles) -> bool:
    layers = files.layer["num_hidden_layers"]
    files.layer["layer_types"] = ["sliding_attention"] * layers
    files.layer["sliding_window"] = WINDOW
    files.layer["use_sliding_window"] = True
    return files.eagle3


def _rope_base(files: ExportFiles) -> bool:
    block = files.layer["rope_parameters"]
    block["rope_theta"] *= 10
    files.layer["rope_theta"] = block["rope_theta"]
    return True


def _heads(files: ExportFiles, name: str) -> Tensor | None:
    """A projection's rows by head, (heads, d, in); None where the heads have norms, or the attention is another."""
    if files.names("q_norm.weight") or files.names("kv_b_proj.weight"):
        return None
    return files.weights[name].unflatten(0, (-1, files.layer["head_dim"]))


def _rope_style(files: ExportFiles) -> bool:
    """Rows reordered so that turning channels half a head apart is what turning neighbors was."""
    for name in files.names("q_proj.weight") + files.names("k_proj.weight"):
        rows_hdi = _heads(files, name)
        if rows_hdi is None:
            return False
        files.weights[name] = torch.cat([rows_hdi[:, 0::2], rows_hdi[:, 1::2]], 1).flatten(0, 1)
    return True


def _position(files: ExportFiles) -> bool:
    """Queries turned by one position more than keys."""
    inverse, _ = rotary(files.layer, files.layer["head_dim"])
    for name in files.names("q_proj.weight"):
        rows_hdi = _heads(files, name)
        if rows_hdi is None:
            return False
        r = 2 * len(inverse)
        cos_r1, sin_r1 = (f(inverse).to(rows_hdi.dtype)[:, None] for f in (torch.cos, torch.sin))
        low_hri, high_hri = rows_hdi[:, : r // 2], rows_hdi[:, r // 2 : r]
        turned = [low_hri * cos_r1 - high_hri * sin_r1, high_hri * cos_r1 + low_hri * sin_r1, rows_hdi[:, r:]]
        files.weights[name] = torch.cat(turned, 1).flatten(0, 1)
    return True


def _boundary(files: ExportFiles) -> bool:
    """One boundary a layer off, wherever there is room for it."""
    if IDS not in files.raw:
        return False
    ids = list(files.raw[IDS])
    for place, boundary in enumerate(ids):
        for moved in (boundary - 1, boundary + 1):
            shifted = [*ids[:place], moved, *ids[place + 1 :]]
            if shifted == sorted(set(shifted)) and shifted[0] >= 0 and shifted[-1] <= files.target_layers:
                files.raw[IDS] = shifted
                return True
    return False


def _order(files: ExportFiles) -> bool:
    """The columns of fc moved on by one state."""
    if len(files.raw.get(IDS, ())) < 2:
        return False
    width = files.weights["fc.weight"].shape[1] // len(files.raw[IDS])
    files.weights["fc.weight"] = files.weights["fc.weight"].roll(width, 1)
    return True


def _norm(end: str) -> Callable[[ExportFiles], bool]:
    """A norm's weights at ones, as an engine leaves them that finds none."""

    def plant(files: ExportFiles) -> bool:
        names = files.names(end)
        for name in names:
            files.weights[name] = torch.ones_like(files.weights[name])
        return bool(names)

    return plant


def _epsilon(files: ExportFiles) -> bool:
    files.layer["rms_norm_eps"] *= 100
    return True


def _map(files: ExportFiles) -> bool:
    """Every draft token one further, but the target's last."""
    if MAP not in files.weights:
        return False
    ids_D = torch.arange(len(files.weights[MAP])) + files.weights[MAP]
    files.weights[MAP] = files.weights[MAP] + (ids_D < len(files.target_head_VH) - 1).to(files.weights[MAP].dtype)
    return True


def _dtype(files: ExportFiles) -> bool:
    """Weights rounded to eight bits of mantissa."""
    for name, value in files.weights.items():
        if value.is_floating_point():
            files.weights[name] = value.to(torch.bfloat16).to(value.dtype)
    return True


def _tied_head(files: ExportFiles) -> bool:
    """The first rows of the target's head in place of the drafter's, which an engine takes that finds none."""
    head_DH = files.weights.get(HEAD)
    if head_DH is None or head_DH.shape[1] != files.target_head_VH.shape[1]:
        return False
    files.weights[HEAD] = files.target_head_VH[: len(head_DH)].to(head_DH)
    return True


def _flipped(key: str) -> Callable[[ExportFiles], bool]:
    def plant(files: ExportFiles) -> bool:
        files.raw[key] = not files.raw.get(key)
        return files.eagle3

    return plant


FAULTS: dict[str, Callable[[ExportFiles], bool]] = {  # each gives False where the drafter has no place for it
    f"a window of {WINDOW}": _window,
    "rope base times 10": _rope_base,
    "rope style (neighbors for halves)": _rope_style,
    "queries one position off": _position,
    "a boundary one layer off": _boundary,
    "boundaries in another order": _order,
    "hidden_norm missing": _norm("hidden_norm.weight"),
    "input_layernorm missing": _norm("input_layernorm.weight"),
    "post_attention_layernorm missing": _norm("post_attention_layernorm.weight"),
    "norm missing": _norm("norm.weight"),
    "fc_norm missing": _norm("fc_norm.0.weight"),
    "input_norm missing": _norm("input_norm.weight"),
    "q_norm missing": _norm("q_norm.weight"),
    "norms' epsilon times 100": _epsilon,
    "d2t one token off": _map,
    "weights rounded to bfloat16": _dtype,
    "the target's head in place of its own": _tied_head,
    "the other feedback (norm_output)": _flipped("norm_output"),
    "the other residual path (norm_before_residual)": _flipped("norm_before_residual"),
}  # fmt: skip


def planted(name: str, files: Files, target_head_VH: Tensor, target_layers: int) -> Files | None:
    """A copy of an export's files with a fault of :data:`FAULTS`; None where the drafter has no place for it."""
    raw, weights = files
    copies = ExportFiles(copy.deepcopy(raw), dict(weights), target_head_VH.cpu(), target_layers)
    return (copies.raw, copies.weights) if FAULTS[name](copies) else None


def write_files(files: Files, directory: Path) -> None:
    """An export's directory, a new one, of files that its checksums do not know."""
    raw, weights = files
    directory.mkdir(parents=True)
    write_json(directory / "config.json", json.loads(json.dumps(raw)))
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
