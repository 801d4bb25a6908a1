"""A first pass through a drafter's parts, which finds the part that does not fit and says how.

Legend: B batch, T nodes, N aux layers, H hidden, W queries, keys and values of the first layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec.drafter.drafter import Drafter
from specdec.drafter.entry import Entered

B, T = 2, 3


@torch.no_grad()
def dry_run(drafter: Drafter) -> None:
    """Send a few nodes through fusion, entry and recurrence, one after another; layers and head stay out of it.

    It runs where the drafter is, on the meta device too, and changes nothing in it.

    Raises:
        ValueError: a part fails, or returns another shape or dtype than the drafter needs; the message names the
            part, what it returned and what was wanted.
    """
    config, dtype, device = drafter.config, drafter.lm_head.weight.dtype, drafter.lm_head.weight.device
    N, H = len(config.aux_layers), config.hidden_size
    W = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    aux_BTNH = torch.zeros(B, T, N, config.target_hidden_size, dtype=dtype, device=device)
    h_BTH = torch.zeros(B, T, H, dtype=dtype, device=device)
    fusion, entry, recurrence = (
        f"{axis} {type(getattr(config, axis)).__name__}" for axis in ("fusion", "entry", "recurrence")
    )
    with _at_rest(drafter):
        _check(fusion, _call(fusion, drafter.fusion, drafter.norms.aux(aux_BTNH)), (B, T, H), dtype)
        read = _call(entry, drafter.entry.read, h_BTH)
        if not isinstance(read, Tensor) or read.shape[:2] != (B, T):
            made = f"shape {tuple(read.shape)}" if isinstance(read, Tensor) else f"a {type(read).__name__}"
            raise ValueError(f"{entry} read tokens into {made}, wanted a tensor of shape ({B}, {T}, ...)")
        entered = _call(entry, drafter.entry, read, h_BTH, h_BTH, drafter.norms)
        if not isinstance(entered, Entered):
            raise ValueError(f"{entry} returned a {type(entered).__name__}, wanted Entered(block, beside, residual)")
        _check(entry, entered.block_BTH, (B, T, H), dtype, " as block_BTH")
        if entered.beside_BTW is not None:
            _check(entry, entered.beside_BTW, (B, T, W), dtype, " as beside_BTW")
        _check(entry, entered.residual_BTH, (B, T, H), dtype, " as residual_BTH")
        _check(recurrence, _call(recurrence, drafter.recurrence, h_BTH, h_BTH), (B, T, H), dtype)


def _call(part: str, module: Callable[..., Any], *inputs: Any) -> Any:
    try:
        return module(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{part} cannot take tensors of shape {shapes}: {reason}") from error


def _check(part: str, made: Any, shape: tuple[int, ...], dtype: torch.dtype, role: str = "") -> None:
    if not isinstance(made, Tensor):
        raise ValueError(f"{part} returned a {type(made).__name__}{role}, wanted a tensor of shape {shape}")
    if made.shape != shape or made.dtype != dtype:
        raise ValueError(
            f"{part} returned shape {tuple(made.shape)} of {made.dtype}{role}, wanted {shape} of {dtype}: "
            "mend the module that it builds"
        )


@contextmanager
def _at_rest(drafter: Drafter) -> Iterator[None]:
    """In evaluation mode, so that no module counts batches or draws random numbers; afterwards as it was."""
    training = {module: module.training for module in drafter.modules()}
    drafter.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
