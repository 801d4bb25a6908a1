"""Hooks on the layers: each gets the mask it needs, and the states that were asked for are kept.

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

from specdec.nn.few_queries import additive
from specdec.nn.pieces import Cut, is_long
from specdec.nn.view import View
from specdec.target.anatomy import Anatomy

HOOKED = "_specdec_hooked"  # among a module's attributes: its tape and boundary


Mask = Tensor | Cut | None
"""What a layer gets for a mask."""


def layer_masks(
    view: View, columns: int, windows: Sequence[int | None], dtype: torch.dtype, in_pieces: bool = False
) -> list[Mask]:
    """One additive (B, 1, T, S) mask per layer, over the first ``columns`` keys; equal windows share theirs.

    Additive, because PyTorch would turn a boolean mask into this one again in every layer. None where a single
    node sees every key (CPU): Hugging Face then takes its faster path, as it does in its own decoding.

    Args:
        in_pieces: the layers take a cut in place of a mask that would be too large.
    """
    near = view._replace(sight=view.sight.cut(columns), key_positions_BS=view.key_positions_BS[:, :columns])
    made: dict[int | None, Mask] = {}
    masks = []
    for window in windows:
        reaching = window if window is not None and window < columns else None
        if reaching not in made:
            seen = (near if reaching is None else near.within(reaching)).sight
            made[reaching] = Cut.of(seen) if in_pieces and is_long(seen) else _additive(seen.mask_B1TS, dtype)
        masks.append(made[reaching])
    return masks


def _additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor | None:
    few = allowed_B1TS.shape[0] == allowed_B1TS.shape[2] == 1
    if few and allowed_B1TS.device.type == "cpu" and not torch.compiler.is_compiling() and bool(allowed_B1TS.all()):
        return None
    return additive(allowed_B1TS, dtype)


class Tape:
    """What one forward hands to the layers and keeps of them; between forwards the hooks do nothing.

    The hooks stay on the model, since ``torch.compile`` cannot follow hooks that come and go; whoever else uses the
    model does not notice them.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._masks: Sequence[Mask] = ()
        self._boundaries: Collection[int] = ()
        self._states: dict[int, Tensor] = {}
        for i, layer in enumerate(anatomy.layers):
            layer.register_forward_pre_hook(partial(self._enter_layer, i, anatomy.mask_argument), with_kwargs=True)
        anatomy.final_norm.register_forward_pre_hook(partial(self._enter_norm, len(anatomy.layers)))
        for boundary, module in enumerate((*anatomy.layers, anatomy.final_norm)):
            vars(module)[HOOKED] = (self, boundary)

    @classmethod
    def of(cls, anatomy: Anatomy) -> "Tape":
        """The tape of a model, which has one however often it is wrapped; a new one where its layers have changed."""
        found = [vars(module).get(HOOKED, (None, None)) for module in (*anatomy.layers, anatomy.final_norm)]
        tape = found[0][0]
        if tape is not None and found == [(tape, boundary) for boundary in range(len(found))]:
            return tape
        return cls(anatomy)

    @contextlib.contextmanager
    def running(self, masks: Sequence[Mask], boundaries: Collection[int]) -> Iterator[dict[int, Tensor]]:
        """While the block runs, hand out ``masks`` and fill the yielded mapping with the states at ``boundaries``."""
        self._masks, self._boundaries, self._states = masks, boundaries, {}
        try:
            yield self._states
        finally:
            self._masks, self._boundaries, self._states = (), (), {}

    def _enter_layer(
        self, boundary: int, mask_argument: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._masks:
            return None
        if boundary in self._boundaries:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]
        mask = self._masks[boundary]
        if len(args) > mask_argument:
            return (*args[:mask_argument], mask, *args[mask_argument + 1 :]), kwargs
        return args, {**kwargs, "attention_mask": mask}

    def _enter_norm(self, boundary: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if boundary in self._boundaries:  # a family that also norms its embeddings comes by twice: the last counts
            self._states[boundary] = args[0]
