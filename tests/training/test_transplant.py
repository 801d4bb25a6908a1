"""Starting from a layer of the target: the drafter's first attention answers as transformers' layer does."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.drafter import Drafter, Narrow
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import config_for
from specdec.training.transplant import FromTargetLayer, target_layer, transplant
from tests.tiny import VOCAB, presets, tiny_target

IDS_BT = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
VIEW = View.packed(torch.zeros_like(IDS_BT))


def started(target: Target, name: str = "eagle3", **design: Any) -> Drafter:
    spec = dataclasses.replace(presets()[name], **design)
    config = config_for(spec, target)
    return FromTargetLayer().drafter(config, target, torch.ones(VOCAB, dtype=torch.int64))


def output_of(module: Any, run: Any) -> Tensor:
    """What a module returns inside a call."""
    outputs = list[Any]()
    handle = module.register_forward_hook(lambda _, args, output: outputs.append(output))
    run()
    handle.remove()
    (output,) = outputs
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def attended(drafter: Drafter, target: Target) -> Tensor:
    aux_BTNH = target.forward(IDS_BT, VIEW, drafter.config.aux_layers).aux_BTNH
    feature_BTH = drafter.fuse(aux_BTNH)
    attention = drafter.layers.layers[0].attention
    return output_of(attention, lambda: drafter.step(IDS_BT, feature_BTH, VIEW))


@pytest.mark.parametrize("name", ["eagle3", "eagle3_1"])
def test_the_first_attention_is_that_of_the_target_s_layer(name: str) -> None:
    target = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        for layer in target.model.get_decoder().layers:
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
    drafter = started(target, name)
    boundary = drafter.config.aux_layers[-1]
    layers = target.model.get_decoder().layers
    with torch.no_grad():
        wanted = output_of(layers[boundary].self_attn, lambda: target.model(IDS_BT))

    def difference() -> float:
        return float((attended(drafter, target) - wanted).abs().max() / wanted.abs().max())

    assert difference() < 1e-3  # fc_norm adds its own epsilon
    # Another layer, or a drafter that also reads the token, answers otherwise.
    transplant(drafter, layers[boundary - 1])
    assert difference() > 0.1
    transplant(drafter, layers[boundary])
    nn.init.normal_(drafter.get_parameter("entry.token_qkv_proj.weight"), std=0.1)
    assert difference() > 0.1


def test_embedding_and_head_are_the_target_s() -> None:
    target = tiny_target(dtype=torch.float32)
    drafter = started(target)
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.head_weight()[drafter.vocab.target_ids_D])
    assert all(parameter.requires_grad for parameter in drafter.layers.parameters())


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ({"entry": Narrow()}, "needs fusion Concat, entry Wide"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "heads are not the target's"),
        ({"aux_layers": (1, 2, 7)}, "no layer of the target reads boundary 7"),
    ],
)
def test_a_design_that_cannot_read_a_layer_s_state_is_refused(
    design: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        started(tiny_target(dtype=torch.float32), **design)


def test_a_layer_with_more_than_llama_s_weights_is_refused() -> None:
    target = tiny_target(dtype=torch.float32, attention_bias=True)
    drafter = started(tiny_target(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"not like Llama's \(.*q_proj\.bias"):
        transplant(drafter, target_layer(target, 1))
