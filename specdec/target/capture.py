"""Hooks for one forward: each layer gets the mask it needs, and the states that were asked for are kept.

Boundary ``b`` is the residual stream after ``b`` layers: 0 the embeddings, L the last layer's output *before* the
final norm. It is Hugging Face's index into ``hidden_states``, except that theirs is already normed at L.

Legend: B batch, T new nodes, H hidden, S key columns.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.nn.view import View
from specdec.target.anatomy import Anatomy


def layer_masks(view: View, columns: int, windows: Sequence[int | None], dtype: torch.dtype) -> list[Tensor | None]:
    """One additive (B, 1, T, S) mask per layer, over the first ``columns`` keys; equal windows share theirs.

    Additive, because PyTorch would turn a boolean mask into this one again in every layer. None where a single
    node sees every key (CPU): Hugging Face then takes its faster path, as it does in its own decoding.
    """
    made: dict[int | None, Tensor | None] = {}
    masks = []
    for window in windows:
        reaching = window if window is not None and window < columns else None
        if reaching not in made:
            made[reaching] = _additive(_allowed(view, columns, reaching), dtype)
        masks.append(made[reaching])
    return masks


def _allowed(view: View, columns: int, window: int | None) -> Tensor:
    seen_B1TS = view.mask_B1TS[..., :columns]
    if window is None:
        return seen_B1TS
    distance_BTS = view.positions_BT[:, :, None] - view.key_positions_BS[:, None, :columns]
    return seen_B1TS & (distance_BTS < window)[:, None]


def _additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor | None:
    if allowed_B1TS.shape[2] == 1 and allowed_B1TS.device.type == "cpu" and bool(allowed_B1TS.all()):
        return None
    blocked = torch.finfo(dtype).min  # not -inf: a row of it would make NaN of the whole softmax
    return allowed_B1TS.new_zeros(allowed_B1TS.shape, dtype=dtype).masked_fill_(~allowed_B1TS, blocked)


@contextlib.contextmanager
def capture(
    anatomy: Anatomy, masks: Sequence[Tensor | None], boundaries: Collection[int]
) -> Iterator[dict[int, Tensor]]:
    """While the block runs, hand out ``masks`` and fill the yielded mapping with the states at ``boundaries``.

    The hooks leave with the block, so whoever else uses the model never meets them.
    """
    states: dict[int, Tensor] = {}
    handles = []
    try:
        for i, (layer, mask) in enumerate(zip(anatomy.layers, masks, strict=True)):
            kept = states if i in boundaries else None
            hook = partial(_enter_layer, i, kept, mask, anatomy.mask_argument)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if len(anatomy.layers) in boundaries:
            tap = partial(_enter_norm, len(anatomy.layers), states)
            handles.append(anatomy.final_norm.register_forward_pre_hook(tap))
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _enter_layer(
    boundary: int,
    states: dict[int, Tensor] | None,
    mask: Tensor | None,
    mask_argument: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if states is not None:
        states[boundary] = args[0] if args else kwargs["hidden_states"]
    if len(args) > mask_argument:
        args = (*args[:mask_argument], mask, *args[mask_argument + 1 :])
    else:
        kwargs["attention_mask"] = mask
    return args, kwargs


def _enter_norm(boundary: int, states: dict[int, Tensor], module: nn.Module, args: tuple[Any, ...]) -> None:
    states[boundary] = args[0]  # a family that also norms its embeddings comes by twice: the last visit counts
