"""Published checkpoints, laid out by hand, say through ``import`` what the engine's reference reads in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.diagnostics.parity_compare import EXPORTED, compare_drafting
from specdec.export import import_checkpoint, read_checkpoint
from specdec.target import Target
from tests.diagnostics.parity_made import DEPTH, holds, target, texts
from tests.export.test_read import HIDDEN, IDS, VOCAB, D, eagle1, eagle3, flat, nested, written
from tests.tiny import LAYERS

Laid = tuple[dict[str, Any], dict[str, Tensor]]


def safeailab() -> Laid:
    return flat(), eagle3()


def specforge() -> Laid:
    return flat(eagle_config={IDS: [1, 2, 4], "use_aux_hidden_state": True}), eagle3()


def automodel() -> Laid:
    tensors = eagle3("layers.0.") | {
        f"fc_norm.{n}.weight": 1 + torch.rand(HIDDEN) for n in range(3)
    }
    tensors = {
        name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": x
        for name, x in tensors.items()
    }
    return flat(fc_norm=True, norm_output=True, eagle_config={IDS: [0, 2, 4]}), tensors


def nvidia() -> Laid:
    """Ordered by frequency, the last state among the three, one norm over all."""
    tensors = eagle3("layers.0.") | {"input_norm.weight": 1 + torch.rand(3 * HIDDEN)}
    tensors["d2t"] = torch.randperm(VOCAB)[:D] - torch.arange(D)
    del tensors["t2d"]
    inner = {IDS: [3, 5, LAYERS], "use_aux_hidden_state": True, "norm_before_fc": True}
    return flat(eagle_config=inner), tensors


def speculators() -> Laid:
    tensors = eagle3("layers.0.") | {"input_norm.weight": 1 + torch.rand(3 * HIDDEN)}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    return nested(norm_before_fc=True, norm_output=True, **{IDS: [2, 4, 6]}), tensors


def first() -> Laid:
    """EAGLE-1 of LLaMA 3, whose entry has no bias."""
    config = {**flat(), "architectures": ["EagleLlamaForCausalLM"]}
    del config["draft_vocab_size"]
    return config, {
        name: x for name, x in eagle1().items() if name not in ("fc.bias", "embed_tokens.weight")
    }


LAYOUTS: dict[str, tuple[Callable[[], Laid], list[int]]] = {
    "safeailab": (safeailab, [2, 3, 4]),
    "specforge": (specforge, [2, 3, 5]),
    "automodel": (automodel, [1, 3, 5]),
    "nvidia": (nvidia, [3, 5, LAYERS]),
    "speculators": (speculators, [2, 4, 6]),
    "eagle1": (first, [LAYERS]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_import_says_what_the_reference_reads(name: str, tmp_path: Path) -> None:
    """Where a layout names states or tensors as vLLM's runners do not agree on, the reference is told them plainly."""
    laid, states = LAYOUTS[name]
    config, tensors = laid()
    tensors = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
    directory, of = written(tmp_path / name, config, tensors), target()
    drafter = import_checkpoint(read_checkpoint(directory), of)
    method = "eagle" if name == "eagle1" else "eagle3"
    if method == "eagle3":
        config["eagle_config"] = {
            key: value for key, value in config.get("eagle_config", {}).items() if key != IDS
        }
        (directory / "config.json").write_text(json.dumps(config | {IDS: states}))
        save_file(
            {name.removeprefix("model."): x for name, x in tensors.items()},
            directory / "model.safetensors",
        )
    found = compare_drafting(of, drafter, texts(), DEPTH, directory, method)
    assert holds(found), [row.verdict for row in found.rows if not row.equal]
    compared = [row for row in found.rows if row.pair == EXPORTED]
    assert {row.depth for row in compared} == set(range(DEPTH + 1)) and all(
        row.slots for row in compared
    )
    other = _swapped(of, drafter, name)
    assert not holds(compare_drafting(other, drafter, texts(), DEPTH, directory, method))


def _swapped(of: Target, drafter: Any, name: str) -> Target:
    """The same target; the drafter's first matrix is changed in place, so that the comparison can fail."""
    drafter.state_dict()[
        "entry.feature_fc.weight" if name == "eagle1" else "fusion.fc.weight"
    ].mul_(1.01)
    return of
