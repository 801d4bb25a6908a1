"""The two ways of numbering the target's states in checkpoints, and ours.

Ours, b, counts layers applied; vLLM's top-level ids are the same. SGLang's ids in ``eagle_config`` are of layers'
outputs, b - 1, and so are those of most trainers.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.drafter import DrafterConfig
from specdec.drafter.fusion import published_layers

log = logging.getLogger(__name__)

IDS = "eagle_aux_hidden_state_layer_ids"


def nested(config: DrafterConfig) -> dict[str, Any]:
    """What stands under ``eagle_config``; the embeddings, boundary 0, are no layer's output."""
    ids = {IDS: [b - 1 for b in config.aux_layers]} if config.aux_layers[0] else {}
    return {"use_aux_hidden_state": True, **ids}


def boundaries(raw: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """The boundaries that a flat ``config.json`` names, ascending, as engines concatenate them.

    Without any list they are EAGLE-3's.

    Raises:
        ValueError: the two lists contradict each other, or ids repeat or do not exist.
    """
    inner = raw.get("eagle_config") or {}
    if not inner.get("use_aux_hidden_state", True):
        raise ValueError("eagle_config.use_aux_hidden_state is false: a drafter without fused states is not supported")
    top, outputs = raw.get(IDS), inner.get(IDS)
    layer_ids = inner.get("layer_ids")  # vLLM's second place, in its own numbering
    for ids in (top, outputs, layer_ids):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError(f"{IDS} or layer_ids is {ids!r}, wanted a list of whole numbers")
    named = [list(ids) for ids in (top, layer_ids, _ours(outputs, num_target_layers)) if ids]
    if not named:
        return published_layers(num_target_layers)
    if any(sorted(ids) != sorted(named[0]) for ids in named):
        raise ValueError(
            f"{IDS} is {top} at the top and {outputs} in eagle_config: the second should be one less everywhere; "
            "say which boundaries were trained with --aux_layers"
        )
    _check_numbering(top, outputs if not layer_ids else None, num_target_layers)
    found = tuple(sorted(named[0]))
    if len(set(found)) < len(found) or found[0] < 0 or found[-1] > num_target_layers:
        raise ValueError(f"{IDS} names boundaries {list(found)}: each must be named once, in 0..{num_target_layers}")
    return found


def _check_numbering(top: Sequence[int] | None, outputs: Sequence[int] | None, num_target_layers: int) -> None:
    """Raise ValueError if the only list there is has EAGLE-3's own three states in the other place's numbering.

    Other lists of one kind alone are taken for what their place says; engines read ``eagle_config`` alone differently.
    """
    usual = list(published_layers(num_target_layers))
    if top and not outputs and sorted(i + 1 for i in top) == usual:
        raise ValueError(
            f"{IDS} is {list(top)}, EAGLE-3's {usual} if it numbers outputs of layers, which only eagle_config does: "
            "say which boundaries were trained with --aux_layers"
        )
    if outputs and not top and sorted(outputs) == usual:
        raise ValueError(
            f"eagle_config.{IDS} is {list(outputs)}, EAGLE-3's own boundaries, where outputs of layers are due, one "
            "less everywhere: say which boundaries were trained with --aux_layers"
        )
    if outputs and not top and max(outputs) < num_target_layers:
        log.warning(
            "%s stands in eagle_config alone: read as outputs of layers, as SGLang does; vLLM reads it as boundaries "
            "or not at all; --aux_layers says otherwise",
            IDS,
        )


def _ours(outputs: Sequence[int] | None, num_target_layers: int) -> list[int] | None:
    """Ids of outputs as boundaries. One that is L itself shows that boundaries were meant, as NVIDIA writes them."""
    if outputs and max(outputs) == num_target_layers:
        return list(outputs)
    return [i + 1 for i in outputs] if outputs else None
