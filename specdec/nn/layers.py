"""What a decoder layer is made of: attention that leaves masks and keys to the view, rotary positions, the gated
feed-forward, RMSNorm.

Each keeps of its forward pass only what its backward pass cannot make again cheaply: training memory depends on it.

Legend: B batch, T nodes, H width, h query heads, g key heads, d head width, W = (h + 2g) d.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.nn.backend import pointwise, wide
from specdec.nn.cache import attend
from specdec.nn.view import View

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


class _Lean(torch.autograd.Function):
    """A function whose gradient is written out, and for which only the inputs from ``first`` on are kept.

    Args:
        function: of inputs and options.
        gradient: of the outputs' gradients, the kept inputs and the options: a gradient, or None, for each input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable,
        gradient: Callable,
        first: int,
        options: tuple,
        *inputs: Tensor,
    ) -> Any:
        ctx.gradient = gradient
        ctx.options = options
        ctx.save_for_backward(*inputs[first:])
        return function(*inputs, *options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # else a graph for every mix of gradients wanted
        inputs = [x.detach() for x in ctx.saved_tensors]
        return None, None, None, None, *ctx.gradient(*grads, *inputs, *ctx.options)


@pointwise
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_wide = x.to(wide(x.dtype))
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


@pointwise
def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = wide(x.dtype)
    x_wide = x.to(kind)
    grad = grad.to(kind)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    normed = x_wide * scale
    by_normed = grad * weight.to(kind)
    grad_x = scale * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32 at least.

    (https://arxiv.org/abs/1910.07467), in the Llama form: the product with the weight is in the input's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., width); the dtype is kept."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return _Lean.apply(_norm, _norm_backward, 0, (self.eps,), x, self.weight)
        return _norm(x, self.weight, self.eps)


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


@pointwise
def _split_heads(
    qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv_BTnd.transpose(1, 2).split([h, g, g], dim=1)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.contiguous()


@pointwise
def _join_heads(
    q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int
) -> tuple[Tensor, None, None]:
    heads = torch.cat([apply_rope(q_BhTd, cos, -sin), apply_rope(k_BgTd, cos, -sin), v_BgTd], dim=1)
    return heads.transpose(1, 2).contiguous(), None, None


class NormHeads(nn.Module):
    """Norms on the queries and keys of every head before they are rotated, as in Qwen3."""

    def __init__(self, q_norm: nn.Module, k_norm: nn.Module, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sizes = [heads, kv_heads, kv_heads]

    def forward(self, qkv_BTnd: Tensor) -> Tensor:
        """(B, T, h + 2g, d) to the same."""
        q, k, v = qkv_BTnd.split(self.sizes, dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)


class Attention(nn.Module):
    """Base of the attentions: one matrix into queries, keys and values, which :meth:`split` takes apart, the
    view's keys, and one matrix back.

    Args:
        width: H, of input and output.
        projected: W, of what the first matrix makes.
        heads: h.
        value_dim: width of a head's values, as the last matrix reads them.
        layer: index under which the view's cache keeps this layer's keys.
        norm: on the heads, before queries and keys are rotated.
        qkv_bias: whether the first matrix has a bias.
        o_bias: whether the last one has.
    """

    def __init__(
        self,
        width: int,
        projected: int,
        heads: int,
        value_dim: int,
        layer: int,
        norm: nn.Module,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.value_dim = value_dim
        self.layer = layer
        self.norm = norm
        self.qkv_proj = nn.Linear(width, projected, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=o_bias)

    def forward(
        self,
        x_BTH: Tensor,
        view: View,
        rope: tuple[Tensor, Tensor],
        beside_BTW: Tensor | None = None,
        context_BCH: Tensor | None = None,
    ) -> Tensor:
        """(B, T, H) to the same, or (B, M, H) where the view asks for M nodes only; all give their keys.

        Args:
            rope: the tables for ``view.positions_BT``.
            beside_BTW: what else goes into queries, keys and values.
            context_BCH: further nodes, which have keys and values alone; they precede the T in rope, slots and cache.
        """
        qkv_BTW = self.qkv_proj(x_BTH)
        if beside_BTW is not None:
            qkv_BTW = qkv_BTW + beside_BTW
        if context_BCH is not None:
            qkv_BTW = torch.cat([self.qkv_proj(context_BCH), qkv_BTW], dim=1)
        q, k, v = self.split(qkv_BTW, rope)
        if context_BCH is not None:
            q = q[:, :, context_BCH.shape[1] :]
        visibility = view.visibility
        if view.wanted_BM is not None:
            visibility = visibility.of(view.wanted_BM)
            q = q.take_along_dim(view.wanted_BM[:, None, :, None], dim=2)
        if view.cache is None:
            out = attend(q, k, v, visibility)
        else:
            out = view.cache.attend(self.layer, q, k, v, visibility, view.slots_BT)
        return self.o_proj(out[..., : self.value_dim].transpose(1, 2).flatten(2))

    def split(self, qkv_BTW: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h, T, d), keys and values (B, g, T, d), rotated; values may end in zeros up to d."""
        raise TypeError(f"{type(self).__name__} must say what its projections are")


class GroupedAttention(Attention):
    """Multi-head attention with grouped keys (https://arxiv.org/abs/2305.13245) and an explicit head width.

    Queries, keys and values come from one matrix, in this order.

    Args:
        width: H, of input and output.
        layer: index under which the view's cache keeps this layer's keys.
        norm: on the heads, (B, T, h + 2g, d) to the same, before queries and keys are rotated.
        qkv_bias: whether the first projection has a bias.
        o_bias: whether the last one has.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layer: int,
        norm: nn.Module,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__(
            width, (heads + 2 * kv_heads) * head_dim, heads, head_dim, layer, norm, qkv_bias, o_bias
        )
        self.kv_heads = kv_heads
        self.head_dim = head_dim

    def split(self, qkv_BTW: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, h, T, d), keys and values (B, g, T, d), rotated."""
        qkv_BTnd = self.norm(qkv_BTW.unflatten(-1, (-1, self.head_dim)))
        if not qkv_BTnd.requires_grad:
            return _split_heads(qkv_BTnd, *rope, self.heads, self.kv_heads)
        # of the projection itself nothing is kept
        return _Lean.apply(
            _split_heads, _join_heads, 1, (self.heads, self.kv_heads), qkv_BTnd, *rope
        )


@pointwise
def _gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pointwise
def _gate_backward(grad: Tensor, both: Tensor) -> tuple[Tensor]:
    gate, up = both.chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    silu = gate * share
    return (torch.cat([grad * up * (share + silu * (1 - share)), grad * silu], dim=-1),)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202), without biases; one matrix for both."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        both = self.gate_up_proj(x)
        if not both.requires_grad:
            return self.down_proj(_gate(both))
        product = _Lean.apply(_gate, _gate_backward, 0, (), both)
        # the product is as wide as the rest of the layer, and cheap to make again: its shape is kept instead, and a
        # node that holds its factors as any operator does, so that gradient checkpointing can let go of them; the
        # hooks live as long as the graph, so they must not know the product itself
        held = _Lean.apply(lambda both: both.new_empty(0), None, 0, (), both).grad_fn
        place = product.data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: kept.shape if kept.data_ptr() == place else kept,
            lambda kept: (
                kept if isinstance(kept, Tensor) else _gate(*held.saved_tensors).view(kept)
            ),
        ):
            return self.down_proj(product)
