"""Rotary position embedding with the target's own frequencies.

The frequencies come from transformers' own initialisers, so that a drafter rotates its queries exactly as its target
does, whichever of transformers' spellings the target's config uses.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """The rope block of a transformers config, flat, as one JSON-able dict.

    Understands ``rope_parameters`` (transformers 5), nested per layer type (Gemma 3: the full-attention block is
    taken, since a drafter attends to everything), and the older ``rope_theta`` with ``rope_scaling``.

    Raises:
        ValueError: the config names no rope at all (ALiBi, learned positions).
    """
    block = getattr(hf_config, "rope_parameters", None)
    if block and not any(name in block for name in LAYER_TYPES):
        flat = dict(block)
    elif block:
        flat = dict(block.get("full_attention") or block["sliding_attention"])
    else:
        flat = dict(getattr(hf_config, "rope_scaling", None) or {})
    kind = flat.pop("type", None)  # the older spelling; where both stand, transformers reads rope_type
    flat.setdefault("rope_type", kind or "default")
    theta = flat.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise ValueError(
            f"the target's config ({type(hf_config).__name__}) has no rope_theta: EAGLE drafters need rotary positions"
        )
    flat["rope_theta"] = float(theta)
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        value = flat.get(key, getattr(hf_config, key, None))
        if value is not None:
            flat[key] = value
    return flat


def frequencies(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies (rotated width / 2,) in float32 and the factor on cosine and sine.

    Length-dependent kinds are frozen at ``max_positions``, as the serving engines do it: ``longrope`` takes its
    long factors when the model is longer than it was originally, where transformers would take the short ones for
    a short text; ``dynamic`` stays at the trained length.

    Raises:
        ValueError: an unknown ``rope_type``, or a block that lacks what its type needs.
    """
    if missing := {"rope_type", "rope_theta"} - set(rope):
        raise ValueError(f"the rope block {dict(rope)} lacks {' and '.join(sorted(missing))}")
    kind = rope["rope_type"]
    if kind == "default":
        width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"unknown rope_type {kind!r}; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    try:
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_positions)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the rope block {dict(rope)} is not complete for rope_type {kind!r}: {error}") from error
    return inverse, float(factor)


class Rope(nn.Module):
    """Rotates queries and keys by their positions (https://arxiv.org/abs/2104.09864), halves convention.

    Legend: B batch, h heads, T nodes, d head width. Channels beyond the rotated width pass unchanged.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        # no buffer: a module cast to bfloat16 would round its frequencies with it
        with torch.device("cpu"):  # real numbers in a module on the meta device too
            self.inverse, self.factor = frequencies(rope, head_dim, max_positions)

    def tables(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (B, 1, T, rotated width), in float32."""
        if self.inverse.device != positions_BT.device:
            self.inverse = self.inverse.to(positions_BT.device)
        angles = positions_BT[:, None, :, None].float() * self.inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.factor, angles.sin() * self.factor


def apply_rope(x_BhTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of ``x`` by the tables of :meth:`Rope.tables`; by ``-sin`` it is the gradient."""
    cos, sin = cos.to(x_BhTd.dtype), sin.to(x_BhTd.dtype)
    width = cos.shape[-1]
    rotated, rest = x_BhTd[..., :width], x_BhTd[..., width:]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
