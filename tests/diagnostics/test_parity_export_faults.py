"""What an engine takes without a word and drafts wrongly with is found at its place; what it would refuse is told."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.diagnostics.parity_compare import DECODED, EXPORTED
from tests.diagnostics.parity_made import (
    IDS,
    Change,
    Weights,
    compared,
    drops,
    edit,
    exported,
    holds,
    sets,
    transposed,
    verdicts,
)
from tests.tiny import HIDDEN

ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
STATES, FEEDBACK = "the target's states, or how they are fused", "what the step before handed on"
TOKENS, LAYER = "the tokens that the head knows", "the layer, its positions or the head"


class Fault(NamedTuple):
    """One thing wrong in an export."""

    preset: str
    where: str
    """What is said of the numbers."""
    config: Change | None = None
    tensors: Change | None = None
    depth: int = 0
    """The first that differs."""


def another_token(w: Weights) -> None:
    taken = set((w["d2t"] + torch.arange(40)).tolist())
    w["d2t"][7] = min(set(range(61)) - taken) - 7


def ones(name: str) -> Change:
    return lambda w: w[name].fill_(1)


def halves(name: str) -> Change:
    """The columns moved on by one width."""
    return lambda w: w.update({name: w[name].roll(HIDDEN, dims=1)})


def swap(one: str, two: str) -> Change:
    return lambda w: w.update({one: w[two].clone(), two: w[one].clone()})


def nudged(name: str, row: int = -1) -> Change:
    return lambda w: w[name][row].add_(1e-5)


def turned(raw: dict[str, Any]) -> None:
    raw["rope_parameters"]["rope_theta"] = raw["rope_theta"] = 5e5


FAULTS = {
    "another token in d2t": Fault("eagle3", TOKENS, tensors=another_token),
    "hidden_norm at ones": Fault("eagle3_1", LAYER, tensors=ones("midlayer.hidden_norm.weight")),
    "norm at ones": Fault("eagle3", LAYER, tensors=ones("norm.weight")),
    "fc_norm at ones": Fault("eagle3_1", STATES, tensors=ones("fc_norm.1.weight")),
    "input_norm at ones": Fault("nvidia", STATES, tensors=ones("input_norm.weight")),
    "q_norm for k_norm": Fault(
        "qwen3", LAYER, tensors=swap(f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight")
    ),
    "states in another order": Fault("eagle3", STATES, tensors=halves("fc.weight")),
    "states a layer off": Fault("eagle3_1", STATES, config=sets(**{IDS: [1, 2, 3]})),
    "the last state a layer off": Fault(
        "first_and_last_state", STATES, config=sets(**{IDS: [0, 6]})
    ),
    "another rope": Fault("eagle3", LAYER, config=turned),
    "raw feedback": Fault("eagle3_1", FEEDBACK, config=sets(norm_output=False), depth=1),
    "normed feedback": Fault("eagle3", FEEDBACK, config=sets(norm_output=True), depth=1),
    "raw residual": Fault("speculators", LAYER, config=sets(norm_before_residual=False)),
    "normed residual": Fault("eagle3", LAYER, config=sets(norm_before_residual=True)),
    "a wider window": Fault("sliding_window", LAYER, config=sets(sliding_window=17)),
    "another epsilon": Fault("eagle3", LAYER, config=sets(rms_norm_eps=1e-3)),
    "scaled logits": Fault("eagle3", LAYER, config=sets(logit_scale=2.0)),
    "a row of the head": Fault("eagle3_1", LAYER, tensors=nudged("lm_head.weight")),
    "a token's embedding": Fault("narrower", LAYER, tensors=nudged("embed_tokens.weight", 10)),
    "a square matrix transposed": Fault(
        "square", LAYER, tensors=transposed(f"{MLP}.down_proj.weight")
    ),
    "gate for up": Fault(
        "eagle3", LAYER, tensors=swap(f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight")
    ),
    "the feature before the token": Fault(
        "eagle3", LAYER, tensors=halves(f"{ATTENTION}.k_proj.weight")
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_an_engine_takes_without_a_word_is_found(fault: Fault, tmp_path: Path) -> None:
    directory = exported(fault.preset, tmp_path / "out")
    edit(directory, fault.config, fault.tensors)
    found = compared(fault.preset, directory)
    assert not found.equal and found.not_compared is None
    assert {row.verdict for row in found.rows if row.pair == DECODED} == {"equal"}
    wrong = {
        k: said - {"equal"} for k, said in verdicts(found, EXPORTED).items() if said != {"equal"}
    }
    assert min(wrong) == fault.depth and wrong[fault.depth] == {f"DIFFERENT: {fault.where}"}


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
    "d2t where none belongs": (
        "whole_vocabulary",
        add("d2t", 61),
        "d2t: the engine has no such tensor",
    ),
    "no norm": (
        "eagle3",
        drops("norm.weight"),
        "lacks norm.weight, which the engine leaves at ones",
    ),
    "no matrix": ("eagle3", drops(O_PROJ), "o_proj.weight, which the engine leaves uninitialized"),
    "no head": (
        "eagle3",
        drops("lm_head.weight"),
        "lacks lm_head.weight: .* first 40 rows of the target's",
    ),
    "no embedding": (
        "narrower",
        drops("embed_tokens.weight"),
        "lacks embed_tokens.weight, for which the target's",
    ),
    "a norm, EAGLE-1": (
        "eagle1",
        add("norm.weight", HIDDEN),
        "norm.weight: the engine has no such tensor",
    ),
    "a prefix": ("eagle3", prefixed, "model.fc.weight: the engine has no such tensor"),
    "a matrix transposed": (
        "eagle3",
        transposed(O_PROJ),
        r"o_proj.weight is \[48, 32\], the config says \[32, 48\]",
    ),
    "NaN": ("eagle3", lambda w: w["fc.weight"].fill_(float("nan")), "fc.weight holds NaN"),
}
CONFIGS = {
    "norms switched off": (
        "eagle3_1",
        sets(fc_norm=False),
        "fc_norm.0.weight: the engine has no such tensor",
    ),
    "norms switched on": ("eagle3", sets(norm_before_fc=True), "lacks input_norm.weight"),
    "biases switched on": ("eagle3", sets(bias=True), "a key bias, for which the engine leaves"),
    "attention biases switched on": (
        "eagle3",
        sets(attention_bias=True),
        "it lacks layers.0.self_attn.q_proj.bias",
    ),
    "no number of states": ("four_states", uncounted, "names 4 states and fc is made for 3"),
    "a state beyond the last": (
        "eagle3",
        sets(**{IDS: [2, 3, 8]}),
        r"states \[2, 3, 8\] of a target with 0 to 7",
    ),
    "no list at the top": ("eagle3", drops(IDS), "two runners would take different states"),
    "no fused states": (
        "eagle3",
        sets(eagle_config={"use_aux_hidden_state": False}),
        "fc.weight: the engine has no",
    ),
    "another vocabulary": ("eagle3", sets(vocab_size=60), "vocab_size is 60, the target has 61"),
    "another target": (
        "eagle3",
        sets(target_hidden_size=24),
        "target_hidden_size is 24, the target has 32",
    ),
    "no class": ("eagle3", drops("architectures"), r"architectures \[\] name no class"),
    "SGLang's class": ("eagle1", sets(architectures=["LlamaForCausalLMEagle"]), "name no class"),
    "no model_type": ("eagle3", drops("model_type"), "model_type is None"),
    "another activation": ("eagle3", sets(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "no rope": ("eagle3", drops("rope_theta", "rope_parameters"), "lacks rope_theta"),
    "an unknown rope": ("eagle3", spiral, "no frequencies can be made of the rope"),
    "a window, EAGLE-1": (
        "eagle1",
        sets(layer_types=["sliding_attention"]),
        "layer_types of the target's",
    ),
    "a layer too many": (
        "eagle3",
        sets(layer_types=["full_attention"] * 2),
        "layer_types names 2 layers of 1",
    ),
}


@pytest.mark.parametrize("fault", [*TENSORS, *CONFIGS])
def test_what_an_engine_refuses_is_told(fault: str, tmp_path: Path) -> None:
    name, change, message = (TENSORS | CONFIGS)[fault]
    directory = exported(name, tmp_path / "out")
    edit(directory, change if fault in CONFIGS else None, change if fault in TENSORS else None)
    found = compared(name, directory)
    assert not holds(found) and {row.pair for row in found.rows} == {DECODED}
    assert found.not_compared is not None and len(found.not_compared.splitlines()) == 1
    assert re.search(message, found.not_compared), found.not_compared


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    directory = exported("eagle3", tmp_path / "out")
    weights, config = directory / "model.safetensors", directory / "config.json"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged or cut off" in str(compared("eagle3", directory).not_compared)
    weights.unlink()
    assert "no .safetensors file" in str(compared("eagle3", directory).not_compared)
    config.write_text("3")
    assert "no JSON object" in str(compared("eagle3", directory).not_compared)
    config.unlink()
    assert "config.json is missing" in str(compared("eagle3", directory).not_compared)
