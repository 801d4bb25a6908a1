"""Faults that an export can have and an engine does not complain about: each is planted in a copy of its files.

``specdec parity --engine vllm`` asks of every fault how many of the proposals it compared would have been other tokens.
A fault that changes none of them could not have been seen, and the report says so.

Legend: H hidden, D draft vocabulary, V target vocabulary, h heads, d head width, r rotated width.
"""

import copy
import itertools
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.diagnostics.parity_files import HEAD, MAP, MARKOV_1, Files
from specdec.diagnostics.parity_settings import IDS, rotary
from specdec.utils.files import write_json

WINDOW = 8  # positions, of the planted one
LONGEST = 2**29  # positions; a longer window says that there is none
Weights = dict[str, Tensor]
Raw = dict[str, Any]


class Outcome(Enum):
    """The outcome of planting a fault."""

    PLANTED = "planted"
    NO_SUCH_PART = "the drafter has no such part"
    NOT_TRIED = "no change of this export's files makes it"


PLANTED, NO_SUCH_PART, NOT_TRIED = Outcome


class ExportFiles(NamedTuple):
    """An export's files, which a fault changes in place, and what it knows of the target."""

    raw: Raw  # config.json
    weights: Weights
    target_head_VH: Tensor
    target_layers: int

    @property
    def layer(self) -> Raw:
        """The keys that describe the drafter's layers, which the speculators format nests."""
        nested: Raw | None = self.raw.get("transformer_layer_config")
        return self.raw if nested is None else nested

    @property
    def eagle3(self) -> bool:
        """Whether it is an EAGLE-3 drafter's, chained or parallel, and not EAGLE-1's or DFlash's."""
        return any(name.endswith(".hidden_norm.weight") for name in self.weights)

    @property
    def block(self) -> bool:
        """Whether it is a block drafter's (DFlash, DSpark)."""
        return "hidden_norm.weight" in self.weights

    @property
    def latent(self) -> bool:
        """Whether its attention is MLA."""
        return bool(self.names("kv_b_proj.weight"))

    @property
    def ids(self) -> tuple[Raw, str]:
        """Where the ids of the target's states stand: a table, and the key in it."""
        if MARKOV_1 in self.weights:
            return self.raw, "target_layer_ids"
        if self.block:
            return self.raw.get("dflash_config", {}), "target_layer_ids"
        return self.raw, IDS

    def names(self, end: str) -> list[str]:
        """The tensors of this name, in whatever module."""
        return [name for name in self.weights if name == end or name.endswith(f".{end}")]


def _window(files: ExportFiles) -> Outcome:
    if files.block:
        return NOT_TRIED
    layers = files.layer["num_hidden_layers"]
    if not files.eagle3:  # method eagle counts layer_types from the target's first layer
        files.layer["target_layer_count"] = files.target_layers
    files.layer["layer_types"] = ["sliding_attention"] * layers
    files.layer["sliding_window"] = WINDOW
    files.layer["use_sliding_window"] = True
    return PLANTED


def _no_window(files: ExportFiles) -> Outcome:
    window = files.layer.get("sliding_window")
    if files.layer.get("layer_types") is None or window is None or window > LONGEST:
        return NO_SUCH_PART
    files.layer["layer_types"] = ["full_attention"] * files.layer["num_hidden_layers"]
    return PLANTED


def _rope_base(files: ExportFiles) -> Outcome:
    block = files.layer["rope_parameters"]
    block["rope_theta"] *= 10
    files.layer["rope_theta"] = block["rope_theta"]
    return PLANTED


def _rope_style(files: ExportFiles) -> Outcome:
    """Channels reordered so that turning those half a head apart is what turning neighbors was."""
    if files.latent:
        return NOT_TRIED
    parts = itertools.product("qk", ("proj.weight", "proj.bias", "norm.weight"))
    for name in [name for part in parts for name in files.names("_".join(part))]:
        by_head = files.weights[name].unflatten(0, (-1, files.layer["head_dim"]))
        files.weights[name] = torch.cat([by_head[:, 0::2], by_head[:, 1::2]], 1).flatten(0, 1)
    return PLANTED


def _position(files: ExportFiles) -> Outcome:
    """Queries turned by one position more than keys, which uneven norms or biases behind the projection forbid."""
    if files.latent or files.names("q_norm.weight") or files.names("q_proj.bias"):
        return NOT_TRIED
    inverse, _ = rotary(files.layer, files.layer["head_dim"])
    for name in files.names("q_proj.weight"):
        rows_hdi = files.weights[name].unflatten(0, (-1, files.layer["head_dim"]))
        r = len(inverse)
        cos_r1, sin_r1 = (f(inverse).to(rows_hdi.dtype)[:, None] for f in (torch.cos, torch.sin))
        low_hri, high_hri, rest_hdi = rows_hdi.tensor_split((r, 2 * r), 1)
        turned = [
            low_hri * cos_r1 - high_hri * sin_r1,
            high_hri * cos_r1 + low_hri * sin_r1,
            rest_hdi,
        ]
        files.weights[name] = torch.cat(turned, 1).flatten(0, 1)
    return PLANTED


