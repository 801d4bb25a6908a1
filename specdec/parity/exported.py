"""The third way: the exported directory, by the reference of the engine, on the states that transformers reports.

Legend: T tokens, H hidden.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.parity import reference
from specdec.parity.said import Said
from specdec.parity.texts import Text
from specdec.target import Target


def opened(directory: Path, method: str, target: Target) -> reference.Served:
    """The directory as the engine would have it beside this target.

    Raises:
        Misread: it would not have it, or not as what it was.
    """
    served = reference.load(directory, method, target.embedding_weight(), target.head_weight())
    ids = served.settings.aux_ids
    if ids and not 0 <= ids[0] <= ids[-1] <= target.num_layers:
        raise reference.Misread(f"config.json names states {list(ids)} of a target with 0 to {target.num_layers}")
    return served


def engine(target: Target, served: reference.Served, text: Text, anchors: Sequence[int], depth: int) -> Said:
    """What the engine would read and say."""
    ids_T = torch.tensor(text.ids, device=target.device)
    states, final_TH = _states(target, ids_T)
    ids = served.settings.aux_ids
    features_TH = reference.fuse(served, [states[i] for i in ids] if ids else [final_TH])
    return Said(*reference.draft(served, ids_T, features_TH, anchors, depth))


def _states(target: Target, ids_T: Tensor) -> tuple[list[Tensor], Tensor]:
    """What enters every layer and what leaves the last, (T, H) each, and the same after the final norm."""
    entered: list[Tensor] = []
    hook = target.final_norm.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    try:
        out = target.model(input_ids=ids_T[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    *states, final = out.hidden_states
    return [state[0] for state in (*states, entered[-1])], final[0]
