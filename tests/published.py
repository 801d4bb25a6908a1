"""A drafter's weights as papers and checkpoints have them: one matrix for each projection.

The embedding's half comes first in every matrix that reads embedding and feature.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig


def published(drafter: Drafter) -> dict[str, Tensor]:
    """The parameters, with the joined ones under the names of one matrix a projection; gradients flow back."""
    return _published(dict(drafter.named_parameters()), drafter.config)


def fill(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """The inverse: give the parameters the values of published weights.

    Every entry of a published weight is one entry of a parameter, so that the gradient of their products' sum is the
    values, each where it belongs.
    """
    with torch.enable_grad():
        leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in drafter.named_parameters()}
        made = _published(dict(leaves), drafter.config)
        assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in weights.items()}
        products = [(x * weights[name].detach()).sum() for name, x in made.items()]
        values = torch.autograd.grad(torch.stack(products).sum(), list(leaves.values()))
    with torch.no_grad():
        for parameter, value in zip(drafter.parameters(), values, strict=True):
            parameter.copy_(value)


def _published(w: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    kv = config.num_key_value_heads * config.head_dim
    made: dict[str, Tensor] = {}
    for name, x in w.items():
        at, last, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
        if last in ("token_fc", "token_qkv_proj"):
            continue  # goes into the matrix that reads the feature
        if last == "feature_fc":
            made[f"entry.fc.{kind}"] = torch.cat([w["entry.token_fc.weight"], x], dim=1) if kind == "weight" else x
        elif last == "qkv_proj":
            if at == "layers.layers.0.attention" and "entry.token_qkv_proj.weight" in w:
                x = torch.cat([w["entry.token_qkv_proj.weight"], x], dim=1)
            parts = x.split([len(x) - 2 * kv, kv, kv])
            made |= {f"{at}.{part}_proj.weight": y for part, y in zip("qkv", parts, strict=True)}
        elif last == "gate_up_proj":
            made |= {f"{at}.{part}_proj.weight": y for part, y in zip(("gate", "up"), x.chunk(2), strict=True)}
        else:
            made[name.replace(".attention.norm.", ".attention.")] = x
    return made
