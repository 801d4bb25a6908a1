"""What an engine takes without a word and drafts wrongly with: each is found, at its depth and in its place."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.parity.differences import differences
from specdec.parity.run import DECODED, EXPORTED
from tests.parity_command.made import (
    IDS,
    Change,
    Weights,
    compared,
    drafter,
    drops,
    edit,
    exported,
    sets,
    target,
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
    named: str
    """What is said of the file."""
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
    "another token in d2t": Fault("eagle3", "d2t differs in 1 of 40", TOKENS, tensors=another_token),
    "hidden_norm at ones": Fault(
        "eagle3_1", "midlayer.hidden_norm.weight differs", LAYER, tensors=ones("midlayer.hidden_norm.weight")
    ),
    "input_layernorm at ones": Fault(
        "eagle3", "midlayer.input_layernorm.weight", LAYER, tensors=ones("midlayer.input_layernorm.weight")
    ),
    "norm at ones": Fault("eagle3", "norm.weight differs in 32 of 32", LAYER, tensors=ones("norm.weight")),
    "fc_norm at ones": Fault("eagle3_1", "fc_norm.1.weight", STATES, tensors=ones("fc_norm.1.weight")),
    "input_norm at ones": Fault("nvidia", "input_norm.weight", STATES, tensors=ones("input_norm.weight")),
    "EAGLE-1's norm at ones": Fault(
        "eagle1", "post_attention", LAYER, tensors=ones("layers.0.post_attention_layernorm.weight")
    ),
    "the second layer's norm at ones": Fault(
        "two_layer", "layers.1.input_layernorm", LAYER, tensors=ones("layers.1.input_layernorm.weight")
    ),
    "q_norm for k_norm": Fault(
        "qwen3", "k_norm", LAYER, tensors=swap(f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight")
    ),
    "states in another order": Fault("eagle3", "fc.weight differs", STATES, tensors=halves("fc.weight")),
    "fc_norm in another order": Fault(
        "eagle3_1", "fc_norm.2.weight", STATES, tensors=swap("fc_norm.0.weight", "fc_norm.2.weight")
    ),
    "states a layer off": Fault("eagle3_1", IDS, STATES, config=sets(**{IDS: [1, 2, 3]})),
    "the last state a layer off": Fault("first_and_last_state", IDS, STATES, config=sets(**{IDS: [0, 6]})),
    "another rope": Fault("eagle3", "rope_theta", LAYER, config=turned),
    "another rope, EAGLE-1": Fault("eagle1", "rope_parameters", LAYER, config=turned),
    "raw feedback": Fault("eagle3_1", "norm_output is false", FEEDBACK, config=sets(norm_output=False), depth=1),
    "normed feedback": Fault("eagle3", "norm_output is true", FEEDBACK, config=sets(norm_output=True), depth=1),
    "raw residual": Fault(
        "speculators", "norm_before_residual is false", LAYER, config=sets(norm_before_residual=False)
    ),
    "normed residual": Fault("eagle3", "norm_before_residual is true", LAYER, config=sets(norm_before_residual=True)),
    "a wider window": Fault("sliding_window", "sliding_window is 17", LAYER, config=sets(sliding_window=17)),
    "no window": Fault("sliding_window", "lacks layer_types", LAYER, config=drops("layer_types")),
    "another epsilon": Fault("eagle3", "rms_norm_eps", LAYER, config=sets(rms_norm_eps=1e-3)),
    "scaled logits": Fault("eagle3", "has also logit_scale", LAYER, config=sets(logit_scale=2.0)),
    "a row of the head": Fault(
        "eagle3_1", "lm_head.weight differs in 32 of 1280", LAYER, tensors=nudged("lm_head.weight")
    ),
    "a row of fc": Fault("eagle3", "fc.weight differs in 96 of 3072", STATES, tensors=nudged("fc.weight")),
    "a token's embedding": Fault("narrower", "embed_tokens", LAYER, tensors=nudged("embed_tokens.weight", 10)),
    "a square matrix transposed": Fault("square", "down_proj", LAYER, tensors=transposed(f"{MLP}.down_proj.weight")),
    "gate for up": Fault(
        "eagle3", "gate_proj", LAYER, tensors=swap(f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight")
    ),
    "the feature before the token": Fault("eagle3", "k_proj", LAYER, tensors=halves(f"{ATTENTION}.k_proj.weight")),
    "the feature before the token, EAGLE-1": Fault(
        "eagle1", "fc.weight differs in 2048 of 2048", LAYER, tensors=halves("fc.weight")
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_it_is_found(fault: Fault, tmp_path: Path) -> None:
    directory = exported(fault.preset, tmp_path / "out")
    edit(directory, fault.config, fault.tensors)
    found = compared(fault.preset, directory)
    assert not found.holds and found.lacking is None
    assert {row.verdict for row in found.rows if row.pair == DECODED} == {"equal"}
    wrong = {k: said - {"equal"} for k, said in verdicts(found, EXPORTED).items() if said != {"equal"}}
    assert min(wrong) == fault.depth and wrong[fault.depth] == {f"DIFFERENT: {fault.where}"}
    assert fault.named in " ".join(one.text for one in differences(directory, drafter(fault.preset), target()))
