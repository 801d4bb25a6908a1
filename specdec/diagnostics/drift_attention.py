"""The attention weights of drafter and target, which neither forms as it runs.

Legend: B batch, T nodes, S key slots, H hidden, h query heads, g key heads, r = h / g.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from specdec.drafter import Drafter
from specdec.nn.backend import wide
from specdec.nn.cache import StaticCache
from specdec.nn.view import View, Visibility
from specdec.target import Target
from specdec.target.model_parts import model_parts


@dataclass
class Observed:
    """What the drafter's last forward did inside, and the cache that it did it on.

    It attends as that cache does, and works out the weights from the same queries, keys and mask.
    """

    cache: StaticCache = field(init=False)
    # by layer, float32 at least; 0 for a hidden key
    weights_BhTS: dict[int, Tensor] = field(default_factory=dict)
    out_BTH: Tensor | None = None  # what the last layer gave, before the output norm

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        slots: Tensor | None,
    ) -> Tensor:
        """See :class:`specdec.nn.view.KVCache`."""
        out = self.cache.attend(layer, q_BhTd, k, v, visibility, slots)  # also writes the keys
        keys_BgSd = self.cache.keys_BgSd[layer].narrow(2, 0, visibility.columns)
        q_BgrTd = q_BhTd.unflatten(1, (keys_BgSd.shape[1], -1)) * q_BhTd.shape[-1] ** -0.5
        hidden_B11TS = ~visibility.mask_B1TS[:, :, None]
        scores = (q_BgrTd @ keys_BgSd[:, :, None].mT).masked_fill(hidden_B11TS, float("-inf"))
        weights = scores.softmax(-1, dtype=wide(scores.dtype))
        self.weights_BhTS[layer] = weights.flatten(1, 2)
        return out


@contextlib.contextmanager
def observing(drafter: Drafter) -> Iterator[Observed]:
    """Inside, forwards of the drafter on a static cache leave their traces in what is yielded.

    A drafter's attention never forms its weights as such: a hook hands its layers a cache that also does so.
    The drafter gives what it gives unobserved, to the last bit.
    """
    observed = Observed()

    def layers(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        entered, view = args
        assert isinstance(view, View) and isinstance(view.cache, StaticCache)
        observed.cache = view.cache
        return entered, view._replace(cache=observed)

    def recurrence(module: nn.Module, args: tuple[Any, ...]) -> None:
        observed.out_BTH = args[0]

    with contextlib.ExitStack() as hooks:
        hooks.callback(drafter.layers.register_forward_pre_hook(layers).remove)
        hooks.callback(drafter.recurrence.register_forward_pre_hook(recurrence).remove)
        yield observed


@contextlib.contextmanager
def attention_weights(target: Target, layers: Sequence[int]) -> Iterator[Mapping[int, Tensor]]:
    """Collect the attention weights of ``layers``, (B, h, T, S) each, of the target's forwards inside the block.

    The model attends with its family's own eager code there, the only one that forms its weights.

    Raises:
        ValueError: a layer left none.
    """
    model = target.model
    weights_BhTS = dict[int, Tensor]()
    usual = target.config._attn_implementation
    with contextlib.ExitStack() as undo:
        for number in {*layers} - {-1}:

            def keep(module: nn.Module, args: Any, output: Any, number: int = number) -> None:
                weights: Any = output[1] if isinstance(output, tuple) and len(output) > 1 else None
                if getattr(weights, "ndim", 0) == 4:
                    weights_BhTS[number] = weights

            for module in model_parts(model).layers[number].modules():
                undo.callback(module.register_forward_hook(keep).remove)
        undo.callback(model.set_attn_implementation, usual)
        model.set_attn_implementation("eager")
        yield weights_BhTS
        missing = {*layers} - {-1, *weights_BhTS}
        if missing:
            raise ValueError(
                f"{target.source}: the eager attention of layer {min(missing)} gives no weights to measure"
            )
