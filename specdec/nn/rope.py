"""Rotary positions: a target's rope parameters, their frequencies, and the rotation (https://arxiv.org/abs/2104.09864)."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

# what transformers stumbles over in a rope block of any content
ROPE_FAULTS = (
    LookupError,
    TypeError,
    RuntimeError,
    ArithmeticError,
    ValueError,
    AttributeError,
    StrictDataclassError,
)


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """The rope block of a transformers config, flat, as one JSON-able dict; of one nested per layer type (Gemma 3) the
    full-attention block, since a drafter attends to everything, unless that belongs to heads of a width that the first
    layers have not (Gemma 4's ``proportional``). What multimodal models say of images is left out: a
    text's positions are the same in every dimension.

    Raises:
        ValueError: the config names no rope at all (ALiBi, learned positions).
    """
    # transformers 5; else rope_theta, with rope_scaling
    block = getattr(hf_config, "rope_parameters", None)
    block = block or getattr(hf_config, "rope_scaling", None) or {}
    full = block.get("full_attention") or {}
    full = {} if full.get("rope_type") == "proportional" else full
    flat = dict(full or block.get("sliding_attention") or block)
    for key in ("mrope_section", "mrope_interleaved"):
        flat.pop(key, None)
    # the older spelling; where both stand, transformers reads rope_type
    kind = flat.pop("type", None)
    flat.setdefault("rope_type", kind or "default")
    # the default frequencies, shared out among dimensions that are equal in a text
    if flat["rope_type"] == "mrope":
        flat["rope_type"] = "default"
    theta = flat.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise ValueError(
            f"the target's config ({type(hf_config).__name__}) has no rope_theta, and EAGLE drafters need rotary "
            "positions: give --model.drafter.rope_theta 10000, or another"
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
        ValueError: an unknown ``rope_type``, or a block that lacks what its type needs, or has what none can be
            rotated by.
    """
    with torch.device("cpu"):  # real numbers in a module on the meta device too
        inverse, factor = _frequencies(rope, head_dim, max_positions)
    if not (
        0 < 2 * len(inverse) <= head_dim and inverse.isfinite().all() and math.isfinite(factor)
    ):
        raise ValueError(
            f"the rope block {dict(rope)!s:.200} gives no finite frequencies for heads of {head_dim}"
        )
    return inverse, factor


def _frequencies(
    rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    if missing := {"rope_type", "rope_theta"} - set(rope):
        raise ValueError(f"the rope block {dict(rope)} lacks {' and '.join(sorted(missing))}")
    kind = rope["rope_type"]
    theta = rope["rope_theta"]
    share = rope.get("partial_rotary_factor", 1.0)
    for name, value, most in (
        ("rope_theta", theta, sys.float_info.max),
        ("partial_rotary_factor", share, 1),
    ):
        if type(value) not in (int, float) or not 0 < value <= most:
            raise ValueError(
                f"{name} must be a number above 0 and at most {most:g}, not {value!r:.60}"
            )
    if kind == "default":
        width = int(head_dim * share)
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return 1.0 / (theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"unknown rope_type {kind!r:.60}; known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    try:
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
            partial_rotary_factor=share,
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=max_positions
        )
        return inverse, float(factor)
    except ROPE_FAULTS as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the rope block {dict(rope)!s:.200} is not complete for rope_type {kind!r}: {reason:.200}"
        ) from error


def rope_scale(rope: Mapping[str, Any]) -> float:
    """What DeepSeek's attention multiplies the scores by where yarn stretches its rope: the square of ``0.1
    mscale_all_dim ln(factor) + 1`` (https://arxiv.org/abs/2309.00071)."""
    if rope.get("rope_type") != "yarn":
        return 1.0
    factor = rope.get("factor") or 1
    share = rope.get("mscale_all_dim") or 0
    if odd := [value for value in (factor, share) if type(value) not in (int, float) or value < 0]:
        raise ValueError(f"factor and mscale_all_dim of a rope must be numbers, not {odd[0]!r:.60}")
    return float(0.1 * share * math.log(max(factor, 1)) + 1) ** 2


class Rope(nn.Module):
    """Rotates queries and keys by their positions (https://arxiv.org/abs/2104.09864), halves convention.

    Legend: B batch, h heads, T nodes, d head width. Channels beyond the rotated width pass unchanged.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        # no buffer: a module cast to bfloat16 would round its frequencies with it
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
    cos = cos.to(x_BhTd.dtype)
    sin = sin.to(x_BhTd.dtype)
    width = cos.shape[-1]
    rotated = x_BhTd[..., :width]
    rest = x_BhTd[..., width:]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
