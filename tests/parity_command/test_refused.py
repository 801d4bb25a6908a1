"""What an engine would refuse, or would leave out without a word, is told by its name and not compared."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.parity.run import DECODED
from tests.parity_command.made import (
    IDS,
    Change,
    Weights,
    compared,
    drops,
    edit,
    exported,
    sets,
    transposed,
)
from tests.tiny import HIDDEN

O_PROJ = "midlayer.self_attn.o_proj.weight"
OUTSIDE = r"d2t: draft token \d+ and its offset make \d+, which is no token"


def absolute(w: Weights) -> None:
    w["d2t"] += torch.arange(len(w["d2t"]))


def add(name: str, *shape: int) -> Change:
    return lambda w: w.update({name: torch.ones(*shape, dtype=torch.float64)})


def prefixed(w: Weights) -> None:
    w["model.fc.weight"] = w.pop("fc.weight")


def uncounted(raw: dict[str, Any]) -> None:
    del raw["num_aux_hidden_states"], raw["eagle_config"][IDS]


def spiral(raw: dict[str, Any]) -> None:
    raw["rope_parameters"]["rope_type"] = "spiral"


TENSORS = {  # preset, change, what is told
    "absolute d2t": ("eagle3", absolute, OUTSIDE),
    "no d2t": ("eagle3", drops("d2t"), "lacks d2t, which the engine leaves at the first tokens"),
    "d2t where none belongs": ("whole_vocabulary", add("d2t", 61), "d2t: the engine has no such tensor"),
    "no norm": ("eagle3", drops("norm.weight"), "lacks norm.weight, which the engine leaves at ones"),
    "no matrix": ("eagle3", drops(O_PROJ), "o_proj.weight, which the engine leaves uninitialised"),
    "no head": ("eagle3", drops("lm_head.weight"), "lacks lm_head.weight: .* first 40 rows of the target's"),
    "no embedding": ("narrower", drops("embed_tokens.weight"), "lacks embed_tokens.weight, for which the target's"),
    "a head, EAGLE-1": ("eagle1", add("lm_head.weight", 61, HIDDEN), "lm_head.weight: the engine has no such tensor"),
    "a norm, EAGLE-1": ("eagle1", add("norm.weight", HIDDEN), "norm.weight: the engine has no such tensor"),
    "a prefix": ("eagle3", prefixed, "model.fc.weight: the engine has no such tensor"),
    "a matrix transposed": ("eagle3", transposed(O_PROJ), r"o_proj.weight is \[48, 32\], the config says \[32, 48\]"),
    "NaN": ("eagle3", lambda w: w["fc.weight"].fill_(float("nan")), "fc.weight holds NaN"),
}
CONFIGS = {
    "norms switched off": ("eagle3_1", sets(fc_norm=False), "fc_norm.0.weight: the engine has no such tensor"),
    "norms switched on": ("eagle3", sets(norm_before_fc=True), "lacks input_norm.weight"),
    "biases switched on": ("eagle3", sets(bias=True), "lacks layers.0.self_attn.q_proj.bias"),
    "no number of states": ("four_states", uncounted, "names 4 states and fc is made for 3"),
    "a state twice": ("eagle3", sets(**{IDS: [2, 3, 3]}), "names 2 states and fc is made for 3"),
    "a state beyond the last": ("eagle3", sets(**{IDS: [2, 3, 8]}), r"states \[2, 3, 8\] of a target with 0 to 7"),
    "no list at the top": ("eagle3", drops(IDS), "two runners would take different states"),
    "layers that are none": ("eagle3", sets(**{IDS: "234"}), "'234', no list of layers"),
    "no fused states": ("eagle3", sets(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    "another vocabulary": ("eagle3", sets(vocab_size=60), "vocab_size is 60, the target has 61"),
    "another target": ("eagle3", sets(target_hidden_size=24), "target_hidden_size is 24, the target has 32"),
    "no class": ("eagle3", drops("architectures"), r"architectures \[\] name no class"),
    "SGLang's class": ("eagle1", sets(architectures=["LlamaForCausalLMEagle"]), "name no class"),
    "nobody's class": ("eagle3", sets(architectures=["Gpt"]), r"\['Gpt'\] name no class"),
    "no model_type": ("eagle3", drops("model_type"), "model_type is None"),
    "another activation": ("eagle3", sets(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "no width": ("eagle3", drops("hidden_size"), "config.json lacks hidden_size"),
    "a width that is none": ("eagle3", sets(hidden_size="32"), "hidden_size is '32', no positive number"),
    "no rope": ("eagle3", drops("rope_theta", "rope_parameters"), "lacks rope_theta"),
    "an unknown rope": ("eagle3", spiral, "no frequencies can be made of the rope"),
    "a window, EAGLE-1": ("eagle1", sets(layer_types=["sliding_attention"]), "layer_types of the target's"),
    "a layer too many": ("eagle3", sets(layer_types=["full_attention"] * 2), "layer_types names 2 layers of 1"),
}


@pytest.mark.parametrize("fault", [*TENSORS, *CONFIGS])
def test_it_is_told(fault: str, tmp_path: Path) -> None:
    name, change, message = (TENSORS | CONFIGS)[fault]
    directory = exported(name, tmp_path / "out")
    edit(directory, change if fault in CONFIGS else None, change if fault in TENSORS else None)
    found = compared(name, directory)
    assert not found.holds and {row.pair for row in found.rows} == {DECODED}
    assert found.lacking is not None and len(found.lacking.splitlines()) == 1
    assert re.search(message, found.lacking), found.lacking


def test_the_two_tables_name_different_faults() -> None:
    assert not set(TENSORS) & set(CONFIGS)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    directory = exported("eagle3", tmp_path / "out")
    weights, config = directory / "model.safetensors", directory / "config.json"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged or cut off" in str(compared("eagle3", directory).lacking)
    weights.unlink()
    assert "no .safetensors file" in str(compared("eagle3", directory).lacking)
    config.write_text("[]")
    assert "no JSON object" in str(compared("eagle3", directory).lacking)
    config.unlink()
    assert "config.json is missing" in str(compared("eagle3", directory).lacking)
