"""Recurrent layers in a verification: they read its tokens one after another, and keep their states after each.

A state is one for all tokens so far, so that nothing in it can be taken back, and of each text of a batch the target
accepts another number of drafts. So the states after every token are kept until that is known, and each text takes one.

Legend: B texts, T new tokens, H hidden.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer


class RecurrentLayer(LinearAttentionLayer):
    """A layer's states of B texts, and those after each token of a verification, while it is judged.

    Args:
        nodes: tokens of a verification at most. After cached text, up to this many are read one by one, and the layer
            can go back to any of them (:meth:`rewind`); more are read as the family reads them, and stay.
    """

    def __init__(self, nodes: int = 1) -> None:
        super().__init__()
        self.nodes = nodes
        self._after_TB: list[Tensor] = []  # (T, B, ...), of each state

    @property
    def states(self) -> list[Tensor]:
        """The states, (B, ...) each; none before the first text."""
        of_both = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in of_both if state is not None]

    def begin(self, b: int, batch: int, text: LinearAttentionLayer) -> None:
        """Let text ``b`` of ``batch`` have the states of a text that was read alone."""
        kinds = {"conv_states": text.conv_states, "recurrent_states": text.recurrent_states}
        for kind, states in kinds.items():
            for n, state in states.items():
                if state is None:
                    continue
                of_all = getattr(self, kind)
                if of_all[n] is None:
                    empty = state.new_zeros(batch, *state.shape[1:])
                    self.lazy_initialization(**{kind: empty}, state_idx=n)
                # in place: compiled code knows where they are
                of_all[n][b] = state[0]
        self.has_previous_state.update(text.has_previous_state)

    def keep(self, token: int, count: int) -> None:
        """The states are now those after ``token``, of ``count`` that are verified."""
        if token == 0:
            self._after_TB = [state.new_empty(count, *state.shape) for state in self.states]
        for after_TB, state in zip(self._after_TB, self.states, strict=True):
            after_TB[token] = state

    def rewind(self, count_B: Tensor) -> None:
        """Let the states be those after the first tokens of each text, at least one; the kept states are discarded."""
        for after_TB, state in zip(self._after_TB, self.states, strict=False):
            last_B = (count_B - 1).clamp_min(0).to(state.device)
            state.copy_(after_TB[last_B, torch.arange(len(last_B), device=state.device)])
        self.forget()

    def forget(self) -> None:
        """Keep no states but the present ones."""
        self._after_TB = []


class Steps:
    """Lets recurrent mixers read a verification's tokens one after another, by hooks; the rest of a layer reads all.

    Otherwise the hooks do nothing: texts are read whole, and in training. They stay on the model, as those of
    :class:`~specdec.target.attention.Tape` do.

    Args:
        mixers: of each layer the module that carries its state; None of a layer without.
    """

    def __init__(self, mixers: Sequence[nn.Module | None]) -> None:
        self._outputs_B1H: dict[int, list[Tensor]] = {}  # of the mixers that run
        for i, mixer in enumerate(mixers):
            if mixer is not None:
                mixer.register_forward_pre_hook(
                    partial(self._read_all_but_last, i), with_kwargs=True
                )
                mixer.register_forward_hook(partial(self._put_together, i), with_kwargs=True)

    def _read_all_but_last(
        self, i: int, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the mixer for every token but the last one, with which the call continues."""
        self._outputs_B1H.pop(i, None)  # of a forward that failed
        layer = _layer_of(i, args, kwargs)
        hidden_BTH = args[0] if args else kwargs["hidden_states"]
        T = hidden_BTH.shape[1]
        if layer is None or not 1 < T <= layer.nodes or not layer.states:
            return None
        outputs = []
        for token, hidden_B1H in enumerate(hidden_BTH.split(1, dim=1)):
            if args:
                args = (hidden_B1H, *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": hidden_B1H}
            if token < T - 1:
                outputs.append(mixer.forward(*args, **kwargs))
                layer.keep(token, T)
        self._outputs_B1H[i] = outputs
        return args, kwargs

    def _put_together(
        self,
        i: int,
        mixer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output_B1H: Tensor,
    ) -> Tensor | None:
        """Return what the mixer gave for all tokens, if it read them one after another."""
        outputs = self._outputs_B1H.pop(i, None)
        layer = _layer_of(i, args, kwargs)
        if outputs is None or layer is None:
            return None
        layer.keep(len(outputs), len(outputs) + 1)
        return torch.cat([*outputs, output_B1H], 1)


def _layer_of(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecurrentLayer | None:
    """The layer of the cache that a mixer was called with, if it can go back."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache) and i < len(value.layers):
            layer = value.layers[i]
            return layer if isinstance(layer, RecurrentLayer) else None
    return None
