"""The states of the target that a checkpoint's ``config.json`` says the drafter reads.

The target's states are numbered in two ways. Ours, b, counts layers applied; vLLM's top-level ids are the same.
SGLang's ids in ``eagle_config`` are of layers' outputs, b - 1, and so are those of most trainers.
"""

import logging
from collections.abc import Mapping

from specdec.drafter import Concat
from specdec.export.keys import AUX, IDS
from specdec.export.tensors import Raw

log = logging.getLogger(__name__)

HELP = "say which boundaries were trained with --aux_layers"
FEW_LAYERS = 6  # a target of so many or fewer has no usual boundaries


def reads_last_state(raw: Raw) -> bool:
    """Return whether a flat ``config.json`` says that the drafter has no ``fc`` and reads the target's last state.

    The key is NVIDIA's ``use_aux_hidden_state``, the state a normed one.

    Raises:
        ValueError: the key or its block has another type.
    """
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"eagle_config is {inner!r:.60}, wanted a table")
    value = inner.get("use_aux_hidden_state", True)
    if not isinstance(value, bool):
        raise ValueError(
            f"eagle_config.use_aux_hidden_state is {value!r:.60}, wanted true or false"
        )
    return not value


def block_boundaries(raw: Raw) -> tuple[int, ...]:
    """Return the boundaries of a block drafter, whose flat ``config.json`` names outputs of layers.

    The checkpoints of speculators name boundaries instead.
    """
    inner = raw.get("dflash_config") or {}
    outputs = inner.get("target_layer_ids", raw.get("target_layer_ids"))
    ids = raw.get(AUX) if outputs is None else outputs
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        place = "dflash_config." if inner else ""
        raise ValueError(f"{place}target_layer_ids is {ids!r}, wanted a list of whole numbers")
    return tuple(ids if outputs is None else [i + 1 for i in ids])


def aux_boundaries(
    raw: Raw, num_target_layers: int, one_numbering: bool = False
) -> tuple[int, ...]:
    """Return the boundaries that a flat ``config.json`` names, ascending, as engines concatenate them.

    EAGLE-3's own are returned if it names none.

    Args:
        one_numbering: whether the layout has one numbering, so that a list means what its place says.

    Raises:
        ValueError: its lists contradict each other, or ids repeat or do not exist.
    """
    inner = raw.get("eagle_config") or {}
    top = raw.get(IDS)
    outputs = inner.get(IDS)
    layer_ids = inner.get("layer_ids")  # vLLM's second place for boundaries
    for ids in (top, outputs, layer_ids):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError(f"{IDS} or layer_ids is {ids!r}, wanted a list of whole numbers")
    # No output comes after the last layer's, so an id of that size shows boundaries, as NVIDIA writes them.
    are_boundaries = max(outputs or [0]) == num_target_layers
    converted = [i + (not are_boundaries) for i in outputs or ()]
    named = [sorted(ids) for ids in (top, layer_ids, converted) if ids]
    usual = []
    if num_target_layers > FEW_LAYERS or not named:
        usual = list(Concat().default_layers(num_target_layers))
    boundaries = named[0] if named else usual
    if any(ids != boundaries for ids in named):
        raise ValueError(
            f"{IDS} is {top} at the top and {outputs} in eagle_config: the second should be one less everywhere; {HELP}"
        )
    outputs_alone = bool(outputs) and not top and not layer_ids
    # A list that stands alone may equal EAGLE-3's own boundaries in the other place's numbering.
    shifted = outputs_alone and sorted(outputs or ()) == usual
    if top and not outputs:
        shifted = [i + 1 for i in boundaries] == usual
    if shifted and not one_numbering:
        raise ValueError(
            f"{IDS} is {top or outputs} {'at the top' if top else 'in eagle_config'}: EAGLE-3's {usual}, if it were "
            f"numbered as in the other of the two places: {HELP}"
        )
    if outputs_alone and not are_boundaries:
        log.warning(
            "%s stands in eagle_config alone: read as outputs of layers, as SGLang does; vLLM reads it as boundaries "
            "or not at all; --aux_layers says otherwise",
            IDS,
        )
    repeated = len(set(boundaries)) < len(boundaries)
    if repeated or boundaries[0] < 0 or boundaries[-1] > num_target_layers:
        raise ValueError(
            f"{IDS} names boundaries {boundaries}: each must be named once, in 0..{num_target_layers}"
        )
    return tuple(boundaries)
