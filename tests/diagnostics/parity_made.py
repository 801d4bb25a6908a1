"""Pairs whose every part shows in the logits, and exports with one thing wrong."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.parity_compare import Compared, compare_drafting
from specdec.drafter import Drafter, DrafterSpec, LastLayer, Norms
from specdec.export import export_drafter, subject_of
from specdec.target import Target
from tests.export.made import made_drafter
from tests.tiny import deeper, presets, tiny_target, variants

REFUSED = ("narrow_fusion", "weighted_sum", "mtp")  # by vLLM
SPECS = presets() | variants() | {
    "whole_vocabulary": DrafterSpec(draft_vocab_size="all"),
    "first_and_last_state": DrafterSpec(aux_layers=[0, 7], draft_vocab_size=40),
    "four_states": DrafterSpec(aux_layers=[1, 2, 5, 6], draft_vocab_size=40),
    "narrower": DrafterSpec(hidden_size=24, draft_vocab_size=40),
    "five_layer": deeper()["five_layer"],
    "square": DrafterSpec(intermediate_size=32, draft_vocab_size=40),
    "final_state": DrafterSpec(LastLayer(), norms=Norms(), draft_vocab_size=40),
    "biases": DrafterSpec(attention_bias="qkv", draft_vocab_size=40),
    "eagle1_biases": replace(presets()["eagle1"], attention_bias="qkv"),
}  # fmt: skip
PROMPTS = [[(7 * n + 3) % 61 for n in range(20)], [11]]
DEPTH, NEW = 3, 18
FOLDER = tempfile.TemporaryDirectory(prefix="specdec-exported-")  # until the tests end
Weights = dict[str, Tensor]
Change = Callable[[Any], object]  # in place, of config.json or of the tensors
IDS = "eagle_aux_hidden_state_layer_ids"


def target(dtype: torch.dtype = torch.float64) -> Target:
    return _target(dtype)


def texts(dtype: torch.dtype = torch.float64) -> list[AnsweredText]:
    return _texts(dtype)


def drafter(name: str, dtype: torch.dtype = torch.float64) -> Drafter:
    return _drafter(name, dtype)


@cache
def _target(dtype: torch.dtype) -> Target:
    return tiny_target(dtype=dtype)


@cache
def _texts(dtype: torch.dtype) -> list[AnsweredText]:
    return answered_texts(target(dtype), [(str(ids), ids) for ids in PROMPTS], NEW, to_end=False)


@cache
def _drafter(name: str, dtype: torch.dtype) -> Drafter:
    return sharp(made_drafter(SPECS[name], target(dtype)))


def sharp(drafter: Drafter) -> Drafter:
    """Weights so large that attention has preferences and every part shows; what is the target's stays."""
    for name, weight in drafter.named_parameters():
        if weight.ndim == 2 and not name.startswith(("embed_tokens", "lm_head")):
            # EAGLE-1's states would grow beyond 16 bits
            weight.mul_(10 if drafter.config.norms.hidden else 4)
        if name.startswith("lm_head") and drafter.config.head == "own":
            weight.mul_(20)
    return drafter


def compared(name: str, directory: Path | None, dtype: torch.dtype = torch.float64) -> Compared:
    """The command's comparison, on the tiny target."""
    own = drafter(name, dtype)
    method = subject_of(own, target(dtype)).method
    return compare_drafting(target(dtype), own, texts(dtype), DEPTH, directory, method)


def holds(found: Compared) -> bool:
    """Whether training, decoding and the export are one and the same."""
    return found.not_compared is None and found.equal


def exported(name: str, directory: Path, format: str = "vllm") -> Path:
    """A copy of an export that is made once."""
    return Path(shutil.copytree(_exported(name, format), directory))


@cache
def _exported(name: str, format: str) -> Path:
    made = Path(FOLDER.name) / f"{name}-{format}"
    export_drafter(drafter(name), target(), made, format)
    return made


def edit(directory: Path, config: Change | None, tensors: Change | None) -> None:
    """Change an export in place, on purpose."""
    for name in ("SHA256SUMS", "specdec.json"):
        (directory / name).unlink(missing_ok=True)
    if config is not None:
        path = directory / "config.json"
        raw = json.loads(path.read_text())
        config(raw)
        path.write_text(json.dumps(raw))
    if tensors is not None:
        path = directory / "model.safetensors"
        found = load_file(path)
        tensors(found)
        save_file({name: value.contiguous() for name, value in found.items()}, path)


def verdicts(found: Compared, pair: str) -> dict[int, set[str]]:
    """By depth, over all places."""
    return {
        k: {row.verdict for row in found.rows if (row.pair, row.depth) == (pair, k)}
        for k in range(DEPTH + 1)
    }


def sets(**changes: Any) -> Change:
    """Keys of ``config.json`` with other values."""
    return lambda raw: raw.update(changes)


def drops(*names: str) -> Change:
    """Without these keys or tensors."""
    return lambda found: [found.pop(name) for name in names]


def transposed(name: str) -> Change:
    """A matrix with rows for columns."""
    return lambda w: w.update({name: w[name].T})
