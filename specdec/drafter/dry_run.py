"""A first pass through a drafter's parts: it finds the part that does not fit and says how, and counts what each costs.

Legend: B batch, T nodes, N aux layers, H hidden, W queries, keys and values of the first layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specdec.drafter.config import DrafterConfig
from specdec.drafter.entry import Entered, EntryModule
from specdec.drafter.model import Drafter, built

B, T = 2, 3


@torch.no_grad()
def dry_run(drafter: Drafter) -> None:
    """Send a few nodes through fusion, entry and recurrence, one after another; layers and head stay out of it.

    It runs where the drafter is, on the meta device too, and changes nothing in it.

    Raises:
        ValueError: a part fails, or returns another shape or dtype than the drafter needs; the message names the
            part, what it returned and what was wanted.
    """
    config, weight = drafter.config, drafter.lm_head.weight
    N, H, d = len(config.aux_layers), config.hidden_size, config.head_dim
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    aux_BTNH = weight.new_zeros(B, T, N, config.target_hidden_size)
    h_BTH, heads_BTnd = weight.new_zeros(B, T, H), weight.new_zeros(B, T, heads, d)
    fusion, entry, recurrence = (
        f"{axis} {type(getattr(config, axis)).__name__}" for axis in ("fusion", "entry", "recurrence")
    )
    norms = {site: (getattr(drafter.norms, site), h_BTH) for site in ("embed", "hidden", "input", "output")}
    norms |= {"aux": (drafter.norms.aux, aux_BTNH), "query_key": (drafter.layers.layers[0].attention.norm, heads_BTnd)}
    modes = {module: module.training for module in drafter.modules()}
    drafter.eval()  # so that no module counts batches or draws random numbers
    try:
        for site, (norm, x) in norms.items():
            _check(f"norms.{site}", _call(f"norms.{site}", norm, x), x)
        _check(fusion, _call(fusion, drafter.fusion, drafter.norms.aux(aux_BTNH)), h_BTH)
        read = _call(entry, drafter.entry.read, h_BTH)
        if not isinstance(read, Tensor) or read.shape[:2] != (B, T):
            made = f"shape {tuple(read.shape)}" if isinstance(read, Tensor) else f"a {type(read).__name__}"
            raise ValueError(f"{entry} read tokens into {made}, wanted a tensor of shape ({B}, {T}, ...)")
        entered = _call(entry, drafter.entry, read, h_BTH, h_BTH, drafter.norms)
        if not isinstance(entered, Entered):
            raise ValueError(f"{entry} returned a {type(entered).__name__}, wanted Entered(block, beside, residual)")
        _check(entry, entered.block_BTH, h_BTH, " as block_BTH")
        if entered.beside_BTW is not None:
            _check(entry, entered.beside_BTW, heads_BTnd.flatten(2), " as beside_BTW")
        _check(entry, entered.residual_BTH, h_BTH, " as residual_BTH")
        _check(recurrence, _call(recurrence, drafter.recurrence, h_BTH, h_BTH), h_BTH)
    finally:
        for module, mode in modes.items():
            module.training = mode


class PartFlops(NamedTuple):
    """Floating point operations per token of the parts that differ from design to design, in matrix products."""

    fuse: int  # the target's states to a feature, once for each token
    read: int  # the entry's share of the token embedding, once for each token, however many steps read it
    enter: int  # the entry's share of the feature, in every step


@torch.no_grad()
def part_flops(config: DrafterConfig) -> PartFlops:
    """Count a design's operations as torch runs it, on the meta device: a user's own parts are counted as ours are."""
    with torch.device("meta"):
        norms, fusion, entry = (
            config.norms.build(config),
            config.fusion.build(config),
            built("entry", config, EntryModule),
        )
        aux_BTNH = torch.empty(B, T, len(config.aux_layers), config.target_hidden_size)
        h_BTH = torch.empty(B, T, config.hidden_size)
        read = entry.read(h_BTH)
        return PartFlops(_flops(fusion, aux_BTNH), _flops(entry.read, h_BTH), _flops(entry, read, h_BTH, h_BTH, norms))


def _flops(run: Callable[..., Any], *inputs: Any) -> int:
    """Per token."""
    with FlopCounterMode(display=False) as counter:
        run(*inputs)
    return counter.get_total_flops() // (B * T)


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
        raise ValueError(f"{part} returned a {type(made).__name__}{role}, wanted a tensor of shape {shape}")
    if made.shape != shape or made.dtype != like.dtype:
        raise ValueError(
            f"{part} returned shape {tuple(made.shape)} of {made.dtype}{role}, wanted {shape} of {like.dtype}: "
            "mend the module that it builds"
        )