def _boundary(files: ExportFiles) -> Outcome:
    """One boundary a layer off, wherever there is room for it; of DFlash the outputs of layers, from 0 to the last."""
    holder, key = files.ids
    last = files.target_layers - files.block
    if key not in holder:
        return NOT_TRIED if files.block else NO_SUCH_PART
    ids = list(holder[key])
    for place, boundary in enumerate(ids):
        for moved in (boundary - 1, boundary + 1):
            shifted = [*ids[:place], moved, *ids[place + 1 :]]
            if shifted == sorted(set(shifted)) and shifted[0] >= 0 and shifted[-1] <= last:
                holder[key] = shifted
                return PLANTED
    return NOT_TRIED


def _order(files: ExportFiles) -> Outcome:
    """The columns of fc moved on by one state."""
    holder, key = files.ids
    states = len(holder.get(key, ()))
    if states < 2:
        return NO_SUCH_PART
    files.weights["fc.weight"] = files.weights["fc.weight"].roll(
        files.weights["fc.weight"].shape[1] // states, 1
    )
    return PLANTED


def _norm(norm: str) -> Callable[[ExportFiles], Outcome]:
    """A norm's weights at ones, as an engine leaves them that finds none."""

    def plant(files: ExportFiles) -> Outcome:
        names = files.names(f"{norm}.weight") or files.names(f"{norm}.0.weight")
        for name in names:
            files.weights[name] = torch.ones_like(files.weights[name])
        return PLANTED if names else NO_SUCH_PART

    return plant


def _epsilon(files: ExportFiles) -> Outcome:
    files.layer["rms_norm_eps"] *= 100
    return PLANTED


def _map(files: ExportFiles) -> Outcome:
    """Every draft token one further, but the target's last."""
    if MAP not in files.weights:
        return NO_SUCH_PART
    offsets_D = files.weights[MAP]
    last_D = torch.arange(len(offsets_D)) + offsets_D >= len(files.target_head_VH) - 1
    files.weights[MAP] = offsets_D + (~last_D).to(offsets_D.dtype)
    return PLANTED


def _markov(files: ExportFiles) -> Outcome:
    """Of DSpark: what the Markov head makes of a token is what it made of the next one in the vocabulary."""
    if MARKOV_1 not in files.weights:
        return NO_SUCH_PART
    files.weights[MARKOV_1] = files.weights[MARKOV_1].roll(1, 0)
    return PLANTED


def _dtype(files: ExportFiles) -> Outcome:
    """Weights rounded to eight bits of mantissa."""
    for name, value in files.weights.items():
        if value.is_floating_point():
            files.weights[name] = value.to(torch.bfloat16).to(value.dtype)
    return PLANTED


def _tied_head(files: ExportFiles) -> Outcome:
    """The first rows of the target's head in place of the drafter's, which an engine takes that finds none."""
    head_DH = files.weights.get(HEAD)
    if head_DH is None:
        return NO_SUCH_PART
    if head_DH.shape[1] != files.target_head_VH.shape[1]:
        return NOT_TRIED
    files.weights[HEAD] = files.target_head_VH[: len(head_DH)].to(head_DH)
    return PLANTED


def _flipped(key: str) -> Callable[[ExportFiles], Outcome]:
    def plant(files: ExportFiles) -> Outcome:
        if not files.eagle3:
            return NO_SUCH_PART
        files.raw[key] = not files.raw.get(key)
        return PLANTED

    return plant


NORMS = (
    "hidden_norm", "input_layernorm", "post_attention_layernorm", "norm", "fc_norm", "input_norm", "q_norm",
)  # fmt: skip
FAULTS: dict[str, Callable[[ExportFiles], Outcome]] = {
    f"a window of {WINDOW}": _window,
    "the drafter's own window missing": _no_window,
    "rope base times 10": _rope_base,
    "rope style (interleaved for half-split)": _rope_style,
    "queries one position off": _position,
    "a boundary one layer off": _boundary,
    "boundaries in another order": _order,
    **{f"{norm} missing": _norm(norm) for norm in NORMS},
    "norms' epsilon times 100": _epsilon,
    "d2t one token off": _map,
    "the token before a draft one off (Markov head)": _markov,
    "weights rounded to bfloat16": _dtype,
    "the target's head in place of its own": _tied_head,
    "the other feedback (norm_output)": _flipped("norm_output"),
    "the other residual path (norm_before_residual)": _flipped("norm_before_residual"),
}  # fmt: skip


def planted(name: str, files: Files, target_head_VH: Tensor, target_layers: int) -> Files | Outcome:
    """A copy of an export's files with a fault of :data:`FAULTS`, or why there is none."""
    raw, weights = files
    copies = ExportFiles(copy.deepcopy(raw), dict(weights), target_head_VH.cpu(), target_layers)
    outcome = FAULTS[name](copies)
    return (copies.raw, copies.weights) if outcome is PLANTED else outcome


def write_files(files: Files, directory: Path) -> None:
    """An export's directory, a new one, of files that its checksums do not know."""
    raw, weights = files
    directory.mkdir(parents=True)
    write_json(directory / "config.json", json.loads(json.dumps(raw)))
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
