"""EAGLE-1 for targets that scale their logits: trained with the scale, which is exported and imported."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, GraniteConfig, GraniteForCausalLM

from specdec.export import export_drafter, import_checkpoint, read_checkpoint
from specdec.export.read import contradictions
from specdec.target import Target
from specdec.training.building import new_drafter
from specdec.utils.reading import SUMS
from tests.export.made import same_state
from tests.tiny import llama_config, presets

SIZES = {
    key: value
    for key, value in llama_config().to_dict().items()
    if key.startswith(("num_", "vocab", "max_pos"))
}
SIZES |= {
    "hidden_size": 32,
    "intermediate_size": 48,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TARGETS = {
    0.125: lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    0.0625: lambda: Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.0625)),
}


@pytest.mark.parametrize("scale", TARGETS)
def test_the_scale_goes_into_the_checkpoint_and_comes_back(scale: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = Target(TARGETS[scale]())
    drafter = new_drafter(target, presets()["eagle1"]).requires_grad_(False)
    assert drafter.config.logit_scale == scale
    export_drafter(drafter, target, tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["logit_scale"] == scale
    back = import_checkpoint(read_checkpoint(tmp_path / "made"), target)
    assert not contradictions(drafter.config, back.config) and same_state(drafter, back)


def test_a_scale_that_is_none_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = Target(TARGETS[0.125]())
    export_drafter(
        new_drafter(target, presets()["eagle1"]).requires_grad_(False), target, tmp_path / "made"
    )
    (tmp_path / "made" / SUMS).unlink()
    path = tmp_path / "made" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logit_scale": -1}))
    with pytest.raises(ValueError, match="logit_scale is -1, wanted a number above 0"):
        import_checkpoint(read_checkpoint(tmp_path / "made"), target)
