"""A start that gives the drafter the attention of one of the target's layers, and with it that layer's attention sink.

Legend: H hidden, W queries, keys and values together, F all states side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.drafter import GQA, Concat, Drafter, DrafterConfig, Wide
from specdec.target import Target
from specdec.training.building import FromTarget

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION = "layers.layers.0.attention"


@dataclass(frozen=True)
class FromTargetLayer(FromTarget):
    """Embedding, head and first attention as the target's, the rest at random.

    The fusion hands on the state at the drafter's last boundary alone. The first layer's attention reads it as the
    target's layer behind that boundary does: the same norm, queries, keys, values and output projection. The token's
    embedding adds nothing to them at first. All of these weights are trained like any other.

    A drafter that starts at random has almost no attention sink after short training. This one has the target's from
    the first step, so that an ablation can test what becomes of it along a draft (the attention drift of
    https://arxiv.org/abs/2605.09992).
    """

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """Return the drafter; ValueError if it or the target's layer has another kind of attention."""
        _check_design(config)
        drafter = super().drafter(config, target, counts_V)
        transplant(drafter, target_layer(target, config.aux_layers[-1]))
        return drafter


def _check_design(config: DrafterConfig) -> None:
    """Raise ValueError for a design that cannot read a state as a layer of the target does."""
    if not (
        type(config.fusion) is Concat
        and type(config.entry) is Wide
        and type(config.attention) is GQA
        and config.norms.hidden is True
        and config.norms.aux in ("none", "each")
        and config.hidden_size == config.target_hidden_size
    ):
        raise ValueError(
            "model.start FromTargetLayer needs fusion Concat, entry Wide, attention GQA, norms.hidden=true, norms.aux "
            "none or each, and the target's hidden size: change the design, or start with FromTarget"
        )


def target_layer(target: Target, boundary: int) -> nn.Module:
    """Return the target's layer that reads the state at a boundary; ValueError if there is none."""
    if not target.whole:
        raise ValueError(
            "model.start FromTargetLayer needs a layer of the target: set model.target.parts=false"
        )
    if boundary == target.num_layers:
        raise ValueError(
            f"model.start FromTargetLayer: no layer of the target reads boundary {boundary}, the last of aux_layers: "
            "choose lower ones"
        )
    return target.model.get_decoder().get_submodule(f"layers.{boundary}")


@torch.no_grad()
def transplant(drafter: Drafter, layer: nn.Module) -> None:
    """Give the drafter's first attention the weights of a target's layer.

    Args:
        layer: with ``input_layernorm`` and ``self_attn`` as transformers' Llama has them.

    Raises:
        ValueError: it has other tensors, or other sizes, than the drafter's attention can take.
    """
    sources = {f"self_attn.{name}.weight" for name in PROJECTIONS} | {"input_layernorm.weight"}
    tensors = {
        name: tensor
        for name, tensor in layer.state_dict().items()
        if name.startswith(("self_attn.", "input_layernorm."))
    }
    if tensors.keys() != sources:
        other = ", ".join(sorted(tensors.keys() ^ sources))
        raise ValueError(
            f"model.start FromTargetLayer: the target's layer is not like Llama's ({other}): start with FromTarget"
        )
    parameters = dict(drafter.named_parameters())
    token_WH = parameters["entry.token_qkv_proj.weight"]
    fc_HF = parameters["fusion.fc.weight"]
    H = fc_HF.shape[0]
    last_state_HF = torch.zeros_like(fc_HF)
    last_state_HF[:, -H:] = torch.eye(H)
    weights = {
        f"{ATTENTION}.qkv_proj.weight": torch.cat(
            [tensors[f"self_attn.{name}.weight"] for name in PROJECTIONS[:3]]
        ),
        f"{ATTENTION}.o_proj.weight": tensors["self_attn.o_proj.weight"],
        "norms.hidden.weight": tensors["input_layernorm.weight"],
        "entry.token_qkv_proj.weight": torch.zeros_like(token_WH),
        "fusion.fc.weight": last_state_HF,
    }
    if any(parameters[name].shape != weight.shape for name, weight in weights.items()):
        raise ValueError(
            "model.start FromTargetLayer: the drafter's heads are not the target's: leave num_attention_heads, "
            "num_key_value_heads and head_dim out of model.drafter"
        )
    for name, weight in weights.items():
        parameters[name].copy_(weight)
