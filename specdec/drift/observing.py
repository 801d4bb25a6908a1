"""What a drafter's forward does inside, seen from outside: attention weights, the state before its norm, its sources.

A drafter's attention never forms its weights as such. Hooks hand every attention a cache that lets the real one attend
and then works out the weights from the same queries, keys and sight; nothing else is computed, and nothing differently.

Legend: B batch, h query heads, g key heads, T nodes, S key slots, d head width, N aux layers, H hidden.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from specdec.drafter import Drafter
from specdec.nn.attention import Attention
from specdec.nn.cache import StaticCache
from specdec.nn.few_queries import additive, weigh
from specdec.nn.sight import Sight
from specdec.nn.view import View


@dataclass
class Observed:
    """What the last forward did; of each the latest alone is kept."""

    weights_BhTS: dict[int, Tensor] = field(default_factory=dict)
    """By layer; float32 at least. A key out of sight has weight 0."""
    out_BTH: Tensor | None = None
    """What the last layer gave, before the output norm."""
    aux_BTNH: Tensor | None = None
    """The target's states as they came to the last ``Drafter.fuse``."""
    normed_aux_BTNH: Tensor | None = None
    """The same after the norms on them."""


class _Witness:
    """A cache that attends as the one that it stands before, and notes the weights."""

    def __init__(self, cache: StaticCache, observed: Observed) -> None:
        self.cache, self.observed = cache, observed

    def attend(
        self, layer: int, q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, sight: Sight, slots_BT: Tensor | None
    ) -> Tensor:
        """See :class:`specdec.nn.cache.KVCache`."""
        out = self.cache.attend(layer, q_BhTd, k_BgTd, v_BgTd, sight, slots_BT)
        bias_B1TS = additive(sight.mask_B1TS, q_BhTd.dtype)
        keys_BgSd = self.cache.keys_BgSd[layer].narrow(2, 0, sight.columns)
        weights = weigh(q_BhTd, keys_BgSd, bias_B1TS, q_BhTd.shape[-1] ** -0.5)
        self.observed.weights_BhTS[layer] = weights.flatten(1, 2)
        return out


@contextlib.contextmanager
def observing(drafter: Drafter) -> Iterator[Observed]:
    """Inside, forwards of the drafter on a static cache leave their traces in what is yielded.

    They give what they give unobserved, to the last bit.
    """
    observed = Observed()

    def attention(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTH, view, *rest = args
        assert isinstance(view, View) and isinstance(view.cache, StaticCache)
        return (x_BTH, view._replace(cache=_Witness(view.cache, observed)), *rest)

    def recurrence(module: nn.Module, args: tuple[Any, ...]) -> None:
        observed.out_BTH = args[0]

    def aux(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        observed.aux_BTNH, observed.normed_aux_BTNH = args[0], out

    with contextlib.ExitStack() as hooks:
        for module in drafter.modules():
            if isinstance(module, Attention):
                hooks.callback(module.register_forward_pre_hook(attention).remove)
        hooks.callback(drafter.recurrence.register_forward_pre_hook(recurrence).remove)
        hooks.callback(drafter.norms.aux.register_forward_hook(aux).remove)
        yield observed
