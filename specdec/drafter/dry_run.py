"""Whether what the parts of a drafter build fits together, before anything is trained.

Legend: B batch, T nodes, N aux layers, H hidden, W queries, keys and values of the first layer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.drafter.model import Drafter


# of a dry run
B = 2
T = 3


@torch.no_grad()
def dry_run(drafter: "Drafter") -> None:
    """Send a few nodes through norms, fusion, entry and recurrence, one after another; layers and head stay out of it.

    It runs where the drafter is, on the meta device too, and changes nothing in it.

    Raises:
        ValueError: a part fails, or returns another shape or dtype than the drafter needs; the message names the
            part, what it returned and what was wanted.
    """
    config = drafter.config
    weight = drafter.lm_head.weight
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    projected = sum(config.attention.projections(config).values())
    aux_BTNH = weight.new_zeros(B, T, len(config.aux_layers), config.target_hidden_size)
    h_BTH = weight.new_zeros(B, T, config.hidden_size)
    heads_BTnd = weight.new_zeros(B, T, heads, config.head_dim)
    fusion, entry, recurrence = (
        f"{axis} {type(getattr(config, axis)).__name__}"
        for axis in ("fusion", "entry", "recurrence")
    )
    norms = {
        site: (getattr(drafter.norms, site), h_BTH)
        for site in ("embed", "hidden", "input", "output")
    }
    norms |= {"aux": (drafter.norms.aux, aux_BTNH)}
    if config.norms.query_key:
        norms |= {"query_key": (drafter.layers.layers[0].attention.norm, heads_BTnd)}
    modes = {module: module.training for module in drafter.modules()}
    drafter.eval()  # so that no module counts batches or draws random numbers
    try:
        for site, (norm, x) in norms.items():
            _check(f"norms.{site}", _call(f"norms.{site}", norm, x), x)
        _check(fusion, _call(fusion, drafter.fusion, drafter.norms.aux(aux_BTNH)), h_BTH)
        read = _call(entry, drafter.entry.read, h_BTH)
        if not isinstance(read, Tensor) or read.shape[:2] != (B, T):
            output = (
                f"shape {tuple(read.shape)}"
                if isinstance(read, Tensor)
                else f"a {type(read).__name__}"
            )
            raise ValueError(
                f"{entry} read tokens into {output}, wanted a tensor of shape ({B}, {T}, ...)"
            )
        entered = _call(entry, drafter.entry, read, h_BTH, h_BTH, drafter.norms)
        if not hasattr(entered, "attn_input_BTH"):
            raise ValueError(
                f"{entry} returned a {type(entered).__name__}, wanted Entered(attn_input, qkv_bias, residual)"
            )
        _check(entry, entered.attn_input_BTH, h_BTH, " as attn_input_BTH")
        if entered.qkv_bias_BTW is not None:
            _check(
                entry, entered.qkv_bias_BTW, weight.new_zeros(B, T, projected), " as qkv_bias_BTW"
            )
        _check(entry, entered.residual_BTH, h_BTH, " as residual_BTH")
        _check(recurrence, _call(recurrence, drafter.recurrence, h_BTH, h_BTH), h_BTH)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _call(part: str, module: Callable[..., Any], *inputs: Any) -> Any:
    try:
        return module(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{part} cannot take tensors of shape {shapes}: {reason}") from error


def _check(part: str, made: Any, like: Tensor, role: str = "") -> None:
    shape = tuple(like.shape)
    if not isinstance(made, Tensor):
        raise ValueError(
            f"{part} returned a {type(made).__name__}{role}, wanted a tensor of shape {shape}"
        )
    if made.shape != shape or made.dtype != like.dtype:
        raise ValueError(
            f"{part} returned shape {tuple(made.shape)} of {made.dtype}{role}, wanted {shape} of {like.dtype}: "
            "mend the module that it builds"
        )
