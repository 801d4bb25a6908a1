"""Rotary positions out of a ``config.json``, in the halves convention.

Legend: M nodes, n heads, d head width, r rotated width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.parity.reference.misread import Misread


class Rotary(NamedTuple):
    """How fast every pair of channels turns."""

    inverse: Tensor  # (r / 2,) float32
    factor: float  # on cosine and sine


def rotary(config: Mapping[str, Any], head_dim: int) -> Rotary:
    """The rope that a config names; where both spellings stand, ``rope_parameters`` wins.

    Raises:
        Misread: it names no ``rope_theta``, or a scaling that cannot be worked out.
    """
    old = config.get("rope_scaling") or {}
    block = dict(config.get("rope_parameters") or {"rope_type": old.get("type", "default"), **old})
    theta = block.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise Misread("config.json lacks rope_theta")
    if block.get("rope_type", "default") != "default":
        return _scaled(block | {"rope_theta": float(theta)}, config["max_position_embeddings"], head_dim)
    width = int(head_dim * block.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    return Rotary(1.0 / (float(theta) ** powers), 1.0)


def _scaled(block: dict[str, Any], longest: int, head_dim: int) -> Rotary:
    """By transformers' formulas, which engines follow."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rope_parameters=block,
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](config, torch.device("cpu"), seq_len=longest)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Misread(f"config.json: no frequencies can be made of the rope {block}: {error!r}") from error
    return Rotary(inverse, float(factor))


def turn(x_nMd: Tensor, positions_M: Tensor, rope: Rotary) -> Tensor:
    """Channel j and channel j + r/2 turn together; the table is made in float32 and used in the dtype of ``x``."""
    angles_Mr = (positions_M.float()[:, None] * rope.inverse.to(positions_M.device)).repeat(1, 2)
    cos_Mr, sin_Mr = ((f(angles_Mr) * rope.factor).to(x_nMd.dtype) for f in (torch.cos, torch.sin))
    r = angles_Mr.shape[1]
    one, two = x_nMd[..., : r // 2], x_nMd[..., r // 2 : r]
    turned = x_nMd[..., :r] * cos_Mr + torch.cat([-two, one], -1) * sin_Mr
    return torch.cat([turned, x_nMd[..., r:]], -1)
