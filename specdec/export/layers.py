"""The two ways of numbering the target's states in checkpoints, and ours.

Ours, b, counts layers applied; vLLM's top-level ids are the same. SGLang's ids in ``eagle_config`` are of layers'
outputs, b - 1, and so are those of most trainers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.drafter import DrafterConfig
from specdec.drafter.fusion import published_layers

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
    named = [list(ids) for ids in (top, layer_ids, _ours(outputs, num_target_layers)) if ids]
    if not named:
        return published_layers(num_target_layers)
    if any(sorted(ids) != sorted(named[0]) for ids in named):
        raise ValueError(
            f"{IDS} is {top} at the top and {outputs} in eagle_config: the second should be one less everywhere; "
            "say which boundaries were trained with --aux_layers"
        )
    found = tuple(sorted(named[0]))
    if len(set(found)) < len(found) or found[0] < 0 or found[-1] > num_target_layers:
        raise ValueError(f"{IDS} names boundaries {list(found)}: each must be named once, in 0..{num_target_layers}")
    return found


def _ours(outputs: Sequence[int] | None, num_target_layers: int) -> list[int] | None:
    """Ids of outputs as boundaries. One that is L itself shows that boundaries were meant, as NVIDIA writes them."""
    if outputs and max(outputs) == num_target_layers:
        return list(outputs)
    return [i + 1 for i in outputs] if outputs else None
